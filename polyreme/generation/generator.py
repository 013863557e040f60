"""Generation over a cache: prompts are taken in at once, then a token of each row is made at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.generation.blockwise import BlockwiseSteps
from polyreme.generation.sampling import Choice, SamplingParams, likeliest, marked, next_tokens, penalized
from polyreme.jit import to_static
from polyreme.models.cache import KVCache
from polyreme.ops import creation

_LEAST_ROOM = 64
"""Tokens of the smallest cache and prompt that programs are compiled for."""


@dataclass
class Completion:
    """New tokens of one text; finish_reason: "stop" (an end token or a stop string) or "length".

    logprobs: of each token; top_logprobs: of the likeliest ones at each place, {id: log-probability}; as asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)


class TextGenerator:
    """Writes after prompts with a Decoder, which is put into evaluation mode.

    Programs are compiled for a number of rows, a room for the prompt and a room for the text. Rooms are powers of two,
    up to the model's positions, so that few are compiled whatever the lengths. Choosing a token is one of its own.

    end: token ids that end a text. num_known: ids below it alone are chosen, as a model's vocabulary may be larger than
    its tokenizer's.
    """

    def __init__(self, model: Any, end: Sequence[int] = (), num_known: int | None = None) -> None:
        self.model, self.end = model, tuple(end)
        vocab = model.config.vocab_size
        self.num_known = vocab if num_known is None else min(num_known, vocab)
        self._programs: dict[Any, _Programs] = {}
        model.eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_token: Callable[[int, int], bool] | None = None,
    ) -> list[Completion]:
        """A Completion of each prompt, token ids, by settings that all share or one of its own; n is not read.

        on_token: (row, token) -> whether the text ends there. Raises ConfigError for an empty prompt and for one that
        leaves no room, NumericsError for logits that are not finite.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts) or not prompts:
            raise ConfigError(f"generate: {len(prompts)} prompts and settings for {len(settings)}; give one for each")
        positions = self.model.config.seq_len
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise ConfigError(
                    f"generate: prompt {number} has no tokens; give at least one, as the text's beginning"
                )
            if len(prompt) >= positions:
                raise ConfigError(
                    f"generate: prompt {number} has {len(prompt)} tokens, and the model positions for {positions}, "
                    "the text included; shorten it"
                )
        # the last token that is made needs no place
        wanted = max(len(p) + s.max_tokens - 1 for p, s in zip(prompts, settings, strict=True))
        room = _room(min(wanted, positions), positions)
        longest = _room(max(map(len, prompts)), room)
        with no_grad():
            return self._run(prompts, settings, longest, room, on_token)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        settings: list[SamplingParams],
        longest: int,
        room: int,
        on_token: Callable[[int, int], bool] | None,
    ) -> list[Completion]:
        choice: Choice = max((s.choice for s in settings), key=("greedy", "draw", "filter").index)
        counted = [s.logprobs for s in settings if s.logprobs is not None]
        penalty = any(s.repetition_penalty != 1 for s in settings)
        ends = any(s.min_tokens for s in settings)
        key = (len(prompts), room)
        if key not in self._programs:
            self._programs[key] = _Programs(self, *key)
        programs = self._programs[key]
        programs.choose_by(_ChoiceKind(choice, max(counted, default=None), penalty, ends and bool(self.end)))
        texts = [Completion() for _ in prompts]
        limits = [min(s.max_tokens, room + 1 - len(p)) for p, s in zip(prompts, settings, strict=True)]
        tokens = programs.start(prompts, settings, longest)
        while True:
            self._take(texts, settings, limits, tokens, on_token)
            if all(completion.finish_reason for completion in texts):
                return texts
            tokens = programs.step()

    def _take(
        self,
        texts: list[Completion],
        settings: list[SamplingParams],
        limits: list[int],
        tokens: tuple[np.ndarray, ...],
        on_token: Callable[[int, int], bool] | None,
    ) -> None:
        """Put a token into each text that has not ended. tokens: ids; with logprobs also theirs, the likeliest, ids."""
        ids, *logs = tokens
        for row, (completion, params, token) in enumerate(zip(texts, settings, ids.tolist(), strict=True)):
            if completion.finish_reason:
                continue
            if token < 0:
                raise NumericsError(
                    f"generate: logits of row {row} are not finite at token {len(completion.token_ids)}; the "
                    "parameters have overflowed, or the dtype is too narrow"
                )
            is_end = (token in self.end and not params.ignore_eos) or token in params.stop_token_ids
            if is_end and len(completion.token_ids) >= params.min_tokens:
                completion.finish_reason = "stop"
                continue
            completion.token_ids.append(token)
            if params.logprobs is not None:
                chosen, top, top_ids = (part[row] for part in logs)
                completion.logprobs.append(float(chosen))
                pairs = zip(top_ids[: params.logprobs].tolist(), top[: params.logprobs].tolist(), strict=True)
                completion.top_logprobs.append(dict(pairs))
            if on_token is not None and on_token(row, token):
                completion.finish_reason = "stop"
            elif len(completion.token_ids) == limits[row]:
                completion.finish_reason = "length"


class _ChoiceKind(NamedTuple):
    """What choosing a token of each row takes: how many of the likeliest are told, whether tokens that were seen are
    penalized, and whether texts have a least length."""

    choice: Choice
    logprobs: int | None
    penalty: bool
    least: bool


class _Programs:
    """Of a number of rows and a room: the cache, and what fills it, continues it and makes tokens."""

    def __init__(self, generator: TextGenerator, rows: int, room: int) -> None:
        self.generator = generator
        self.cache = KVCache(generator.model, rows, room)
        self.seen = creation.zeros([rows, generator.model.config.vocab_size], "bool")
        self._prefill = BlockwiseSteps(generator.model, self.cache, is_first=True)
        self._decode = BlockwiseSteps(generator.model, self.cache, is_first=False)
        self._one_each = to_tensor(np.ones(rows, np.int32))
        self._choices: dict[_ChoiceKind, Callable[..., tuple[Any, ...]]] = {}

    def choose_by(self, kind: _ChoiceKind) -> None:
        """Make tokens in this way from now on."""
        if kind not in self._choices:
            self._choices[kind] = to_static(functools.partial(self._choose, kind))
        self._kind, self._chosen = kind, self._choices[kind]

    def start(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], longest: int
    ) -> tuple[np.ndarray, ...]:
        """Take in the prompts -> the first token of each row, and what belongs to it."""
        padded = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        self._settings = [
            to_tensor(np.array(column, dtype))
            for column, dtype in (
                ([s.seed for s in settings], np.int64),
                ([s.temperature for s in settings], np.float32),
                ([s.top_k for s in settings], np.int32),
                ([s.top_p for s in settings], np.float32),
                ([s.min_p for s in settings], np.float32),
                ([s.repetition_penalty for s in settings], np.float32),
                ([len(p) + s.min_tokens for p, s in zip(prompts, settings, strict=True)], np.int32),
            )
        ]
        self.cache.lengths.zero_()
        if self._kind.penalty:
            self.seen.zero_()
            marked(self.seen, to_tensor(np.where(np.arange(longest) < counts[:, None], padded, -1)), out=self.seen)
        return self._read(self._prefill(to_tensor(padded), to_tensor(counts)))

    def step(self) -> tuple[np.ndarray, ...]:
        """The next token of each row, and what belongs to it."""
        return self._read(self._decode(self._tokens.unsqueeze(1).astype("int64"), self._one_each))

    def _read(self, logits: Tensor) -> tuple[np.ndarray, ...]:
        results = self._chosen(logits, *self._settings)
        self._tokens = results[0]
        return tuple(result.numpy() for result in results)

    # what is captured

    def _choose(
        self,
        kind: _ChoiceKind,
        logits: Any,
        seeds: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        min_p: Any,
        penalty: Any,
        least: Any,
    ) -> tuple[Any, ...]:
        generator, lengths = self.generator, self.cache.lengths
        scores = penalized(logits, self.seen, penalty) if kind.penalty else logits
        hidden = creation.arange(logits.shape[-1], dtype="int32").unsqueeze(0) >= generator.num_known
        if kind.least:
            ids = creation.arange(logits.shape[-1], dtype="int32")
            is_end = sum((ids == end).astype("int32") for end in generator.end).astype("bool").unsqueeze(0)
            hidden = hidden | (is_end & (lengths < least).unsqueeze(1))
        scores = scores.masked_fill(hidden, -np.inf)
        places = lengths.astype("int64")
        tokens = next_tokens(scores, seeds, places, temperature, top_k, top_p, min_p, choice=kind.choice)
        tokens = tokens.masked_fill(~logits.isfinite().all(-1), -1)
        if kind.penalty:
            marked(self.seen, tokens.unsqueeze(1), out=self.seen)
        if kind.logprobs is None:
            return (tokens,)
        return tokens, *likeliest(logits, tokens.clip(min=0), max(1, kind.logprobs))


def _room(wanted: int, most: int) -> int:
    """The least power of two that holds so many, at most `most`."""
    room = _LEAST_ROOM
    while room < wanted:
        room *= 2
    return min(room, most)
