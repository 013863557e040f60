"""Generation over a cache: prompts are taken in at once, then a token of each row is made at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, NumericsError
from polyreme.generation.blockwise import BlockwiseSteps
from polyreme.generation.choosing import (
    READS_LATE,
    ChosenTokens,
    Completion,
    TokenChoice,
    TokenChooser,
    TokenGrammar,
    next_inputs,
)
from polyreme.generation.prompt_vectors import PromptVectors, insert_vectors
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.speculation import Drafter, Speculation
from polyreme.jit import to_static
from polyreme.kernels import select
from polyreme.models.parts.cache import KVCache

_LEAST_ROOM = 64
"""Tokens of the smallest cache that programs are compiled for."""
_LEAST_PROMPT = 16
"""Tokens of the smallest prompt that they are: fewer take as long, as the weights are read."""


class TextGenerator:
    """Writes after prompts with a Decoder, which is put into evaluation mode.

    Programs are compiled for a number of rows, a room for the prompt and a room for the text. Rooms are powers of two,
    up to the model's positions, so that few are compiled whatever the lengths. Choosing a token is one of its own.

    end: token ids that end a text. num_known: ids below it alone are chosen, as a model's vocabulary may be larger than
    its tokenizer's. speculation: tokens of a prompt that is alone are drafted and verified several at a time, which
    gives the same bits; several prompts at once are written token by token, as one product serves them all.
    kv_cache_dtype: of keys and values, as of KVCache: int8 for codes with a scale for each head and token.
    in_turn: the lock of its caches: threads write one after the other.
    """

    model: Any
    end: tuple[int, ...]
    speculation: Speculation | None
    kv_cache_dtype: Any
    num_drafted: int
    num_accepted: int
    num_known: int
    in_turn: threading.RLock

    def __init__(
        self,
        model: Any,
        end: Sequence[int] = (),
        num_known: int | None = None,
        speculation: Speculation | None = None,
        kv_cache_dtype: Any = None,
    ) -> None:
        self.model, self.end, self.speculation, self.kv_cache_dtype = model, tuple(end), speculation, kv_cache_dtype
        if speculation is not None:
            speculation.check(model)
        self.num_drafted = self.num_accepted = 0
        vocab = model.config.vocab_size
        self.num_known = vocab if num_known is None else min(num_known, vocab)
        self._programs: dict[Any, RowPrograms] = {}
        self.in_turn = threading.RLock()
        model.eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_token: Callable[[int, int], bool] | None = None,
        grammars: Sequence[TokenGrammar | None] = (),
        vectors: Sequence[PromptVectors | None] = (),
    ) -> list[Completion]:
        """A Completion of each prompt, token ids, by settings that all share or one of its own; n is not read.

        on_token: (row, token) -> whether the text ends there. grammars: of each prompt's text, its own, or None; such
        a text is not drafted for. vectors: what stands in each prompt in place of embeddings, or None. Raises
        ConfigError for an empty prompt, one that leaves no room, tokens that the model does not have and vectors that
        do not fit, NumericsError for logits that are not finite.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts) or not prompts:
            raise ConfigError(f"generate: {len(prompts)} prompts and settings for {len(settings)}; give one for each")
        longest, room = self.rooms(prompts, [s.max_tokens for s in settings])
        inserted = list(vectors) or [None] * len(prompts)
        for number, (prompt, own, of_prompt) in enumerate(zip(prompts, settings, inserted, strict=True)):
            whose = f"generate: request {number}"
            own.check_tokens(prompt, self.model.config.vocab_size, whose)
            if of_prompt is not None:
                of_prompt.check(len(prompt), self.model.config.hidden_size, whose)
        with self.in_turn, no_grad():
            free = list(grammars) or [None] * len(prompts)
            return self._run(prompts, settings, longest, room, on_token, free, inserted)

    def rooms(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> tuple[int, int]:
        """Tokens that programs for these prompts take in at once, and places of their cache. Raises ConfigError for an
        empty prompt and for one that leaves no room."""
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
        wanted = max(len(p) + count - 1 for p, count in zip(prompts, new_tokens, strict=True))
        room = room_for(min(wanted, positions), positions)
        return room_for(max(map(len, prompts)), room, _LEAST_PROMPT), room

    def programs(self, rows: int, room: int) -> RowPrograms:
        """The programs that write so many texts in caches of so many places."""
        key = (rows, room)
        if key not in self._programs:
            self._programs[key] = RowPrograms(self, *key)
        return self._programs[key]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        settings: list[SamplingParams],
        longest: int,
        room: int,
        on_token: Callable[[int, int], bool] | None,
        grammars: list[TokenGrammar | None],
        vectors: list[PromptVectors | None],
    ) -> list[Completion]:
        programs = self.programs(len(prompts), room)
        texts = [Completion() for _ in prompts]
        limits = [min(s.max_tokens, room + 1 - len(p)) for p, s in zip(prompts, settings, strict=True)]
        choice = programs.start(prompts, settings, longest, grammars, vectors)
        if programs.drafter is not None and grammars == [None]:
            take_chosen(texts, settings, limits, choice.read(), self.end, on_token, grammars)
            self._verify(programs, prompts, settings, texts, limits, on_token)
            return texts
        reads_late = READS_LATE[select.backend()] and not any(grammars)
        while True:
            # what is made after the end of a text is thrown away
            goes_on = any(
                not t.finish_reason and len(t.token_ids) + 1 < most for t, most in zip(texts, limits, strict=True)
            )
            following = programs.step(choice) if reads_late and goes_on else None
            take_chosen(texts, settings, limits, choice.read(), self.end, on_token, grammars)
            if all(completion.finish_reason for completion in texts):
                return texts
            choice = programs.step(choice) if following is None else following

    def _verify(
        self,
        programs: RowPrograms,
        prompts: Sequence[Sequence[int]],
        settings: list[SamplingParams],
        texts: list[Completion],
        limits: list[int],
        on_token: Callable[[int, int], bool] | None,
    ) -> None:
        """Write the only text to its end, by drafts where they pay."""
        assert programs.drafter is not None
        assert self.speculation is not None
        drafter, gate, (completion,) = programs.drafter, self.speculation.gate(), texts
        drafter.begin(0, settings[0])
        while not completion.finish_reason:
            began = time.perf_counter()
            text, last = completion.token_ids, completion.token_ids[-1]
            count = min(gate.count, limits[0] - len(text) - 1)
            drafts = drafter.propose({0: [*prompts[0], *text]}, {0: count}).get(0, []) if count > 0 else []
            num_met = 0
            for chosen, draft in zip(programs.steps([last, *drafts]), [*drafts, None], strict=False):
                take_chosen(texts, settings, limits, chosen, self.end, on_token, [None])
                if completion.finish_reason or completion.token_ids[-1] != draft:
                    break
                num_met += 1
            gate.note(time.perf_counter() - began, len(drafts), num_met)
            self.num_drafted += len(drafts)
            self.num_accepted += num_met


class RowPrograms:
    """Programs for a number of rows and a room: the cache, and the functions that fill it, continue it and choose
    tokens."""

    cache: KVCache
    chooser: TokenChooser

    def __init__(self, generator: TextGenerator, rows: int, room: int) -> None:
        self.cache = KVCache(generator.model, rows, room, generator.kv_cache_dtype)
        vocab = generator.model.config.vocab_size
        self.chooser = TokenChooser(rows, vocab, generator.num_known, generator.end)
        self._prefill = BlockwiseSteps(generator.model, self.cache, is_first=True)
        self._decode = BlockwiseSteps(generator.model, self.cache, is_first=False)
        self._one_each = to_tensor(np.ones(rows, np.int32))
        self._none_known = to_tensor(np.full(rows, -1, np.int32))
        self._next_inputs = to_static(next_inputs)
        self.drafter: Drafter | None = None
        if generator.speculation is not None and rows == 1:
            self.drafter = generator.speculation.drafter(1, room, vocab, generator.num_known)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SamplingParams],
        longest: int,
        grammars: Sequence[TokenGrammar | None],
        vectors: Sequence[PromptVectors | None],
    ) -> TokenChoice:
        """Take in the prompts -> the first token of each row."""
        for row, (prompt, params, grammar) in enumerate(zip(prompts, settings, grammars, strict=True)):
            self.chooser.begin(row, params, prompt, len(prompt), grammar)
        return self.chooser(self.take_in(prompts, longest, vectors), self.cache.lengths)

    def step(self, choice: TokenChoice) -> TokenChoice:
        """The next token of each row, after these."""
        tokens = self._next_inputs(choice.token_ids, self._none_known)
        return self.chooser(self._decode(tokens, self._one_each), self.cache.lengths)

    def take_in(
        self, prompts: Sequence[Sequence[int]], longest: int, vectors: Sequence[PromptVectors | None] = ()
    ) -> Any:
        """Begin with prompts of at most `longest` tokens -> logits [rows, vocab] after each."""
        padded = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        self.cache.lengths.zero_()
        return self._prefill(to_tensor(padded), to_tensor(counts), insert_vectors(vectors, longest))

    def logits_after(self, tokens: np.ndarray) -> Any:
        """Logits [rows, vocab] after a token of each row."""
        return self._decode(to_tensor(tokens.astype(np.int64)[:, None]), self._one_each)

    def take_rows(self, source: RowPrograms, rows: np.ndarray) -> None:
        """Go on from rows of another cache with as many places, or of this one in another order."""
        index = to_tensor(rows.astype(np.int64))
        self.cache.lengths.set_value(source.cache.lengths.numpy()[rows])
        for mine, theirs in zip(self.cache.layers, source.cache.layers, strict=True):
            for tensor, other in zip(mine.tensors, theirs.tensors, strict=True):
                tensor.set_value(other.index_select(index, 0))

    def steps(self, tokens: Sequence[int]) -> Iterator[ChosenTokens]:
        """What is chosen after each of some tokens of the only row, the same as by a step for each; those after which
        none is asked for leave no trace."""
        for parts in self._decode.hidden_of_each(tokens):
            yield self.chooser(self._decode.finish(self._one_each, parts), self.cache.lengths).read()


def take_chosen(
    texts: Sequence[Completion],
    settings: Sequence[SamplingParams],
    limits: Sequence[int],
    chosen: ChosenTokens,
    end: Sequence[int],
    on_token: Callable[[int, int], bool] | None,
    grammars: Sequence[TokenGrammar | None],
) -> None:
    """Put a token into each text that has not ended. Raises NumericsError for logits that are not finite."""
    for row, (completion, params) in enumerate(zip(texts, settings, strict=True)):
        if completion.finish_reason:
            continue
        if chosen.token_ids[row] < 0:
            raise NumericsError(
                f"generate: logits of row {row} are not finite at token {len(completion.token_ids)}; the "
                "parameters have overflowed, or the dtype is too narrow"
            )
        was_added = completion.take(chosen, row, params, end, limits[row])
        grammar = grammars[row]
        if was_added and grammar is not None:
            grammar.take(completion.token_ids[-1])
            if grammar.is_done:
                completion.finish_reason = "stop"
        if was_added and on_token is not None and on_token(row, completion.token_ids[-1]):
            completion.finish_reason = "stop"


def room_for(wanted: int, most: int, least: int = _LEAST_ROOM) -> int:
    """The power of two, `least` or a larger one, that holds so many, at most `most`."""
    room = least
    while room < wanted:
        room *= 2
    return min(room, most)
