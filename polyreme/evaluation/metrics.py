"""Metrics that compare a written answer with the wanted ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module

_WORD = re.compile(r"\w+")


def is_exact(text: str, references: Sequence[str]) -> bool:
    """Whether a text is one of the references, white space around either left out.

    >>> is_exact(" Paris ", ["Paris"]), is_exact("paris", ["Paris"])
    (True, False)
    """
    return text.strip() in {reference.strip() for reference in references}


def rouge_l(text: str, references: Sequence[str]) -> float:
    """ROUGE-L: the F1 of the longest common subsequence of words in lower case, of the nearest reference, 0 to 1.

    Source: C.-Y. Lin, "ROUGE", 2004, section 3.1, with equal weights.

    >>> rouge_l("the cat sat", ["The cat, it sat."])
    0.8571428571428571
    """
    words = _WORD.findall(text.lower())
    return max((_f1(words, _WORD.findall(reference.lower())) for reference in references), default=0.0)


def _f1(words: list[str], others: list[str]) -> float:
    row = [0] * (len(others) + 1)  # of the longest common subsequence of the words so far and so many others
    for word in words:
        before = 0
        for place, other in enumerate(others, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(words) + len(others)) if row[-1] else 0.0


def chrf(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float | None:
    """chrF of all texts by sacrebleu, 0 to 100; None where that is not installed (polyreme[eval])."""
    try:
        library = import_module("sacrebleu")
    except ImportError:
        return None
    most = max(map(len, references))
    streams = [[own[number] if number < len(own) else own[0] for own in references] for number in range(most)]
    return float(library.corpus_chrf(list(texts), streams).score)
