"""Metrics that a Program computes: accuracy and auc.

Floor: 7.
"""

from __future__ import annotations

from typing import Any

from polyreme.core import unique_name
from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer, one
from polyreme.fluid.layers.elementwise import put
from polyreme.fluid.layers.tensor import global_variable
from polyreme.ops import arithmetic as ar
from polyreme.ops import attributes, search
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.manipulation import concat, flip
from polyreme.ops.scan import cumsum
from polyreme.ops.scatter import scatter_nd


@layer
def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """The part of rows whose label is among the k highest scores: [n, classes], label [n, 1] -> [1].

    correct and total, Variables, receive the two counts.
    """
    _, places = search.topk(input, k)
    hits = rd.sum(ar.cast(rd.any(ar.equal(places, ar.cast(label, places.dtype)), 1), "int64"))
    count = rd.max(attributes.shape(input)[:1])
    for given, value in ((correct, hits), (total, count)):
        if given is not None:
            put(given, ar.cast(one(value), given.dtype), "accuracy")
    return one(ar.divide(ar.cast(hits, "float32"), ar.cast(count, "float32")))


@layer
def auc(
    input: Any, label: Any, curve: str = "ROC", num_thresholds: int = 2**12 - 1, topk: int = 1, slide_steps: int = 1
) -> tuple[Any, Any, list[Any]]:
    """Area under the ROC curve: (of all runs, of the last slide_steps runs, [their counts]), each of shape [1].

    input [n, 2] (of class 0 and 1) or [n, 1], label [n, 1]. Scores are counted in num_thresholds + 1 bins, positives
    and negatives apart, in Variables that keep them from run to run. slide_steps: 0 for all runs. Raises ConfigError
    for another curve, and for topk other than 1.
    """
    if curve != "ROC" or topk != 1:
        raise ConfigError(f"fluid.layers.auc: curve={curve!r}, topk={topk}; here are 'ROC' and 1")
    bins = ar.cast(mt.floor(mt.scale(input[:, -1], float(num_thresholds))), "int64")
    positive = ar.cast(label.reshape([-1]), "int64")
    seen = [
        scatter_nd(bins.reshape([-1, 1]), weight, [num_thresholds + 1])
        for weight in (positive, ar.subtract(1, positive))
    ]
    name = unique_name.generate("auc")
    totals, windows = [], []
    for kind, counts in zip(("pos", "neg"), seen, strict=True):
        row = counts.reshape([1, -1])
        total = global_variable(f"{name}.stat_{kind}", [1, num_thresholds + 1], "int64", 0)
        totals.append(put(total, ar.add(total, row), "auc"))
        window = total
        if slide_steps:
            window = global_variable(f"{name}.batch_stat_{kind}", [slide_steps, num_thresholds + 1], "int64", 0)
            put(window, row if slide_steps == 1 else concat([window[1:], row], 0), "auc")
        windows.append(window)
    return _area(*totals), _area(*windows), [*windows, *totals]


def _area(positive: Any, negative: Any) -> Any:
    """Trapezoids under true positives over false positives, from the highest threshold down; 0 without one class."""
    tp, fp = (cumsum(flip(ar.cast(rd.sum(v, 0), "float64"), [0]), 0) for v in (positive, negative))
    twice = ar.add(tp, concat([tp[:1] * 0.0, tp[:-1]], 0))
    width = ar.subtract(fp, concat([fp[:1] * 0.0, fp[:-1]], 0))
    whole = ar.multiply(tp[-1:], fp[-1:])
    area = ar.multiply(rd.sum(ar.multiply(twice, width)), 0.5)
    return ar.cast(ar.divide(area, mt.maximum(whole, 1.0)), "float32")


__all__ = ["accuracy", "auc"]
