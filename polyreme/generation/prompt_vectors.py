"""What stands in prompts in place of embeddings of tokens, as what a model sees of a picture."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.models.parts.decoder import InsertedVectors


@dataclass(frozen=True, eq=False)
class PromptVectors:
    """Vectors, float32 [count, embed], that stand in a prompt in place of the embeddings of the tokens at these places,
    int64 [count], in order."""

    places: np.ndarray
    vectors: np.ndarray

    @cached_property
    def digest(self) -> bytes:
        """Of places and vectors, 128 bits."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.places).data, digest_size=16)
        digest.update(np.ascontiguousarray(self.vectors).data)
        return digest.digest()

    def part(self, start: int, stop: int) -> PromptVectors:
        """Those of the places from start to stop, which are counted from start on."""
        first, last = np.searchsorted(self.places, [start, stop])
        return PromptVectors(self.places[first:last] - start, self.vectors[first:last])

    def check(self, length: int, width: int, whose: str) -> None:
        """Raises ConfigError, said of `whose`, for vectors that do not fit a prompt of so many tokens and a model of
        this width."""
        count, places = len(self.places), self.places
        if self.vectors.shape != (count, width) or np.any(np.diff(places) <= 0):
            raise ConfigError(
                f"{whose}: vectors {list(self.vectors.shape)} at {count} places; give one of {width} numbers for each, "
                "in the order of the places"
            )
        if count and not 0 <= places[0] <= places[-1] < length:
            raise ConfigError(f"{whose}: vectors at places {places[0]} to {places[-1]} of a prompt of {length} tokens")


def are_equal(one: PromptVectors | None, other: PromptVectors | None) -> bool:
    """Whether the same stands in both prompts, to the bit."""
    if one is other or one is None or other is None:
        return one is other
    return one.digest == other.digest


def insert_vectors(rows: Sequence[PromptVectors | None], seq: int) -> InsertedVectors | None:
    """The vectors of rows of `seq` tokens each, None where there are none."""
    some = [row for row in rows if row is not None and len(row.places)]
    if not some:
        return None
    vectors = np.zeros((len(rows), seq, some[0].vectors.shape[1]), np.float32)
    is_inserted = np.zeros((len(rows), seq), bool)
    for number, row in enumerate(rows):
        if row is not None:
            vectors[number, row.places], is_inserted[number, row.places] = row.vectors, True
    return InsertedVectors(to_tensor(vectors), to_tensor(is_inserted))
