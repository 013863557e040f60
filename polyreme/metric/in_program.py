"""Accuracy and area under the ROC curve made of ops, for predictions whose values are not known yet."""

from __future__ import annotations

from typing import Any

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.arithmetic import cast
from polyreme.ops.creation import full, zeros
from polyreme.ops.indices.gather import where
from polyreme.ops.indices.scatter import scatter_nd_add
from polyreme.ops.manipulation import concat, flip, reshape
from polyreme.ops.scan import cumsum
from polyreme.ops.search import topk


def accuracy_of(input: Any, label: Any, k: int, correct: Any = None, total: Any = None) -> Any:
    """The part of samples whose label is among the k highest scores, [batch, classes] and [batch, 1] -> float32 [].

    correct, total: Variables that receive the two counts. Raises ShapeError for other shapes, ConfigError for k < 1.
    """
    if type(k) is not int or k < 1:
        raise ConfigError(f"accuracy: k={k!r}; give a whole number of at least 1")
    if input.ndim != 2 or label.ndim != 2 or label.shape[1] != 1:
        raise ShapeError(
            f"accuracy: input has shape {list(input.shape)} and label {list(label.shape)}; give [batch, classes] and "
            "[batch, 1]"
        )
    _, best = topk(input.detach(), k, axis=1)
    hits = cast(best == cast(label, best.dtype), "int64").sum()
    count = (label.detach() == label.detach()).astype("int64").sum()
    for target, value in ((correct, hits), (total, count)):
        if target is not None:
            _give(target, reshape(value, target.shape).astype(target.dtype))
    return cast(hits, "float32") / cast(count, "float32")


def _give(target: TensorState, value: TensorState) -> None:
    state.write(target, state.read(value))


def counted(score: Any, label: Any, bins: int) -> tuple[Any, Any]:
    """How many samples of label 1, and of label 0, have a score in each of bins + 1 equal parts of [0, 1]: int64."""
    at = reshape((score * bins).astype("int64").clip(0, bins), [-1, 1])
    positive = (reshape(label, [-1]) > 0).astype("int64")
    none = zeros([bins + 1], "int64")
    return scatter_nd_add(none, at, positive), scatter_nd_add(none, at, 1 - positive)


def area(positive: Any, negative: Any) -> Any:
    """Area under the ROC curve by trapezoids, from counts in bins; 0 if a class is missing. -> float64 []."""
    start = zeros([1], "float64")
    pos, neg = (concat([start, cumsum(flip(c.astype("float64"), 0))]) for c in (positive, negative))
    trapezoids = ((pos[1:] + pos[:-1]) * (neg[1:] - neg[:-1])).sum() / 2
    both = pos[-1] * neg[-1]
    return where(both > 0, trapezoids / both.clip(min=1), full([], 0.0, "float64"))


def moved_on(window: Any, counts: Any) -> Any:
    """A window [steps, bins] without its oldest row, and with counts as its newest."""
    return concat([window[1:], reshape(counts, [1, -1])])
