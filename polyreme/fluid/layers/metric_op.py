"""Metrics that a Program computes: accuracy and auc."""

from __future__ import annotations

from typing import Any

from polyreme.fluid.layer import layer, one
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


__all__ = ["accuracy", "auc"]
