"""Bodies of answers, as OpenAI's clients read them."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polyreme.serving.requests import ChatBody, CompletionBody, NamedTool
from polyreme.serving.service import TextPiece
from polyreme.serving.token_texts import TokenTexts
from polyreme.serving.tool_calls import ToolCall, ToolCallReader, ToolForm

_LEAST_LOGPROB = -9999.0
"""For a probability of zero, as JSON has no infinity."""


class TokenCounts:
    """Tokens of a request: of its prompts, of them those whose keys and values were there, and of its texts."""

    prompt: int
    cached: int
    written: int

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt, self.cached, self.written = sum(map(len, prompts)), 0, 0
        self._cached: dict[int, int] = {}

    def add(self, piece: TextPiece) -> None:
        """Count a piece."""
        self.written += len(piece.token_ids)
        self._cached[piece.index] = max(piece.num_cached, self._cached.get(piece.index, 0))

    def body(self, copies: int) -> dict[str, Any]:
        """OpenAI's usage; of n copies of a prompt the first one's cached tokens count."""
        cached = sum(count for index, count in self._cached.items() if index % copies == 0)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class _Answer:
    """Base of both kinds of answers. chunk: of a stream."""

    kind: str
    chunk: str
    prefix: str

    def __init__(self, model: str, texts: TokenTexts, copies: int, prompts: Sequence[Sequence[int]]) -> None:
        self.texts, self.copies, self.prompts = texts, copies, prompts
        self.counts = TokenCounts(prompts)
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer at once."""
        return self.head | {"object": self.kind, "choices": choices, "usage": self.counts.body(self.copies)}

    def event(self, choices: list[dict[str, Any]], body: CompletionBody | ChatBody) -> dict[str, Any]:
        """One event of a stream; where usage was asked for all but the last say null, or the counts so far."""
        usage: dict[str, Any] = {"usage": None} if body.include_usage else {}
        if body.counts_always:
            usage = {"usage": self.counts.body(self.copies)}
        return self.head | {"object": self.chunk, "choices": choices} | usage

    def usage_event(self) -> dict[str, Any]:
        """The last event."""
        return self.head | {"object": self.chunk, "choices": [], "usage": self.counts.body(self.copies)}


class CompletionAnswer(_Answer):
    """Answers of /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, body: CompletionBody, model: str, texts: TokenTexts, prompts: Sequence[Sequence[int]], echoes: list[str]
    ) -> None:
        super().__init__(model, texts, body.n or 1, prompts)
        self._body, self._echoes = body, echoes
        self._offsets = [0] * (len(prompts) * self.copies)
        self._begun: set[int] = set()

    def first_choices(self, piece: TextPiece | None = None) -> list[dict[str, Any]]:
        """What a stream begins with, and a text before its first piece: the prompt, where it is echoed."""
        if not self._body.echo or piece is None or piece.index in self._begun:
            return []
        self._begun.add(piece.index)
        return [self.choice(self._echo(piece), ends=False)]

    def whole_choice(self, text: TextPiece) -> dict[str, Any]:
        """A text at once."""
        if self._body.echo:
            echo = self._echo(text)
            echo.add(text)
            text = echo
        return self.choice(text, ends=True)

    def choice(self, text: TextPiece, *, ends: bool) -> dict[str, Any]:
        """A text, or a part of one."""
        choice: dict[str, Any] = {
            "index": text.index,
            "text": text.text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(text),
            "finish_reason": text.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = text.token_ids[text.num_echoed :]
            if ends:
                choice["prompt_token_ids"] = list(self.prompts[text.index // self.copies])
        return choice

    def _echo(self, text: TextPiece) -> TextPiece:
        """The prompt of a text as if it had been written, with the log-probabilities that came with the text."""
        number = text.index // self.copies
        if self._body.logprobs is None:
            return TextPiece(text.index, self._echoes[number])
        ids = list(self.prompts[number])
        # nothing comes before the first token
        logprobs, top = [None, *text.prompt_logprobs], [None, *text.prompt_top_logprobs]
        return TextPiece(text.index, self._echoes[number], ids, logprobs, top, num_echoed=len(ids))

    def _logprobs(self, text: TextPiece) -> dict[str, Any]:
        tokens = self.texts.texts_of(text.token_ids)
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[text.index])
            self._offsets[text.index] += len(token)
        top = [
            likeliest and {self.texts.text_of(i): _finite(value) for i, value in reversed(likeliest.items())}
            for likeliest in text.top_logprobs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(value) for value in text.logprobs],
            "top_logprobs": top if self._body.logprobs else None,
            "text_offset": offsets,
        }


class ChatAnswer(_Answer):
    """Answers of /v1/chat/completions."""

    prefix: str
    chunk: str
    kind: str
    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        body: ChatBody,
        model: str,
        texts: TokenTexts,
        prompts: Sequence[Sequence[int]],
        form: ToolForm | None = None,
    ) -> None:
        super().__init__(model, texts, body.n or 1, prompts)
        self._body = body
        names = [tool.name for tool in body.called]
        named = names[0] if isinstance(body.tool_choice, NamedTool) else None
        self._readers = [
            ToolCallReader(None if body.is_call_forced else form, names, named) for _ in range(self.copies) if names
        ]

    def first_choices(self, piece: TextPiece | None = None) -> list[dict[str, Any]]:
        """What a stream begins with: who speaks."""
        if piece is not None:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(self.copies)
        ]

    def whole_choice(self, text: TextPiece) -> dict[str, Any]:
        """A text at once."""
        said, calls = self._parts(text, ends=True)
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if calls:
            message |= {"content": said or None, "tool_calls": [call.body() for call in calls]}
        return {"index": text.index, "message": message} | self._rest(text, calls, ends=True)

    def choice(self, text: TextPiece, *, ends: bool) -> dict[str, Any]:
        """A part of a text."""
        said, calls = self._parts(text, ends=ends)
        delta: dict[str, Any] = {"content": said} if said or text.finish_reason is None else {}
        if calls:
            delta["tool_calls"] = [{"index": number} | call.body() for number, call in enumerate(calls)]
        return {"index": text.index, "delta": delta} | self._rest(text, calls, ends=ends)

    def _parts(self, text: TextPiece, *, ends: bool) -> tuple[str, list[ToolCall]]:
        """What a part of a text says, and at its end the calls in it."""
        if not self._readers:
            return text.text, []
        reader = self._readers[text.index]
        said = reader.add(text.text)
        rest, calls = reader.finish() if ends else ("", [])
        return said + rest, calls[:1] if self._body.parallel_tool_calls is False else calls

    def _rest(self, text: TextPiece, calls: Sequence[ToolCall], *, ends: bool) -> dict[str, Any]:
        rest: dict[str, Any] = {
            "logprobs": {"content": list(self._logprobs(text)), "refusal": None} if self._body.logprobs else None,
            "finish_reason": "tool_calls" if calls and text.finish_reason == "stop" else text.finish_reason,
        }
        if self._body.return_token_ids:
            rest["token_ids"] = text.token_ids
            if ends:
                rest["prompt_token_ids"] = list(self.prompts[0])
        return rest

    def _logprobs(self, text: TextPiece) -> Iterable[dict[str, Any]]:
        for token, logprob, likeliest in zip(text.token_ids, text.logprobs, text.top_logprobs, strict=True):
            top = [self._told(i, value) for i, value in (likeliest or {}).items()] if self._body.top_logprobs else []
            yield self._told(token, logprob) | {"top_logprobs": top}

    def _told(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self.texts.bytes_of(token)
        return {"token": self.texts.text_of(token), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


def score_answer(model: str, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
    """The answer of /v1/score, as vLLM gives it: how alike the texts of each pair are."""
    data = [{"index": index, "object": "score", "score": float(score)} for index, score in enumerate(scores)]
    return _of_vectors(model, num_tokens) | {"object": "list", "data": data}


def rerank_answer(
    model: str, documents: Sequence[str], scores: Sequence[float], most: int | None, num_tokens: int
) -> dict[str, Any]:
    """The answer of /v1/rerank, as Jina and vLLM give it: the documents that are most like the query first."""
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))[:most]
    results = [
        {"index": index, "document": {"text": documents[index]}, "relevance_score": float(scores[index])}
        for index in order
    ]
    return _of_vectors(model, num_tokens) | {"results": results}


def _of_vectors(model: str, num_tokens: int) -> dict[str, Any]:
    head = {"id": f"score-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    return head | {"usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}


def embedding_answer(model: str, vectors: np.ndarray, num_tokens: int, encoding: str) -> dict[str, Any]:
    """The answer of /v1/embeddings: vectors [texts, width] as numbers, or as little-endian float32 in base64."""
    rows: list[Any] = (
        [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
        if encoding == "base64"
        else vectors.tolist()
    )
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
