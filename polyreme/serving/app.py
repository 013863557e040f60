"""The endpoints of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.generation.choosing import TokenGrammar
from polyreme.generation.embedding import TextScorer
from polyreme.generation.grammar import without_words
from polyreme.generation.images import parts_of_messages
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.serving.answers import ChatAnswer, CompletionAnswer, embedding_answer, rerank_answer, score_answer
from polyreme.serving.metrics import CONTENT_TYPE
from polyreme.serving.page_files import page_file
from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    WantedForm,
    read_body,
)
from polyreme.serving.responses import ResponseAnswer, ResponsesBody
from polyreme.serving.service import TextPiece, TextService
from polyreme.serving.sounds import TranscriptionBody, TranslationBody, read_sound_body, written
from polyreme.serving.streaming import ClientGoneError, EventStream, as_json, unless_gone
from polyreme.serving.token_texts import TokenTexts
from polyreme.serving.tool_calls import calls_schema, form_of
from polyreme.serving.web import HTTPException, Request, Response, Route, Starlette
from polyreme.version import full_version

_MOST_CHARS_AT_ONCE = 2000
"""Characters that are tokenized in the event loop: under a millisecond."""
Writing = Callable[[], AbstractAsyncContextManager[AsyncIterator[TextPiece]]]
"""Begins to write the texts of a request, as of TextService.writing."""
_log = logging.getLogger("polyreme.serving")


class Endpoints:
    """The endpoints of a service."""

    def __init__(self, service: TextService) -> None:
        self.service = service
        self._texts: TokenTexts | None = None

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self.page),
            Route("/page/{name}", self.page),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/audio/transcriptions", self.transcribe, methods=["POST"]),
            Route("/v1/audio/translations", self.translate, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            *(Route(path, self.score, methods=["POST"]) for path in ("/v1/score", "/score")),
            *(Route(path, self.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers=refusal_handlers())

    async def page(self, request: Request) -> Response:
        """The chat page, and what it is made of."""
        return page_file(request.path_params.get("name", "index.html"), "polyreme.serving")

    async def health(self, request: Request) -> Response:
        """200 when requests are taken, 503 before and after."""
        is_ready = self.service.state == "ready"
        return _json({"status": self.service.state}, 200 if is_ready else 503)

    async def version(self, request: Request) -> Response:
        """The version of polyreme."""
        return _json({"version": full_version})

    async def metrics(self, request: Request) -> Response:
        """Counts and times, as Prometheus reads them."""
        return Response(self.service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """The names that this model is served under, and those of its adapters."""
        names = [*self.service.names, *self.service.adapters]
        return _json({"object": "list", "data": [self._described(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        self.service.name_of(name)
        return _json(self._described(name))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = read_body(CompletionBody, await request.body())
        name = self.service.name_of(body.model)
        tokenizer = self.service.writing_tokenizer(name)
        prompts = [
            await _encoded(tokenizer, prompt, body.add_special_tokens)
            if isinstance(prompt, str)
            else self._ids(prompt, "prompt")
            for prompt in body.prompt
        ]
        wanted = 16 if body.max_tokens is None else body.max_tokens
        scored = body.logprobs if body.echo else None
        least = wanted if scored is None else max(1, wanted)
        limits = [self.service.room_after(prompt, "prompt", least) for prompt in prompts]
        echoes = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in body.prompt
        ]
        answer = CompletionAnswer(body, name, self._token_texts(), prompts, echoes)
        if not least:
            # nothing is written after what is echoed, and nothing asked of it
            pieces = [TextPiece(index, finish_reason="length") for index in range(len(prompts) * answer.copies)]
            return _json(answer.whole([answer.whole_choice(piece) for piece in pieces]))
        params = [body.sampling(limit, body.logprobs, self.service.model.defaults) for limit in limits]
        grammar = await self._grammar(body)
        writing = functools.partial(self.service.writing, prompts, params, scored, grammar, name)
        return await self._answer(request, body, answer, writing, drops_text=not wanted)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = read_body(ChatBody, await request.body())
        answer, writing = await self._conversation(body)
        return await self._answer(request, body, answer, writing)

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses: a conversation, in OpenAI's newer form."""
        body = read_body(ResponsesBody, await request.body())
        chat = body.as_chat()
        answer, writing = await self._conversation(chat)
        response = ResponseAnswer(body, self.service.name_of(body.model))
        if body.stream:
            events = response.events(self._events(chat, answer, writing))
            return EventStream(events, self.service.limits.send_seconds, is_named=True)
        return _json(response.whole(await unless_gone(request.receive, self._whole(answer, writing, False))))

    async def _conversation(self, body: ChatBody) -> tuple[ChatAnswer, Writing]:
        """The answer to a conversation before its text is there, and what writes that."""
        name = self.service.name_of(body.model)
        tokenizer = self.service.writing_tokenizer(name)
        template = tokenizer.template
        if body.called and (template is None or "tools" not in template):
            message = "the model's chat template has no place for tools; take a model that was trained to call them"
            raise HttpRefusal(400, f"tools: {message}", param="tools", code="unsupported")
        if body.called and not body.is_call_forced and form_of(template) is None:
            message = "how this model writes calls is not known here; force one by tool_choice 'required' or by name"
            raise HttpRefusal(400, f"tools: {message}", param="tools", code="unsupported")
        messages, images = self._read_images(body.conversation())
        prompt = await _rendered(tokenizer, messages, body.variables())
        prompt, vectors = await self.service.see(prompt, images)
        limit = self.service.room_after(prompt, "messages", body.limit)
        answer = ChatAnswer(body, name, self._token_texts(), [prompt], form_of(template))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = [body.sampling(limit, logprobs, self.service.model.defaults)]
        grammar = await self._grammar(body)
        return answer, functools.partial(self.service.writing, [prompt], params, None, grammar, name, [vectors])

    def _read_images(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Messages as the template reads them, and their images. Raises HttpRefusal 400 for images of a model that
        reads none."""
        if self.service.reads_images:
            return parts_of_messages(messages)
        if any(not isinstance(message["content"], str) for message in messages):
            message = f"{self.service.names[0]} reads text alone; leave images out"
            raise HttpRefusal(400, f"messages: {message}", param="messages", code="unsupported")
        return messages, []

    async def transcribe(self, request: Request) -> Response:
        """POST /v1/audio/transcriptions: what is said in a sound."""
        return await self._heard(request, TranscriptionBody, None)

    async def translate(self, request: Request) -> Response:
        """POST /v1/audio/translations: the same in English."""
        return await self._heard(request, TranslationBody, "translate")

    async def _heard(self, request: Request, kind: type[TranslationBody], task: str | None) -> Response:
        body = read_sound_body(kind, request.headers.get("content-type", ""), await request.body())
        self.service.name_of(body.model)
        language = getattr(body, "language", None) or None
        said = self.service.transcribe(body.sound, language, task, body.settings)
        answer = written(await unless_gone(request.receive, said), body)
        return Response(answer, media_type="text/plain") if isinstance(answer, str) else _json(answer)

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        body = read_body(EmbeddingBody, await request.body())
        name = self.service.name_of(body.model)
        width = self.service.embedder.width
        if body.dimensions not in (None, width):
            raise HttpRefusal(
                400, f"dimensions: vectors have {width}; leave it out", param="dimensions", code="unsupported"
            )
        vectors, num_tokens = await self._vectors(request, name, body.input, "input")
        return _json(embedding_answer(name, vectors, num_tokens, body.encoding_format))

    async def score(self, request: Request) -> Response:
        """POST /v1/score: of each pair of texts what a scorer gives, or the cosine of their vectors."""
        body = read_body(ScoreBody, await request.body())
        name = self.service.name_of(body.model)
        if (scorer := self.service.scorer) is not None:
            repeated = body.text_1 * (len(body.text_2) // len(body.text_1))
            pairs = list(zip(repeated, body.text_2, strict=True))
            return _json(score_answer(name, *await self._scores(request, scorer, pairs, "text_1")))
        vectors, num_tokens = await self._vectors(request, name, [*body.text_1, *body.text_2], "text_1")
        first, second = np.split(vectors, [len(body.text_1)])
        return _json(score_answer(name, (first * second).sum(-1).tolist(), num_tokens))

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank: documents by what a scorer gives of each beside the query, or by the cosine of vectors."""
        body = read_body(RerankBody, await request.body())
        name = self.service.name_of(body.model)
        if (scorer := self.service.scorer) is not None:
            pairs = [(body.query, document) for document in body.documents]
            scores, num_tokens = await self._scores(request, scorer, pairs, "documents")
            return _json(rerank_answer(name, body.documents, scores, body.top_n, num_tokens))
        vectors, num_tokens = await self._vectors(request, name, [body.query, *body.documents], "documents")
        scores = (vectors[1:] * vectors[0]).sum(-1).tolist()
        return _json(rerank_answer(name, body.documents, scores, body.top_n, num_tokens))

    async def _scores(
        self, request: Request, scorer: TextScorer, pairs: Sequence[tuple[Any, Any]], param: str
    ) -> tuple[list[float], int]:
        """Scores of pairs of texts, and how many tokens they have. Raises HttpRefusal 400 for token ids."""
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise HttpRefusal(400, f"{param}: the model reads pairs; give texts, not token ids", param=param)
        encoded = await asyncio.to_thread(lambda: [scorer.encode_pair(*pair) for pair in pairs])
        scores = await unless_gone(request.receive, self.service.score(scorer, encoded, param))
        return scores.tolist(), sum(len(ids) for ids, _ in encoded)

    async def _vectors(
        self, request: Request, name: str, given: Sequence[str | list[int]], param: str
    ) -> tuple[np.ndarray, int]:
        """Vectors of texts or token ids, [texts, width] of length 1, and how many tokens they have."""
        tokenizer = self.service.tokenizer_of(name)
        texts = [
            await _encoded(tokenizer, text, True) if isinstance(text, str) else self._ids(text, param) for text in given
        ]
        return await unless_gone(request.receive, self.service.embed(texts, param)), sum(map(len, texts))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids of a text or of a conversation as the chat template writes it."""
        body = read_body(TokenizeBody, await request.body())
        tokenizer = self.service.tokenizer_of(self.service.name_of(body.model))
        if body.prompt is not None:
            ids = await _encoded(tokenizer, body.prompt, body.add_special_tokens)
        else:
            messages, images = self._read_images([m.as_template_reads() for m in body.messages or ()])
            ids = await _rendered(tokenizer, messages, {})
            ids, _ = await self.service.see(ids, images)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self.service.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = self._token_texts().texts_of(ids)
        return _json(answer)

    async def tokenizer_info(self, request: Request) -> Response:
        """The facts that a client needs to write prompts itself: special tokens and the chat template."""
        tokenizer = self.service.tokenizer_of(None)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        known = tokenizer.special_tokens
        answer: dict[str, Any] = {name: known.get(name) for name in names}
        if answer["eos_token"] is None and tokenizer.end:
            answer["eos_token"] = tokenizer.tokenizer.id_to_token(tokenizer.end[0])
        return _json(answer | {"chat_template": tokenizer.template, "vocab_size": tokenizer.vocab_size})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens included."""
        body = read_body(DetokenizeBody, await request.body())
        tokenizer = self.service.tokenizer_of(self.service.name_of(body.model))
        text = tokenizer.decode(self._ids(body.tokens, "tokens"), skip_special_tokens=False)
        return _json({"prompt": text})

    # parts

    async def _answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        answer: CompletionAnswer | ChatAnswer,
        writing: Writing,
        *,
        drops_text: bool = False,
    ) -> Response:
        if body.stream:
            return EventStream(self._events(body, answer, writing), self.service.limits.send_seconds)
        return _json(await unless_gone(request.receive, self._whole(answer, writing, drops_text)))

    async def _whole(self, answer: CompletionAnswer | ChatAnswer, writing: Writing, drops_text: bool) -> dict[str, Any]:
        texts = [TextPiece(index) for index in range(len(answer.prompts) * answer.copies)]
        async with writing() as pieces:
            async for piece in pieces:
                if drops_text:
                    # one token was asked for, to learn of the prompt's
                    piece = TextPiece(
                        piece.index,
                        finish_reason="length",
                        prompt_logprobs=piece.prompt_logprobs,
                        prompt_top_logprobs=piece.prompt_top_logprobs,
                    )
                answer.counts.add(piece)
                texts[piece.index].add(piece)
        return answer.whole([answer.whole_choice(text) for text in texts])

    async def _events(
        self, body: CompletionBody | ChatBody, answer: CompletionAnswer | ChatAnswer, writing: Writing
    ) -> AsyncGenerator[dict[str, Any] | None]:
        # tokens whose text is not sure yet wait here, with their logprobs
        waiting = [TextPiece(index) for index in range(len(answer.prompts) * answer.copies)]
        async with writing() as pieces:
            yield None
            for choice in answer.first_choices():
                yield answer.event([choice], body)
            async for piece in pieces:
                answer.counts.add(piece)
                index = piece.index
                for choice in answer.first_choices(piece):
                    yield answer.event([choice], body)
                waiting[index].add(piece)
                if piece.text or piece.finish_reason is not None:
                    choice = answer.choice(waiting[index], ends=piece.finish_reason is not None)
                    yield answer.event([choice], body)
                    waiting[index] = TextPiece(index)
        if body.include_usage:
            yield answer.usage_event()

    async def _grammar(self, body: CompletionBody | ChatBody) -> TokenGrammar | None:
        grammars, grammar = self.service.model.grammars, None
        forms = [_form_of_calls(body)] if isinstance(body, ChatBody) and body.is_call_forced else body.forms
        for form in forms:
            make = {"schema": grammars.of_schema, "regex": grammars.of_regex, "choice": grammars.of_choice}[form.kind]
            try:
                grammar = await asyncio.to_thread(make, form.value)
            except ConfigError as error:
                raise HttpRefusal(400, str(error), param=form.param, code="invalid_schema") from None
        try:
            return without_words(body.bad_words, self.service.tokenizer_of(body.model), grammars.vocab_size, grammar)
        except ConfigError as error:
            raise HttpRefusal(400, str(error), param="bad_words", code="invalid_value") from None

    def _ids(self, ids: list[int], param: str) -> list[int]:
        known = self.service.tokenizer_of(None).vocab_size
        wrong = next((i for i in ids if not 0 <= i < known), None)
        if wrong is not None:
            told = str(wrong) if abs(wrong) < 2**63 else "a number"
            raise HttpRefusal(
                400, f"{param}: id {told} is not among the {known} of the tokenizer", param=param, code="token_id"
            )
        return ids

    def _token_texts(self) -> TokenTexts:
        if self._texts is None:
            self._texts = TokenTexts(self.service.tokenizer_of(None))
        return self._texts

    def _described(self, name: str) -> dict[str, Any]:
        is_ready = self.service.state == "ready"
        return {
            "id": name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "polyreme",
            "root": name if name in self.service.adapters else self.service.names[0],
            "parent": self.service.names[0] if name in self.service.adapters else None,
            "max_model_len": self.service.max_model_len if is_ready else None,
            "dtype": self.service.dtype if is_ready else None,
            "plan": self.service.plan if is_ready else None,
            "has_chat_template": self.service.tokenizer_of(name).template is not None if is_ready else None,
        }


async def _encoded(tokenizer: TextTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= _MOST_CHARS_AT_ONCE:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def _rendered(
    tokenizer: TextTokenizer, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
) -> list[int]:
    try:
        return await asyncio.to_thread(tokenizer.encode_chat, messages, **variables)
    except ConfigError as error:
        raise HttpRefusal(400, str(error), param="messages", code="chat_template") from None


def _form_of_calls(body: ChatBody) -> WantedForm:
    """What a forced call follows: a list of calls, or of the tool that is named the arguments."""
    tools = [(tool.name, tool.parameters or {"type": "object"}) for tool in body.called]
    if body.is_call_by_schema:
        schema = calls_schema(tools, several=body.parallel_tool_calls is not False)
    else:
        schema = tools[0][1]
    return WantedForm("tools", "schema", schema)


def _json(body: Any, status: int = 200) -> Response:
    return Response(as_json(body), status, media_type="application/json")


def refusal_handlers() -> dict[Any, Any]:
    """Handlers for exceptions of endpoints: error bodies for refusals, for what is not there and for faults."""
    return {
        HttpRefusal: _refused,
        HTTPException: _no_route,
        ClientGoneError: _client_gone,
        Exception: _failed,
    }


def _as_response(refusal: HttpRefusal) -> Response:
    return Response(refusal.encoded(), refusal.status, refusal.headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpRefusal)
    if error.status == 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _as_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    message = {404: f"no {path} here", 405: f"{path} does not take {request.method}"}
    refusal = HttpRefusal(error.status_code, message.get(error.status_code, error.detail), headers=error.headers)
    return _as_response(refusal)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    message = "the server failed on this request; its log says how"
    # uvicorn closes the connection after the exception
    return _as_response(HttpRefusal(500, message, code="internal_error", headers={"Connection": "close"}))
