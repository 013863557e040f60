"""Writing a text of another: an encoder reads it once, a decoder writes over a cache of both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.choosing import Completion, TokenChooser, TokenGrammar
from polyreme.generation.generator import room_for, take_chosen
from polyreme.generation.sampling import SamplingParams
from polyreme.jit import to_static
from polyreme.models.t5 import T5Cache

_MOST = 1 << 20
"""Tokens of a room: distances have no end, so that memory alone says how many there may be."""


class Seq2SeqGenerator:
    """Writes texts of other texts with a T5, which is put into evaluation mode; the interface of a TextGenerator.

    What the encoder makes of a text, and the keys and values of it in each of the decoder's blocks, are computed once.
    Programs are compiled for a number of rows and rooms for both texts, which are powers of two. end, num_known: as of
    TextGenerator.

    >>> from polyreme.models.t5 import T5Config, T5ForConditionalGeneration
    >>> writer = Seq2SeqGenerator(T5ForConditionalGeneration(T5Config.nano()))
    >>> [text] = writer.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
    >>> len(text.token_ids), text.finish_reason
    (4, 'length')
    """

    model: Any
    end: tuple[int, ...]
    num_known: int

    def __init__(self, model: Any, end: Sequence[int] = (), num_known: int | None = None) -> None:
        self.model, self.end = model, tuple(end)
        vocab = model.config.vocab_size
        self.num_known = vocab if num_known is None else min(num_known, vocab)
        self._programs: dict[tuple[int, int, int], _Programs] = {}
        self._in_turn = threading.RLock()  # threads write one after the other, as they share caches
        model.eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_token: Callable[[int, int], bool] | None = None,
        grammars: Sequence[TokenGrammar | None] = (),
    ) -> list[Completion]:
        """A Completion of each text, token ids, by settings that all share or one of its own; n is not read. on_token,
        grammars: as of TextGenerator.

        Raises ConfigError for an empty text and tokens that the model does not have, NumericsError for logits that are
        not finite.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts) or not prompts:
            raise ConfigError(f"generate: {len(prompts)} prompts and settings for {len(settings)}; give one for each")
        for number, (prompt, own) in enumerate(zip(prompts, settings, strict=True)):
            if not len(prompt):
                raise ConfigError(f"generate: prompt {number} has no tokens; give at least one")
            own.check_tokens(prompt, self.model.config.vocab_size, f"generate: request {number}")
        read, written = max(map(len, prompts)), max(own.max_tokens for own in settings)
        key = (len(prompts), room_for(read, _MOST), room_for(written, _MOST))
        with self._in_turn, no_grad():
            if key not in self._programs:
                self._programs[key] = _Programs(self, *key)
            return self._write(
                self._programs[key], prompts, settings, on_token, list(grammars) or [None] * len(prompts)
            )

    def _write(
        self,
        programs: _Programs,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SamplingParams],
        on_token: Callable[[int, int], bool] | None,
        grammars: Sequence[TokenGrammar | None],
    ) -> list[Completion]:
        start, limits = self.model.config.start, [own.max_tokens for own in settings]
        programs.begin(prompts)
        for row, (own, grammar) in enumerate(zip(settings, grammars, strict=True)):
            programs.chooser.begin(row, own, [start], 1, grammar)
        texts, tokens = [Completion() for _ in prompts], np.full(len(prompts), start)
        while not all(text.finish_reason for text in texts):
            chosen = programs.chooser(programs.logits_after(tokens), programs.cache.length)
            take_chosen(texts, settings, limits, chosen, self.end, on_token, grammars)
            tokens = np.maximum(chosen.token_ids, 0)
        return texts


class _Programs:
    """Of a number of rows and rooms: the cache, what fills it, and what continues it."""

    def __init__(self, generator: Seq2SeqGenerator, rows: int, read: int, written: int) -> None:
        model = generator.model
        self.read, self.cache = read, T5Cache(model, rows, read, written)
        self.chooser = TokenChooser(rows, model.config.vocab_size, generator.num_known, generator.end)
        self._begin = to_static(lambda ids, mask: model.begin(ids, mask, self.cache))
        self._extend = to_static(lambda tokens: model.extend(tokens, self.cache))

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read these texts."""
        ids = np.zeros((len(prompts), self.read), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
        self._begin(to_tensor(ids), to_tensor(mask))

    def logits_after(self, tokens: np.ndarray) -> Any:
        """Logits [rows, vocab] after a token of each row."""
        return self._extend(to_tensor(tokens.astype(np.int64)[:, None]))
