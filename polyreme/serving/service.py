"""The service behind the endpoints: a model by name, its tokenizer, and texts that an engine writes, several at a
time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Literal

import numpy as np

from polyreme.errors import ConfigError, DataError
from polyreme.generation.choosing import TokenGrammar
from polyreme.generation.embedding import TextEmbedder, TextEncoder, TextScorer
from polyreme.generation.grammar import TextGrammars
from polyreme.generation.images import ImagePrompts
from polyreme.generation.prompt_vectors import PromptVectors
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.text_stream import TextStream
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.generation.transcriber import Transcriber, Transcription, joined, read_sound
from polyreme.serving.engine_thread import EngineRequest, EngineThread
from polyreme.serving.metrics import ServerMetrics, TextClock
from polyreme.serving.refusals import HttpRefusal

_TEXTS_AT_ONCE = 32
MOST_SECONDS = 1_800
"""Of a sound."""
State = Literal["loading", "ready", "draining"]


@dataclass(frozen=True)
class ServedModel:
    """A model as the endpoints need it: its engine, its tokenizer, the tokens that a text may have, prompt included,
    and grammars of JSON over its tokens. dtype and plan: of its parameters, for those who compare results. adapters:
    the tokenizer of each adapter that the engine knows, by name, of the model's tokens, with its own template and ends.
    chores: what the engine is to do while nobody asks, as compiling what the first requests did not need. defaults:
    fields of SamplingParams for requests that do not say them. images: of a model that reads them.
    """

    engine: Any
    tokenizer: TextTokenizer
    max_model_len: int
    grammars: TextGrammars
    dtype: str | None = None
    plan: str | None = None
    adapters: Mapping[str, TextTokenizer] = field(default_factory=dict)
    chores: Sequence[Callable[[], None]] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    images: ImagePrompts | None = None


AnyModel = ServedModel | TextEncoder | Transcriber
_WORK: dict[type[Any], tuple[str, str]] = {
    ServedModel: ("writes text", "/v1/completions"),
    TextScorer: ("scores texts", "/v1/rerank"),
    TextEmbedder: ("makes vectors", "/v1/embeddings"),
    Transcriber: ("writes down sounds", "/v1/audio/transcriptions"),
}
"""What a kind of model does, and where it is asked to."""


@dataclass(frozen=True)
class ServiceLimits:
    """max_waiting: texts that may wait beside the max_num_seqs that are written; request_seconds: until a request is
    given up; body_bytes, header_bytes: of a request; sound_bytes: of one with a sound; header_seconds, body_seconds:
    until one has come; send_seconds: until a client takes what is sent."""

    max_num_seqs: int = 8
    max_waiting: int = 128
    request_seconds: float = 600.0
    body_bytes: int = 4 << 20
    sound_bytes: int = 25 << 20
    header_bytes: int = 32 << 10
    header_seconds: float = 8.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 and not (name == "max_waiting" and value == 0):
                raise ConfigError(f"ServiceLimits: {name}={value!r} is out of range; give more than 0")


@dataclass
class TextPiece:
    """A piece of one text: new text, the tokens it is of with their logprobs, and at its end why it ended.

    prompt_logprobs, prompt_top_logprobs: of the prompt's tokens but the first, where they were asked for, with the
    first piece. num_echoed: how many of the tokens are of the prompt.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    num_echoed: int = 0

    def add(self, later: TextPiece) -> None:
        """Append the next piece of this text."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.top_logprobs += later.top_logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.prompt_top_logprobs += later.prompt_top_logprobs
        self.finish_reason = later.finish_reason


class TextService:
    """Texts of one model. It is loading until `start`; then requests are taken.

    names: of the model, the first of which answers carry. adapters: names of adapters of it, which requests say too.
    Raises ConfigError for a name that comes twice.
    """

    names: tuple[str, ...]
    limits: ServiceLimits
    created: int
    adapters: tuple[str, ...]
    num_texts: int
    metrics: ServerMetrics

    def __init__(self, names: Sequence[str], limits: ServiceLimits | None = None, adapters: Sequence[str] = ()) -> None:
        self.names, self.limits, self.created = tuple(names), limits or ServiceLimits(), int(time.time())
        self.adapters = tuple(adapters)
        twice = next((name for name, count in Counter([*names, *adapters]).items() if count > 1), None)
        if twice is not None:
            raise ConfigError(f"two models are to be served as {twice}; give each adapter a name of its own")
        self.state: State = "loading"
        self.num_texts = 0
        self.metrics = ServerMetrics(self.names[0])
        self._model: AnyModel | None = None
        self._thread: EngineThread | None = None
        # vectors, of texts or of images, and sounds are computed one call after another, beside the event loop
        self._embedding = ThreadPoolExecutor(1, "polyreme-embedding")

    def start(self, model: AnyModel) -> None:
        """Take requests for this model from now on; called in the event loop."""
        self._model = model
        if isinstance(model, ServedModel):
            self.metrics.note(model.engine.statistics)
            self._thread = EngineThread(model.engine, asyncio.get_running_loop(), self.metrics.note, model.chores)
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self.state = "draining"

    def close(self) -> None:
        """Take no more requests, and end the engine's thread."""
        self.drain()
        if self._thread is not None:
            self._thread.close()
        self._embedding.shutdown(cancel_futures=True)

    @property
    def model(self) -> ServedModel:
        """The model that writes. Raises HttpRefusal: 503 while there is none, 400 where it does other work."""
        return self._of_task(ServedModel, "writes no text")

    @property
    def embedder(self) -> TextEmbedder:
        """The model that makes vectors. Raises HttpRefusal: 503 while there is none, 400 where it does other work."""
        return self._of_task(TextEmbedder, "makes no vectors")

    @property
    def transcriber(self) -> Transcriber:
        """The model that hears. Raises HttpRefusal: 503 while there is none, 400 where it does other work."""
        return self._of_task(Transcriber, "hears no sounds")

    def _of_task(self, kind: type[Any], lack: str) -> Any:
        model = self._any_model()
        if isinstance(model, kind):
            return model
        work = next(work for other, work in _WORK.items() if isinstance(model, other))
        raise HttpRefusal(400, f"{self.names[0]} {work[0]} and {lack}; ask {work[1]}", code="task")

    @property
    def scorer(self) -> TextScorer | None:
        """The model that scores pairs of texts, None where it does something else. Raises HttpRefusal 503 while there
        is none."""
        model = self._any_model()
        return model if isinstance(model, TextScorer) else None

    def writing_tokenizer(self, name: str) -> TextTokenizer:
        """tokenizer_of, of a model that writes. Raises as `model` does."""
        model = self.model
        return model.adapters.get(name, model.tokenizer)

    def tokenizer_of(self, name: str | None) -> TextTokenizer:
        """The tokenizer of the model, or of the adapter of this name. Raises HttpRefusal 503 while there is none."""
        model = self._any_model()
        if isinstance(model, ServedModel) and name is not None and name in model.adapters:
            return model.adapters[name]
        return model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that the model takes. Raises HttpRefusal 503 while there is none."""
        model = self._any_model()
        if isinstance(model, Transcriber):
            return model.model.config.seq_len
        return model.max_tokens if isinstance(model, TextEncoder) else model.max_model_len

    @property
    def dtype(self) -> str | None:
        """The dtype of the parameters, where it is known."""
        return self._model.dtype if isinstance(self._model, ServedModel) else None

    @property
    def plan(self) -> str | None:
        """The plan of the parameters, where it is known."""
        return self._model.plan if isinstance(self._model, ServedModel) else None

    def _any_model(self) -> AnyModel:
        if self._model is None or self.state != "ready":
            message = f"the model is {self.state}; try again"
            raise HttpRefusal(503, message, code=self.state, headers={"Retry-After": "1"})
        return self._model

    def name_of(self, asked: str | None) -> str:
        """The name that answers to a request for `asked` carry: the model's, or the adapter's. Raises HttpRefusal 404
        for what is neither."""
        if asked in self.adapters:
            return asked
        if asked is not None and asked not in self.names:
            raise HttpRefusal(
                404,
                f"no model {asked[:200]!r} here; there is {', '.join([*self.names, *self.adapters])}",
                param="model",
                code="model_not_found",
            )
        return self.names[0]

    def room_after(self, prompt: Sequence[int], param: str, max_tokens: int | None) -> int:
        """Tokens that may be written after a prompt: max_tokens, or all that fit. Raises HttpRefusal 400."""
        room = self.model.max_model_len - len(prompt)
        if not prompt:
            raise HttpRefusal(400, f"{param}: has no tokens; give a text that is not empty", param=param, code="empty")
        if room < (1 if max_tokens is None else max_tokens):
            wanted = "" if max_tokens is None else f" and {max_tokens} to write"
            raise HttpRefusal(
                400,
                f"{param}: {len(prompt)} tokens{wanted} do not fit into the {self.model.max_model_len} of the model; "
                "shorten the prompt or ask for fewer",
                param="max_tokens" if room > 0 else param,
                code="context_length_exceeded",
            )
        return room if max_tokens is None else max_tokens

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images. Raises HttpRefusal 503 while there is none."""
        model = self._any_model()
        return isinstance(model, ServedModel) and model.images is not None

    async def see(self, prompt: Sequence[int], images: Sequence[Any]) -> tuple[list[int], PromptVectors | None]:
        """A prompt with a place for each vector of its images, data: URLs, and the vectors. Raises HttpRefusal: 429
        where too many ask at once, 400 for images that the model does not take."""
        if not self.reads_images:
            return [*prompt], None
        expand = self.model.images.expand  # type: ignore[union-attr]  # which reads_images says that there are
        self._admit(1)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._embedding, expand, prompt, images)
        except (ConfigError, DataError) as error:
            raise HttpRefusal(400, f"messages: {error}", param="messages", code="invalid_image") from None
        finally:
            self.num_texts -= 1

    async def embed(self, texts: Sequence[Sequence[int]], param: str = "input") -> np.ndarray:
        """Vectors of token ids, float32 [texts, width]; param: the field that they come from, for refusals.

        Raises HttpRefusal: 429 where too many ask at once, 400 for texts that the model does not take.
        """
        return await self._in_parts(self.embedder.embed, texts, param)

    async def score(self, scorer: TextScorer, pairs: Sequence[Any], param: str) -> np.ndarray:
        """Scores of pairs that scorer.encode_pair gave, float32 [pairs]. Raises as `embed`."""
        return await self._in_parts(scorer.score, pairs, param)

    async def transcribe(
        self, sound: BinaryIO, language: str | None, task: str | None, settings: Mapping[str, Any]
    ) -> Transcription:
        """What is said in a WAVE file, as of Transcriber.transcribe; between its windows others' come in.

        Raises HttpRefusal: 429 where too many ask at once, 400 for a sound or settings that the model does not take,
        504 after request_seconds.
        """
        transcriber, loop = self.transcriber, asyncio.get_running_loop()
        self._admit(1)
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                samples = await loop.run_in_executor(self._embedding, read_sound, sound, MOST_SECONDS)
                if not len(samples):
                    raise ConfigError("file: has no samples; give a sound of some length")
                coming, heard = transcriber.windows(samples, language, task, **settings), []
                while (window := await loop.run_in_executor(self._embedding, next, coming, None)) is not None:
                    heard.append(window)
                return joined(heard, samples)
        except TimeoutError:
            seconds = self.limits.request_seconds
            raise HttpRefusal(504, f"not done within {seconds:g} seconds; send less", code="timeout") from None
        except (ConfigError, DataError) as error:
            param = next((name for name in ("language", "task") if f"{name}=" in str(error)), "file")
            raise HttpRefusal(400, str(error), param=param, code="invalid_value") from None
        finally:
            self.num_texts -= 1

    async def _in_parts(self, compute: Callable[[Any], np.ndarray], texts: Sequence[Any], param: str) -> np.ndarray:
        """What compute gives of texts, a part of them after the other, between which others come in."""
        loop = asyncio.get_running_loop()
        self._admit(1)
        try:
            parts = [texts[start : start + _TEXTS_AT_ONCE] for start in range(0, len(texts), _TEXTS_AT_ONCE)]
            return np.concatenate([await loop.run_in_executor(self._embedding, compute, part) for part in parts])
        except ConfigError as error:
            raise HttpRefusal(400, str(error), param=param, code="context_length_exceeded") from None
        finally:
            self.num_texts -= 1

    @asynccontextmanager
    async def writing(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        prompt_logprobs: int | None = None,
        grammar: TokenGrammar | None = None,
        name: str | None = None,
        vectors: Sequence[PromptVectors | None] = (),
    ) -> AsyncIterator[AsyncIterator[TextPiece]]:
        """The pieces of the texts after the prompts, as they come, n of each by its params; leaving ends them.

        name: of the adapter that writes; the model itself if it is none. vectors: of each prompt, or None. A piece's
        index is prompt number times n plus the text's. Raises HttpRefusal: 429 where too much is asked, 400 for what
        the engine does not take, 504 after request_seconds.
        """
        model, thread, tokenizer = self.model, self._thread, self.writing_tokenizer(name or self.names[0])
        assert thread is not None
        adapter = name if name in self.adapters else None
        ends = set(tokenizer.end) - set(model.tokenizer.end)  # those that the engine does not know
        rows = [
            (prompt, replace(own, n=1, seed=own.seed + copy, stop_token_ids=_ends_of(own, ends)), seen)
            for prompt, own, seen in zip(prompts, params, vectors or [None] * len(prompts), strict=True)
            for copy in range(own.n)
        ]
        self._admit(len(rows))
        request_id = uuid.uuid4().hex
        requests = [
            EngineRequest(
                f"{request_id}-{number}", prompt, own, prompt_logprobs, grammar and grammar.copy(), adapter, seen
            )
            for number, (prompt, own, seen) in enumerate(rows)
        ]
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        clocks = {request.request_id: self.metrics.clock() for request in requests}
        seconds = self.limits.request_seconds
        late = HttpRefusal(504, f"not done within {seconds:g} seconds; ask for less", code="timeout")
        deadline = asyncio.get_running_loop().call_later(seconds, outputs.put_nowait, late)
        try:
            try:
                await thread.add(requests, outputs.put_nowait)
            except ConfigError as error:
                message = str(error)
                for request in requests:  # whose names no client knows
                    message = message.removeprefix(f"request {request.request_id!r}: ")
                field = message.partition(":")[0]
                param = field if field.isidentifier() else None
                raise HttpRefusal(400, message, param=param, code="invalid_value") from None
            yield self._pieces(tokenizer, thread, requests, outputs, clocks)
        finally:
            deadline.cancel()
            self.num_texts -= len(rows)
            for clock in clocks.values():
                clock.end("abort")
            thread.abort([request.request_id for request in requests])

    async def _pieces(
        self,
        tokenizer: TextTokenizer,
        thread: EngineThread,
        requests: Sequence[EngineRequest],
        outputs: asyncio.Queue[Any],
        clocks: dict[str, TextClock],
    ) -> AsyncIterator[TextPiece]:
        streams = {
            request.request_id: (number, TextStream(tokenizer, request.params.stop, request.params.min_tokens))
            for number, request in enumerate(requests)
        }
        while streams:
            output = await outputs.get()
            if isinstance(output, Exception):
                refusal = _as_refusal(output)
                raise refusal from (None if refusal is output else output)
            if output.request_id not in streams:
                continue  # a token that was chosen before its abort came
            number, stream = streams[output.request_id]
            reason = output.finish_reason
            text, count = "", 0
            for token in output.token_ids:
                # what was made with the token that ends a text is not of it
                count += 0 if stream.stopped else 1
                text += stream.add([token])
            if count:
                clocks[output.request_id].token(count)
            if reason == "error":
                clocks.pop(output.request_id).end("error")
                raise HttpRefusal(500, "the model's logits are not finite for this request", code="numerics")
            if stream.stopped:
                reason = "stop"
                thread.abort([output.request_id])
            elif reason is not None:
                text += stream.finish()
                reason = "stop" if stream.stopped else reason
            if reason is not None:
                del streams[output.request_id]
                clocks.pop(output.request_id).end(reason)
            yield TextPiece(
                number,
                text,
                list(output.token_ids[:count]),
                list(output.logprobs[:count]),
                list(output.top_logprobs[:count]),
                reason,
                output.num_cached,
                list(output.prompt_logprobs),
                list(output.prompt_top_logprobs),
            )

    def _admit(self, count: int) -> None:
        most = self.limits.max_num_seqs + self.limits.max_waiting
        if count > most:
            raise HttpRefusal(
                400, f"n: {count} texts in one request are over the {most} that the server holds", param="n"
            )
        if self.num_texts + count > most:
            self.metrics.reject()
            raise HttpRefusal(
                429,
                f"{self.num_texts} texts are being written or wait, and {most} may; try again",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self.num_texts += count


def _ends_of(params: SamplingParams, ends: Collection[int]) -> Sequence[int]:
    """The tokens that end a text, with those of its tokenizer."""
    return params.stop_token_ids if params.ignore_eos else [*params.stop_token_ids, *sorted(ends)]


def _as_refusal(error: Exception) -> HttpRefusal:
    """The refusal for an exception in the engine, without its details."""
    if isinstance(error, HttpRefusal):
        return error
    return HttpRefusal(500, "the engine failed on this request; the server's log says how", code="engine_error")
