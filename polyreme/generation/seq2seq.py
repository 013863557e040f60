"""Writing a text of another: an encoder reads it once, a decoder writes over a cache of both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.choosing import ChosenTokens, Completion, TokenChooser, TokenGrammar
from polyreme.generation.generator import room_for, take_chosen
from polyreme.generation.sampling import SamplingParams
from polyreme.jit import to_static
from polyreme.models.parts.encoder_decoder import EncoderDecoder

_MOST = 1 << 20
"""Tokens of a room: distances have no end, so that memory alone says how many there may be."""


class Seq2SeqGenerator:
    """Writes texts of other texts with an EncoderDecoder, as a T5 or a BART, which is put into evaluation mode; the
    interface of a TextGenerator.

    What the encoder makes of a text, and the keys and values of it in each of the decoder's blocks, are computed once.
    Programs are compiled for a number of rows and rooms for both texts, which are powers of two. end, num_known: as of
    TextGenerator.

    >>> from polyreme.models.encoder_decoders.t5 import T5Config, T5ForConditionalGeneration
    >>> writer = Seq2SeqGenerator(T5ForConditionalGeneration(T5Config.nano()))
    >>> [text] = writer.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
    >>> len(text.token_ids), text.finish_reason
    (4, 'length')
    """

    model: EncoderDecoder
    end: tuple[int, ...]
    num_known: int

    def __init__(self, model: EncoderDecoder, end: Sequence[int] = (), num_known: int | None = None) -> None:
        self.model, self.end = model, tuple(end)
        vocab = model.config.vocab_size
        self.num_known = vocab if num_known is None else min(num_known, vocab)
        self._programs: dict[tuple[int, int, int], _Programs] = {}
        self._in_turn = threading.RLock()  # threads write one after the other, as they share caches
        model.eval()

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        on_token: Callable[[int, int], bool] | None = None,
        grammars: Sequence[TokenGrammar | None] = (),
        forced: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[Completion]:
        """A Completion of each input, which is token ids, or what else the model reads, by settings that all share or
        one of its own; n is not read. on_token, grammars: as of TextGenerator. forced: tokens that each text begins
        with, as the language of a translation, or as many of each; forced_bos_token_id of model.generation_config if
        None.

        Raises ConfigError for an empty text and tokens that the model does not have, NumericsError for logits that are
        not finite.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts) or not prompts:
            raise ConfigError(f"generate: {len(prompts)} prompts and settings for {len(settings)}; give one for each")
        model = self.model
        beginnings = self._beginnings(forced, len(prompts))
        for number, (prompt, own) in enumerate(zip(prompts, settings, strict=True)):
            model.check_input(prompt, f"generate: prompt {number}")
            own.check_tokens(beginnings[number], model.config.vocab_size, f"generate: request {number}")
        most, most_read = model.most_tokens or _MOST, model.most_inputs or _MOST
        read, written = max(map(model.num_places, prompts)), max(own.max_tokens for own in settings)
        key = (len(prompts), room_for(read, most_read), room_for(min(written, most), most))
        with self._in_turn, no_grad():
            if key not in self._programs:
                self._programs[key] = _Programs(self, *key)
            free = list(grammars) or [None] * len(prompts)
            return self._write(self._programs[key], prompts, settings, on_token, free, beginnings)

    def _beginnings(self, forced: Any, rows: int) -> list[list[int]]:
        """The first tokens of the text of each row. Raises ConfigError for beginnings of several lengths."""
        if forced is None:
            first = self.model.generation_config.get("forced_bos_token_id")
            forced = () if first is None else (first,)
        if not len(forced) or isinstance(forced[0], Integral):
            forced = [forced] * rows
        if len(forced) != rows or len({*map(len, forced)}) > 1:
            raise ConfigError(f"generate: forced begins {len(forced)} texts of {rows}; give as many tokens of each")
        return [[*map(int, one)] for one in forced]

    def _write(
        self,
        programs: _Programs,
        prompts: Sequence[Any],
        settings: Sequence[SamplingParams],
        on_token: Callable[[int, int], bool] | None,
        grammars: list[TokenGrammar | None],
        beginnings: list[list[int]],
    ) -> list[Completion]:
        start, rows = self.model.config.start, len(prompts)
        limits = [min(own.max_tokens, programs.cache.places) for own in settings]
        programs.begin(prompts)
        texts, tokens = [Completion() for _ in prompts], np.full(rows, start)
        free: list[TokenGrammar | None] = [None] * rows
        for place in range(len(beginnings[0])):
            programs.logits_after(tokens)
            tokens = np.array([beginning[place] for beginning in beginnings])
            certain = ChosenTokens(tokens, np.zeros(rows), np.zeros((rows, 1)), tokens[:, None])
            take_chosen(texts, settings, limits, certain, (), on_token, free)
        for row, (own, grammar) in enumerate(zip(settings, grammars, strict=True)):
            programs.chooser.begin(row, own, [start, *beginnings[row]], 1, grammar)
        while not all(text.finish_reason for text in texts):
            chosen = programs.chooser(programs.logits_after(tokens), programs.cache.length).read()
            take_chosen(texts, settings, limits, chosen, self.end, on_token, grammars)
            tokens = np.maximum(chosen.token_ids, 0)
        return texts


class _Programs:
    """Programs for a number of rows and rooms: the cache, and the functions that fill it and continue it."""

    def __init__(self, generator: Seq2SeqGenerator, rows: int, read: int, written: int) -> None:
        model = generator.model
        self.model, self.read, self.cache = model, read, model.new_cache(rows, read, written)
        self.chooser = TokenChooser(rows, model.config.vocab_size, generator.num_known, generator.end)
        self._begin = to_static(lambda ids, mask: model.begin(ids, mask, self.cache))
        self._extend = to_static(lambda tokens: model.extend(tokens, self.cache))

    def begin(self, prompts: Sequence[Any]) -> None:
        """Read these inputs."""
        inputs, mask = self.model.packed(prompts, self.read)
        self._begin(to_tensor(inputs), to_tensor(mask))

    def logits_after(self, tokens: np.ndarray) -> Any:
        """Logits [rows, vocab] after a token of each row."""
        return self._extend(to_tensor(tokens.astype(np.int64)[:, None]))
