"""Drafts of the tokens that may come next, which a model then verifies several at a time: the text is the same.

A drafted token counts only where it is the very token that the model chooses there by itself, so that drafts change how
soon a text is there and nothing of it. Sources: arXiv:2302.01318 (a small model's drafts), arXiv:2304.04487 (drafts
from the text).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.blockwise import BlockwiseSteps
from polyreme.generation.choosing import TokenChooser
from polyreme.generation.sampling import SamplingParams
from polyreme.models.parts.cache import KVCache

_NGRAM_SIZES = (4, 3, 2)
"""Tokens at a text's end that are looked for earlier in it, the most first. One alone says little of what follows."""
_FIRST_DRAFTS = 2
"""Tokens of a request's first draft."""
_CHUNKS = (1, 8, 64)
"""Tokens of a text that a drafting model takes in at once, where it has so many places."""


class Drafter(Protocol):
    """A drafter proposes tokens for the texts of some rows."""

    def begin(self, row: int, params: SamplingParams) -> None:
        """A row has a new text, chosen by these settings."""
        ...

    def leave(self, row: int) -> None:
        """A row has no text any more."""
        ...

    def propose(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Tokens that may follow the texts of some rows, at most `counts` of each; none for rows left out."""
        ...


@dataclass(frozen=True)
class Speculation:
    """Settings of drafting tokens: draft is "ngram" for what followed the same tokens earlier in the text, or a Decoder
    with the vocabulary of the model that it drafts for. num_draft_tokens: at most so many at a time. max_loss: the
    share of its time that a text may lose by drafts that are not met; infinite to draft always.

    Raises ConfigError for another draft and for numbers out of range.

    >>> Speculation().drafter(1, 64, vocab_size=9, num_known=9).propose({0: [5, 6, 7, 8, 5, 6]}, {0: 3})
    {0: [7, 8, 5]}
    """

    draft: Any = "ngram"
    num_draft_tokens: int = 5
    max_loss: float = 0.03

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ConfigError(f"speculation: num_draft_tokens={self.num_draft_tokens}; give at least 1")
        if not self.max_loss >= 0:
            raise ConfigError(f"speculation: max_loss={self.max_loss}; give a share of at least 0")
        if self.draft != "ngram" and not hasattr(self.draft, "blocks"):
            raise ConfigError(f"speculation: {self.draft!r} drafts no tokens; give 'ngram' or a Decoder")

    def check(self, model: Any) -> None:
        """Raises ConfigError where texts of a model, or of the one that drafts, cannot be taken back to a token."""
        for one in (model, self.draft):
            if getattr(one, "has_states", False):
                raise ConfigError(
                    f"speculation: a {type(one).__name__} keeps states, from which tokens that are not met cannot be "
                    "taken back; leave speculation out"
                )

    def gate(self) -> DraftGate:
        """The gate that decides whether to draft, for a new text."""
        return DraftGate(self.num_draft_tokens, self.max_loss)

    def drafter(self, rows: int, places: int, vocab_size: int, num_known: int) -> Drafter:
        """A Drafter for so many texts of at most `places` tokens, among the first num_known of vocab_size. Raises
        ConfigError for a model with another vocabulary."""
        if self.draft == "ngram":
            return NgramDrafter()
        theirs = self.draft.config.vocab_size
        if theirs != vocab_size:
            raise ConfigError(
                f"speculation: the drafting model has {theirs} tokens, and the model {vocab_size}; give one of the "
                "same tokenizer"
            )
        return ModelDrafter(self.draft, rows, min(places, self.draft.config.seq_len), num_known)


class NgramDrafter:
    """Proposes what followed the last few tokens of a text where they were earlier in it."""

    def __init__(self) -> None:
        self._indices: dict[int, _NgramIndex] = {}

    def begin(self, row: int, params: SamplingParams) -> None:
        """A row has a new text."""
        self._indices[row] = _NgramIndex()

    def leave(self, row: int) -> None:
        """A row has no text any more."""
        self._indices.pop(row, None)

    def propose(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """As of Drafter; a row's text goes on from the last time it was asked for."""
        return {
            row: self._indices.setdefault(row, _NgramIndex()).following(text, counts[row])
            for row, text in texts.items()
        }


class _NgramIndex:
    """Where each few tokens of a text stood last, but for its end."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def following(self, text: Sequence[int], count: int) -> list[int]:
        for end in range(self._num_indexed + 1, len(text)):
            for size in _NGRAM_SIZES:
                if size <= end:
                    self._places[tuple(text[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(text) - 1)
        for size in _NGRAM_SIZES:
            place = self._places.get(tuple(text[-size:])) if size < len(text) else None
            if place is not None:
                # what would stand past the end is what the text repeats
                period = len(text) - place
                return [text[place + number % period] for number in range(count)]
        return []


class ModelDrafter:
    """Proposes what a smaller model writes, drawn by the same noise as the tokens that are to be met.

    It has a cache of its own, with a row for each text; what of a text it has not seen it takes in first.
    """

    def __init__(self, model: Any, rows: int, places: int, num_known: int) -> None:
        model.eval()
        self._rows, self._places = rows, places
        self._chunks = [size for size in _CHUNKS if size <= places]
        vocab = model.config.vocab_size
        self._cache = KVCache(model, rows, places)
        self._steps = BlockwiseSteps(model, self._cache, is_first=False)
        self._chooser = TokenChooser(rows, vocab, num_known, ())
        self._known: list[list[int]] = [[] for _ in range(rows)]

    def begin(self, row: int, params: SamplingParams) -> None:
        """A row has a new text, chosen by these settings; penalties are left to the model that verifies."""
        penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        plain = replace(params, **penalties, logprobs=None, min_tokens=0)
        self._chooser.begin(row, plain, (), 0)
        self._known[row] = []

    def leave(self, row: int) -> None:
        """A row has no text any more."""
        self._chooser.leave(row)

    def propose(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafter.propose; no tokens for texts that are longer than this model's positions."""
        texts = {row: list(text) for row, text in texts.items() if len(text) + counts[row] <= self._places}
        if not texts:
            return {}
        for row, text in texts.items():
            same = _num_shared(self._known[row], text)
            self._known[row] = text[: min(same, len(text) - 1)]
        while missing := max(len(text) - 1 - len(self._known[row]) for row, text in texts.items()):
            size = next((size for size in self._chunks if size >= missing), self._chunks[-1])
            self._take_in({row: text[len(self._known[row]) : -1][:size] for row, text in texts.items()}, size)
        drafts: dict[int, list[int]] = {row: [] for row in texts}
        last = {row: text[-1] for row, text in texts.items()}
        for _ in range(max(counts[row] for row in texts)):
            hidden = self._take_in({row: [token] for row, token in last.items()}, 1)
            lengths = to_tensor(self._lengths())
            logits = self._steps.finish(to_tensor(np.zeros(self._rows, np.int32)), hidden)
            chosen = self._chooser(logits, lengths).read()
            last = {row: int(chosen.token_ids[row]) for row in texts}
            for row, token in last.items():
                drafts[row].append(token)
            if min(last.values()) < 0:
                break
        return {row: [t for t in tokens[: counts[row]] if t >= 0] for row, tokens in drafts.items()}

    def _lengths(self) -> np.ndarray:
        return np.array([len(known) for known in self._known], np.int32)

    def _take_in(self, parts: Mapping[int, Sequence[int]], size: int) -> tuple[Any, ...]:
        """Put up to `size` tokens into each row -> what finish takes."""
        tokens = np.zeros((self._rows, size), np.int64)
        self._cache.lengths.set_value(self._lengths())
        for row, part in parts.items():
            tokens[row, : len(part)] = part
            self._known[row] = self._known[row] + list(part)
        counts = np.zeros(self._rows, np.int32)
        counts[list(parts)] = [len(part) for part in parts.values()]
        return self._steps.hidden(to_tensor(tokens), to_tensor(counts))


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that both share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(n for n in range(most) if one[n] != other[n])


class DraftGate:
    """Whether drafting pays for one text, by the time that its steps take: what it lost so far may be max_loss of the
    time it took, and one trial is free.

    A text whose drafts are met is drafted for more at a time, one whose drafts are not for fewer, and then for a while
    not at all. most: tokens at a time. Units: seconds.

    >>> gate = DraftGate(most=4, max_loss=0.03)
    >>> gate.note(1.0), gate.count, gate.note(1.5, drafted=2, accepted=0), gate.count
    (None, 2, None, 0)
    """

    def __init__(self, most: int, max_loss: float) -> None:
        self._most, self._max_loss = most, max_loss
        self._plain: deque[float] = deque(maxlen=9)
        self._elapsed = self._balance = 0.0
        self._loss = 0.0  # of the last trial, had it met nothing
        self._next, self._was_tried = min(_FIRST_DRAFTS, most), False

    @property
    def count(self) -> int:
        """Tokens to draft now; 0 where it would cost too much if none of them is met, or no step was timed yet."""
        if self._max_loss == math.inf:
            return self._most
        if not self._plain:
            return 0
        pays = self._balance - self._loss >= -self._max_loss * self._elapsed
        return self._next if pays or not self._was_tried else 0

    def note(self, seconds: float, drafted: int = 0, accepted: int = 0) -> None:
        """Take in a step, drafting included: `drafted` tokens were verified in it, and so many of them met."""
        self._elapsed += seconds
        if not drafted or not self._plain:
            self._plain.append(seconds)
            return
        plain = statistics.median(self._plain)
        self._was_tried = True
        self._loss = max(0.0, seconds - plain)
        self._balance += (1 + accepted) * plain - seconds
        self._next = min(self._most, 2 * drafted) if accepted == drafted else max(1, min(accepted + 1, self._most))
