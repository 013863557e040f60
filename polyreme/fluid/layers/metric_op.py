"""Metrics that a Program computes."""

from __future__ import annotations

from typing import Any

from polyreme.fluid.layer import layer, one
from polyreme.nn import functional as F
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.manipulation import reshape
from polyreme.static import metrics


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
    wrong = rd.sum(ar.multiply(ar.add(*pairs), ar.subtract(1, right)), 0)
    union = ar.add(correct, wrong)
    present = ar.cast(ar.greater_than(union, 0), "float32")
    each = ar.divide(ar.cast(correct, "float32"), ar.cast(mt.maximum(union, 1), "float32"))
    mean = ar.divide(rd.sum(each), mt.maximum(rd.sum(present), 1.0))
    return one(mean), ar.cast(wrong, "int32"), ar.cast(correct, "int32")


__all__ = ["accuracy", "auc", "mean_iou"]
