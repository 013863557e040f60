"""Words to numbers: counted words in the order of how often they occur, and sentences between marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from polyreme.errors import ConfigError

START, END, UNKNOWN = "<s>", "<e>", "<unk>"


def more_frequent(counts: Mapping[str | bytes, int], above: int) -> dict[str | bytes, int]:
    """Words that occur more than `above` times to 0, 1, ...: the most frequent first, equals in alphabetical order."""
    kept = [(word, count) for word, count in counts.items() if count > above]
    kept.sort(key=lambda item: (-item[1], item[0] if isinstance(item[0], bytes) else item[0].encode()))
    return {word: index for index, (word, _) in enumerate(kept)}


def most_frequent(words: Iterable[str], size: int) -> dict[str, int]:
    """The three marks, then the most frequent words, to 0 .. size - 1; equals in the order of first appearance."""
    frequent = [word for word, _ in Counter(words).most_common(max(size - 3, 0))]
    return {word: index for index, word in enumerate([START, END, UNKNOWN, *frequent][:size])}


def check_vocabulary_size(owner: str, name: str, size: int) -> int:
    """The size of a dictionary. Raises ConfigError for one that is not positive."""
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ConfigError(f"{owner}: {name}={size!r}; give how many words the dictionary is to have, marks included")
    return size


def ids(words: Iterable[str | bytes], dictionary: Mapping[Any, int], unknown: int) -> list[int]:
    """Numbers of words, `unknown` for those that the dictionary lacks."""
    return [dictionary.get(word, unknown) for word in words]


def reversed_dictionary(dictionary: Mapping[str, int]) -> dict[int, str]:
    """Numbers to words."""
    return {index: word for word, index in dictionary.items()}
