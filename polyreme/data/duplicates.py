"""Documents that come twice: the same text, or nearly the same by MinHash with locality-sensitive hashing.

What is kept of a document is computed by whoever reads it, `mark`; who has seen all marks in order decides, `is_new`.
"""

from __future__ import annotations

import re
from typing import Protocol

import numpy as np
import xxhash

from polyreme.errors import ConfigError, did_you_mean

SHINGLE = 5
"""Words that count as one element of a document's set."""
ALIKE = 0.8
"""Jaccard similarity, |a and b| / |a or b| of two documents' sets, from which on they are duplicates."""
_BANDS, _ROWS = 16, 8
"""Signatures that agree in all numbers of some band are compared: 95% of pairs that are alike by 0.8, 99.99% by 0.9."""
_NUMBERS = _BANDS * _ROWS
_BATCH = 4096  # shingles whose numbers are held at once
# letters of scripts without spaces between words count as words
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]|[^\W_]+")
_random = np.random.default_rng(0)
_FACTORS = _random.integers(0, 2**64, _NUMBERS, np.uint64) | np.uint64(1)
_TERMS = _random.integers(0, 2**64, _NUMBERS, np.uint64)


class Duplicates(Protocol):
    """A way of telling that a document has come before."""

    @staticmethod
    def mark(text: str) -> bytes:
        """The mark by which a document is compared."""
        ...

    def is_new(self, mark: bytes) -> bool:
        """Whether no document before was like it; it then counts for those that follow."""
        ...


class SameText:
    """Documents of the same text, by xxh3_128: 16 bytes and some 80 of a set's entry are kept of each.

    >>> seen = SameText()
    >>> [seen.is_new(seen.mark(text)) for text in ("a b", "a c", "a b")]
    [True, True, False]
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    @staticmethod
    def mark(text: str) -> bytes:
        """The digest of the text."""
        return xxhash.xxh3_128_digest(text.encode())

    def is_new(self, mark: bytes) -> bool:
        """Whether the digest has not come before."""
        count = len(self._seen)
        self._seen.add(mark)
        return len(self._seen) > count


class NearText:
    """Documents whose sets of SHINGLE words one after another are alike by ALIKE, as their signatures estimate it.

    Case, punctuation and white space make no difference. A signature of 128 numbers estimates a similarity s with a
    standard deviation of sqrt(s (1 - s) / 128), 0.035 at 0.8. About 2 KiB are kept of each document. Source: A. Broder,
    "On the resemblance and containment of documents", 1997, doi:10.1109/SEQUEN.1997.666900.

    >>> seen, verse = NearText(), "In the beginning God created the heaven and the earth"
    >>> [seen.is_new(seen.mark(text)) for text in (verse, verse.upper() + "!", "And the earth was without form")]
    [True, False, True]
    """

    def __init__(self) -> None:
        self._signatures: list[np.ndarray] = []
        self._by_band: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]

    @staticmethod
    def mark(text: str) -> bytes:
        """The signature, uint32 `[128]`: for each of 128 hash functions the least value of the document's elements."""
        words = _WORD.findall(text.lower()) or [text]
        count = max(len(words) - SHINGLE + 1, 1)
        elements = {xxhash.xxh3_64_intdigest(" ".join(words[i : i + SHINGLE]).encode()) for i in range(count)}
        hashes = np.fromiter(elements, np.uint64, len(elements))
        least = np.full(_NUMBERS, 2**32 - 1, np.uint32)
        for begin in range(0, len(hashes), _BATCH):
            values = hashes[begin : begin + _BATCH, None] * _FACTORS + _TERMS
            np.minimum(least, (values >> np.uint64(32)).astype(np.uint32).min(0), out=least)
        return least.tobytes()

    def is_new(self, mark: bytes) -> bool:
        """Whether no document that was new has a signature alike."""
        signature = np.frombuffer(mark, np.uint32)
        width = len(mark) // _BANDS
        keys = [mark[width * band : width * (band + 1)] for band in range(_BANDS)]
        candidates = {number for key, band in zip(keys, self._by_band, strict=True) for number in band.get(key, ())}
        if any((self._signatures[number] == signature).mean() >= ALIKE for number in candidates):
            return False
        for key, band in zip(keys, self._by_band, strict=True):
            band.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(signature)
        return True


WAYS: dict[str, type[Duplicates]] = {"exact": SameText, "minhash": NearText}


def duplicates_by(name: str) -> type[Duplicates]:
    """The way of this name. Raises ConfigError for one that there is not."""
    if name not in WAYS:
        raise ConfigError(f"dedup {name!r} is unknown{did_you_mean(name, WAYS)}")
    return WAYS[name]
