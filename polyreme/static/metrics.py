"""Metrics in Programs: accuracy and auc."""

from __future__ import annotations

from typing import Any

from polyreme.core import state
from polyreme.errors import ConfigError, ShapeError
from polyreme.metric.in_program import accuracy_of, area, counted, moved_on
from polyreme.static.variables import create_global_var


def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """The part of samples whose label is among the k highest scores, [batch, classes] and [batch, 1] -> float32 [].

    correct, total: Variables that receive the two counts.
    """
    return accuracy_of(input, label, k, correct, total)


def auc(
    input: Any,
    label: Any,
    curve: str = "ROC",
    num_thresholds: int = 4095,
    topk: int = 1,
    slide_steps: int = 1,
    ins_tag_weight: Any = None,
) -> tuple[Any, Any, list[Any]]:
    """Area under the ROC curve: of all batches so far, of the last slide_steps ones, and the counts behind both.

    input [batch, 2], probabilities of classes 0 and 1; label [batch, 1]. Scores are counted in num_thresholds + 1 bins;
    slide_steps=0: the second area is the first. -> (float64 [], float64 [], [positive and negative counts of the last
    steps, positive and negative counts of all]): persistable; set them to zero to start over.
    Raises ConfigError for another curve, topk other than 1 and weights.
    """
    if curve != "ROC" or topk != 1 or ins_tag_weight is not None:
        raise ConfigError(
            f"auc: curve={curve!r}, topk={topk!r}, ins_tag_weight={ins_tag_weight!r}; only the ROC curve of unweighted "
            "samples is computed in a Program (metric.Auc has the precision-recall curve)"
        )
    if input.ndim != 2 or input.shape[1] != 2:
        raise ShapeError(f"auc: input has shape {list(input.shape)}; give [batch, 2]: probabilities of class 0 and 1")
    if num_thresholds < 1 or slide_steps < 0:
        raise ConfigError(f"auc: num_thresholds={num_thresholds}, slide_steps={slide_steps}; at least 1, at least 0")
    now = counted(input.detach()[:, 1], label, num_thresholds)
    sums = [_state([1, num_thresholds + 1]) for _ in now]
    for kept, counts in zip(sums, now, strict=True):
        state.write(kept, state.read(kept + counts))
    whole = area(*(kept[0] for kept in sums))
    if slide_steps == 0:
        return whole, whole, [*sums, *sums]
    windows = [_state([slide_steps, num_thresholds + 1]) for _ in now]
    for window, counts in zip(windows, now, strict=True):
        state.write(window, state.read(moved_on(window, counts)))
    return whole, area(*(window.sum(0) for window in windows)), [*windows, *sums]


def _state(shape: list[int]) -> Any:
    return create_global_var(shape, 0, "int64", persistable=True)
