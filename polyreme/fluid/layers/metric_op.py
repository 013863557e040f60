"""Metrics that a Program computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer, one
from polyreme.nn import functional as F
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.manipulation import reshape
from polyreme.sequences import lod as lods
from polyreme.static import host, metrics


@layer
def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """The part of rows whose label is among the k highest scores: [n, classes], label [n, 1] -> [1].

    correct and total, Variables, receive the two counts.
    """
    return one(metrics.accuracy(input, label, k, correct, total))


@layer
def auc(
    input: Any, label: Any, curve: str = "ROC", num_thresholds: int = 2**12 - 1, topk: int = 1, slide_steps: int = 1
) -> tuple[Any, Any, list[Any]]:
    """Area under the ROC curve: (of all runs, of the last slide_steps runs, [their counts]), both of shape [1].

    input [n, 2], probabilities of class 0 and 1, label [n, 1]. slide_steps: 0 for all runs.
    """
    every, last, counts = metrics.auc(input, label, curve, num_thresholds, topk, slide_steps)
    return one(every), one(last), counts


@layer
def mean_iou(input: Any, label: Any, num_classes: int) -> tuple[Any, Any, Any]:
    """(mean of the classes' intersection over union [1], wrong, correct): the counts are int32 [num_classes].

    input and label: classes of one shape. A pair that differs is wrong for both its classes; a class of neither has no
    part in the mean.
    """
    seen, wanted = (ar.cast(reshape(v, [-1]), "int64") for v in (input, label))
    pairs = [ar.cast(F.one_hot(v, num_classes), "int64") for v in (seen, wanted)]
    right = ar.cast(reshape(ar.equal(seen, wanted), [-1, 1]), pairs[0].dtype)
    correct = rd.sum(ar.multiply(pairs[0], right), 0)
    wrong = rd.sum(ar.multiply(ar.add(pairs[0], pairs[1]), ar.subtract(1, right)), 0)
    union = ar.add(correct, wrong)
    present = ar.cast(ar.greater_than(union, 0), "float32")
    each = ar.divide(ar.cast(correct, "float32"), ar.cast(mt.maximum(union, 1), "float32"))
    mean = ar.divide(rd.sum(each), mt.maximum(rd.sum(present), 1.0))
    return one(mean), ar.cast(wrong, "int32"), ar.cast(correct, "int32")


@layer
def chunk_eval(
    input: Any, label: Any, chunk_scheme: str, num_chunk_types: int, excluded_chunk_types: Any = None,
    seq_length: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(precision, recall, F1, float32 [1]; chunks of input, of label, of both, int64 [1]) of sequences of tags.

    input, label: int64 [rows, 1] with sequences, or padded [n, steps] with seq_length [n]. A tag is type * places +
    place, where chunk_scheme "IOB" has the places B, I; "IOE" I, E; "IOBES" B, I, E, S; "plain" one. num_chunk_types *
    places and above is outside of chunks. excluded_chunk_types are not counted. Computed on the host.
    """
    if chunk_scheme not in SCHEMES:
        raise ConfigError(f"fluid.layers.chunk_eval: chunk_scheme={chunk_scheme!r}; there are {sorted(SCHEMES)}")
    lengths = lods.inner(lods.sequences("fluid.layers.chunk_eval", input)[1]) if seq_length is None else seq_length
    excluded: set[int] = set(excluded_chunk_types or ())

    def counted(seen: np.ndarray, wanted: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        cuts = counts.reshape(-1)
        chunks = [_chunks(_sequences(v, cuts, seq_length is not None), chunk_scheme, num_chunk_types, excluded)
                 for v in (seen, wanted)]  # fmt: skip
        right = len(chunks[0] & chunks[1])
        precision, recall = (right / len(v) if v else 0.0 for v in chunks)
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        return [np.array([v], "float32") for v in (precision, recall, f1)] + [
            np.array([v], "int64") for v in (len(chunks[0]), len(chunks[1]), right)
        ]

    metas = [([1], "float32")] * 3 + [([1], "int64")] * 3
    return tuple(host.called(counted, None, [], metas, [input, label, lengths]))


SCHEMES = {"IOB": "BI", "IOE": "IE", "IOBES": "BIES", "plain": "-"}
"""The places that a tag may have in a chunk, by the names of schemes."""


def _sequences(tags: np.ndarray, counts: np.ndarray, padded: bool) -> list[np.ndarray]:
    if padded:
        return [row[:n] for row, n in zip(tags.reshape(len(counts), -1), counts, strict=True)]
    return np.split(tags.reshape(-1), np.cumsum(counts)[:-1])


def _chunks(sequences: list[np.ndarray], scheme: str, types: int, excluded: set[int]) -> set[tuple[int, ...]]:
    """(sequence, first, last, type) of each chunk."""
    places, chunks = SCHEMES[scheme], set()
    for number, sequence in enumerate(sequences):
        tags = [(int(t) // len(places), places[int(t) % len(places)]) for t in sequence]
        first = None
        for i, (kind, place) in enumerate(tags):
            if kind >= types:
                first = None
                continue
            before = tags[i - 1] if i else (types, "-")
            if first is None or before[0] != kind or place in "BS" or before[1] in "ES":
                first = i
            after = tags[i + 1] if i + 1 < len(tags) else (types, "-")
            if (after[0] != kind or place in "ES" or after[1] in "BS") and kind not in excluded:
                chunks.add((number, first, i, kind))
    return chunks


__all__ = ["accuracy", "auc", "chunk_eval", "mean_iou"]
