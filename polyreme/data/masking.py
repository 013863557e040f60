"""Rows of documents with masked words, which a model is asked for."""

from __future__ import annotations

import numpy as np

from polyreme.data.packing import NO_LABEL, PackedDataset
from polyreme.errors import ConfigError


def num_asked(seq_len: int, rate: float) -> int:
    """Most places of a row that are asked about.

    >>> num_asked(128, 0.15)
    19
    """
    return max(1, round(rate * seq_len))


class MaskedDataset:
    """Each row of documents `copies` times, with other words masked each time: map-style, the same for the same seed.

    Item i is (inputs int32 `[3, seq_len]`, asked int32 `[2, num_asked]`): a row as PackedDataset gives it, and the
    places that are asked about, in order, with the tokens that stood there; NO_LABEL in both behind the last. Of a row
    a part of the tokens, `rate`, is asked about, one at least: of ten eight are mask, one is any of the vocabulary, and
    one stays. Source: arXiv:1810.04805, section 3.1, and for the copies its appendix A.2.

    rows: of ahead=0. Raises ConfigError for a rate outside 0 to 1 and a mask that is no token.
    """

    rows: PackedDataset
    mask: int
    vocab_size: int
    seed: int
    rate: float
    copies: int

    def __init__(
        self, rows: PackedDataset, mask: int, vocab_size: int, seed: int, rate: float, copies: int = 1
    ) -> None:
        if not 0 < rate < 1 or not 0 <= mask < vocab_size or copies < 1:
            raise ConfigError(
                f"masked words: rate {rate}, mask {mask}, copies {copies}; give a rate between 0 and 1, a token of 0 "
                f"to {vocab_size - 1} and at least one copy"
            )
        self.rows, self.mask, self.vocab_size = rows, mask, vocab_size
        self.seed, self.rate, self.copies = seed, rate, copies

    def __len__(self) -> int:
        return len(self.rows) * self.copies

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of a data set of {length}")
        index %= length
        inputs, tokens = self.rows[index % len(self.rows)]
        asked = np.full((2, num_asked(self.rows.seq_len, self.rate)), NO_LABEL, np.int32)
        size = int(np.count_nonzero(tokens != NO_LABEL))
        count = min(max(1, round(self.rate * size)), size)
        rng = np.random.default_rng([self.seed, index])
        places = np.sort(rng.choice(size, count, replace=False))
        asked[:, :count] = places, tokens[places]
        inputs[0, places] = self._instead(tokens[places], rng)
        return inputs, asked

    def _instead(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The tokens in place of those that are asked for."""
        kind, other = rng.random(len(tokens)), rng.integers(0, self.vocab_size, len(tokens))
        return np.where(kind < 0.8, self.mask, np.where(kind < 0.9, other, tokens))
