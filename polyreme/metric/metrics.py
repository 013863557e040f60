"""Metrics computed on the host from arrays or Tensors: Accuracy, Precision, Recall, Auc.

Predictions and labels are numpy arrays or Tensors; values are read on the host, so call these outside a
captured step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError
from polyreme.metric.in_program import accuracy_of


class Metric(ABC):
    """Base of all metrics: `compute` per batch (on what the model gave), `update` with its result, `accumulate`.

    >>> class Mean(Metric):
    ...     def reset(self):
    ...         self.values = []
    ...     def update(self, value):
    ...         self.values.append(float(value))
    ...     def accumulate(self):
    ...         return sum(self.values) / len(self.values)
    ...     def name(self):
    ...         return "mean"
    >>> m = Mean()
    >>> m.reset()
    >>> for loss in (1.0, 3.0):
    ...     m.update(*m.compute(loss))
    >>> m.accumulate()
    2.0
    """

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything seen."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Takes in what `compute` gave for one batch."""

    @abstractmethod
    def accumulate(self) -> Any:
        """The metric over everything since the last reset."""

    @abstractmethod
    def name(self) -> Any:
        """The name, or list of names, of what `accumulate` gives."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares outputs and labels of one batch for `update`; hands them on unchanged unless overridden."""
        _refuse_extra(self, (), kwargs)
        return args


class Accuracy(Metric):
    """The part of samples whose label is among the k highest scores, for each k of topk.

    Of equal scores the lower class comes first. Raises ConfigError for a k that is not a whole number of at least 1.

    >>> m = Accuracy(topk=(1, 2))
    >>> correct = m.compute(np.array([[0.1, 0.5, 0.4], [0.2, 0.3, 0.5]]), np.array([[2], [2]]))
    >>> m.update(correct), m.accumulate(), m.name()
    ([0.5, 1.0], [0.5, 1.0], ['acc_top1', 'acc_top2'])
    """

    topk: tuple[int, ...]
    maxk: int
    total: list[float]
    count: list[int]

    def __init__(self, topk: Sequence[int] = (1,), name: str | None = None, *args: Any, **kwargs: Any) -> None:
        _refuse_extra(self, args, kwargs)
        if not isinstance(topk, (tuple, list)) or not topk or not all(_is_count(k) for k in topk):
            raise ConfigError(f"Accuracy: topk={topk!r}; give a tuple of whole numbers of at least 1, such as (1, 5)")
        self.topk = tuple(topk)
        self.maxk = max(topk)
        self._name = name or "acc"
        self.reset()

    def compute(self, pred: Any, label: Any, *args: Any) -> Any:
        """Where the label stands among the best maxk scores: 1 at its place, else 0.

        pred [..., classes]; label [...], [..., 1], or one-hot or soft [..., classes], of which the highest counts;
        -> float32 [..., maxk], a Tensor if pred is one. Raises ShapeError for shapes that do not fit and for maxk
        above the number of classes, DataError for a label that is no class.
        """
        _refuse_extra(self, args, {})
        rank = _label_rank("Accuracy.compute", _array("pred", pred), _array("label", label), self.maxk)
        correct = (rank[..., None] == np.arange(self.maxk)).astype(np.float32)
        return to_tensor(correct) if isinstance(pred, Tensor) else correct

    def update(self, correct: Any, *args: Any) -> float | list[float]:
        """Takes in what `compute` gave, [..., maxk]; -> the accuracy of this batch, for each k."""
        _refuse_extra(self, args, {})
        array = _array("correct", correct)
        if array.ndim == 0 or array.shape[-1] < self.maxk:
            raise ShapeError(f"Accuracy.update: correct has shape {list(array.shape)}; give [..., {self.maxk}]")
        hits = [float(array[..., :k].sum(dtype=np.float64)) for k in self.topk]
        samples = array[..., 0].size
        self.total = [a + b for a, b in zip(self.total, hits, strict=True)]
        self.count = [n + samples for n in self.count]
        return _one_or_list([_ratio(h, samples) for h in hits])

    def reset(self) -> None:
        """Forgets everything seen."""
        self.total, self.count = [0.0] * len(self.topk), [0] * len(self.topk)

    def accumulate(self) -> float | list[float]:
        """The accuracy for each k since the last reset; 0 before the first sample."""
        return _one_or_list([_ratio(t, n) for t, n in zip(self.total, self.count, strict=True)])

    def name(self) -> list[str]:
        """One name for each k."""
        return [self._name] if self.topk == (1,) else [f"{self._name}_top{k}" for k in self.topk]


class Precision(Metric):
    """Of the samples given a probability of at least 0.5, the part whose label is 1.

    >>> m = Precision()
    >>> m.update(np.array([0.1, 0.5, 0.6, 0.7]), np.array([0, 1, 1, 0]))
    >>> round(m.accumulate(), 4)
    0.6667
    """

    tp: int
    fp: int

    def __init__(self, name: str = "precision", *args: Any, **kwargs: Any) -> None:
        _refuse_extra(self, args, kwargs)
        self._name = name
        self.reset()

    def update(self, preds: Any, labels: Any) -> None:
        """preds: probabilities of the positive class; labels: 0 or 1, as many.

        Raises ShapeError if their numbers differ, DataError for values outside those ranges.
        """
        positive, truth = _binary("Precision.update", preds, labels)
        self.tp += int((positive & truth).sum())
        self.fp += int((positive & ~truth).sum())

    def reset(self) -> None:
        """Forgets everything seen."""
        self.tp = self.fp = 0

    def accumulate(self) -> float:
        """True positives / all predicted positive; 0 if there are none."""
        return _ratio(self.tp, self.tp + self.fp)

    def name(self) -> str:
        """The name given."""
        return self._name


class Recall(Metric):
    """Of the samples labelled 1, the part given a probability of at least 0.5.

    >>> m = Recall()
    >>> m.update(np.array([0.1, 0.5, 0.6, 0.7]), np.array([1, 1, 1, 0]))
    >>> round(m.accumulate(), 4)
    0.6667
    """

    tp: int
    fn: int

    def __init__(self, name: str = "recall", *args: Any, **kwargs: Any) -> None:
        _refuse_extra(self, args, kwargs)
        self._name = name
        self.reset()

    def update(self, preds: Any, labels: Any) -> None:
        """As Precision.update."""
        positive, truth = _binary("Recall.update", preds, labels)
        self.tp += int((positive & truth).sum())
        self.fn += int((~positive & truth).sum())

    def reset(self) -> None:
        """Forgets everything seen."""
        self.tp = self.fn = 0

    def accumulate(self) -> float:
        """True positives / all labelled positive; 0 if there are none."""
        return _ratio(self.tp, self.tp + self.fn)

    def name(self) -> str:
        """The name given."""
        return self._name


class Auc(Metric):
    """Area under the ROC curve, or under the precision-recall curve (as average precision) with curve="PR".

    Scores are counted in num_thresholds + 1 bins, so two scores in one bin are a tie; memory does not grow with the
    data. ROC: trapezoids. PR: sum of (recall step) * precision.
    """

    def __init__(
        self, curve: str = "ROC", num_thresholds: int = 4095, name: str = "auc", *args: Any, **kwargs: Any
    ) -> None:
        _refuse_extra(self, args, kwargs)
        if curve not in ("ROC", "PR"):
            raise ConfigError(f"Auc: curve={curve!r}; give 'ROC' or 'PR'")
        if not _is_count(num_thresholds):
            raise ConfigError(f"Auc: num_thresholds={num_thresholds!r}; give a whole number of at least 1")
        self._curve, self._num_thresholds, self._name = curve, num_thresholds, name
        self.reset()

    def update(self, preds: Any, labels: Any) -> None:
        """preds [batch, 2]: probabilities of class 0 and 1; labels 0 or 1, [batch] or [batch, 1].

        Raises ShapeError for other shapes, DataError for values outside those ranges.
        """
        array = _array("preds", preds)
        if array.ndim != 2 or array.shape[1] != 2:
            raise ShapeError(
                f"Auc.update: preds has shape {list(array.shape)}; give [batch, 2], a column for each class"
            )
        score, truth = _scores_and_truth("Auc.update", array[:, 1], labels)
        bins = (score * self._num_thresholds).astype(np.int64)
        self._stat_pos += np.bincount(bins[truth], minlength=self._num_thresholds + 1)
        self._stat_neg += np.bincount(bins[~truth], minlength=self._num_thresholds + 1)

    def reset(self) -> None:
        """Forgets everything seen."""
        self._stat_pos = np.zeros(self._num_thresholds + 1, np.int64)
        self._stat_neg = np.zeros(self._num_thresholds + 1, np.int64)

    def accumulate(self) -> float:
        """The area since the last reset; 0 while either class is missing."""
        # From the highest threshold down: how many of each class are predicted positive.
        pos, neg = np.cumsum(self._stat_pos[::-1]), np.cumsum(self._stat_neg[::-1])
        if pos[-1] == 0 or neg[-1] == 0:
            return 0.0
        if self._curve == "ROC":
            return float(np.trapezoid(np.r_[0, pos], np.r_[0, neg]) / pos[-1] / neg[-1])
        precision = pos / np.maximum(pos + neg, 1)
        return float((np.diff(np.r_[0, pos]) * precision).sum() / pos[-1])

    @staticmethod
    def trapezoid_area(x1: float, x2: float, y1: float, y2: float) -> float:
        """The area between two points of a curve and the axis below: |x1 - x2| (y1 + y2) / 2."""
        return abs(x1 - x2) * (y1 + y2) / 2

    def name(self) -> str:
        """The name given."""
        return self._name


def accuracy(
    input: Any,
    label: Any,
    k: int = 1,
    correct: Tensor | None = None,
    total: Tensor | None = None,
    name: str | None = None,
) -> Tensor:
    """The part of samples whose label is among the k highest scores; -> a float32 Tensor of shape [].

    input [batch, classes], label [batch, 1]. correct and total, Tensors of one element, receive the two counts.
    Raises ShapeError for other shapes, ConfigError for a k below 1, DataError for a label that is no class
    and for an empty batch. In static mode it is recorded, and values are not checked.
    """
    if state.recording():
        return accuracy_of(input, label, k, correct, total)
    scores, labels = _array("input", input), _array("label", label)
    if not _is_count(k):
        raise ConfigError(f"accuracy: k={k!r}; give a whole number of at least 1")
    if scores.ndim != 2 or labels.shape != (len(scores), 1):
        raise ShapeError(
            f"accuracy: input has shape {list(scores.shape)} and label {list(labels.shape)}; "
            "give [batch, classes] and [batch, 1]"
        )
    if not len(scores):
        raise DataError("accuracy: got a batch of 0 samples; give at least one")
    hits = int((_label_rank("accuracy", scores, labels, k) < k).sum())
    _fill("correct", correct, hits)
    _fill("total", total, len(scores))
    return to_tensor(np.float32(hits / len(scores)))


def _label_rank(who: str, scores: np.ndarray, label: np.ndarray, k: int) -> np.ndarray:
    """How many classes come before the label's, by score and then by class number: scores [..., c] -> [...]."""
    label = _as_classes(who, scores, label)
    classes = scores.shape[-1]
    if k > classes:
        raise ShapeError(f"{who}: the best {k} of {classes} classes are asked for; make k at most {classes}")
    if not ((label >= 0) & (label < classes)).all():
        raise DataError(f"{who}: labels lie in {label.min()} .. {label.max()}; give classes in 0 .. {classes - 1}")
    if np.isnan(scores).any():
        raise DataError(f"{who}: the scores hold NaN, so classes have no order; find where they come from")
    index = label.astype(np.int64)[..., None]
    own = np.take_along_axis(scores, index, -1)
    return ((scores > own) | ((scores == own) & (np.arange(classes) < index))).sum(-1)


def _as_classes(who: str, scores: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The label as class numbers, of the scores' shape without its last dim."""
    if scores.ndim and label.shape == scores.shape and scores.shape[-1] > 1:
        return label.argmax(-1)
    if scores.ndim and label.shape == (*scores.shape[:-1], 1):
        return label[..., 0]
    if scores.ndim and label.shape == scores.shape[:-1]:
        return label
    raise ShapeError(
        f"{who}: scores have shape {list(scores.shape)} and labels {list(label.shape)}; "
        "give [..., classes] and [...], [..., 1] or [..., classes]"
    )


def _binary(who: str, preds: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    score, truth = _scores_and_truth(who, _array("preds", preds), labels)
    return score >= 0.5, truth


def _scores_and_truth(who: str, preds: np.ndarray, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    score, truth = preds.reshape(-1), _array("labels", labels).reshape(-1)
    if score.size != truth.size:
        raise ShapeError(f"{who}: {score.size} predictions and {truth.size} labels; give one label a prediction")
    if not ((score >= 0) & (score <= 1)).all():
        raise DataError(f"{who}: predictions must be probabilities in 0 .. 1; apply sigmoid or softmax first")
    if not ((truth == 0) | (truth == 1)).all():
        raise DataError(f"{who}: labels lie in {truth.min()} .. {truth.max()}; give 0 or 1")
    return score, truth == 1


def _array(name: str, value: Any) -> np.ndarray:
    array = value.numpy() if hasattr(value, "numpy") else value
    if not isinstance(array, np.ndarray):
        raise DTypeError(f"{name} is a {type(value).__name__}; give a numpy array or a Tensor")
    return array


def _fill(name: str, holder: Tensor | None, count: int) -> None:
    if holder is None:
        return
    if holder.size != 1:
        raise ShapeError(f"accuracy: {name} has shape {list(holder.shape)}; give a Tensor of one element")
    holder.set_value(np.full(holder.shape, count, holder.dtype))


def _refuse_extra(metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args or kwargs:
        extra = [*(type(arg).__name__ for arg in args), *(f"{name}=" for name in kwargs)]
        raise ConfigError(
            f"{type(metric).__name__} does not take {', '.join(extra)}; leave it out. compute(pred, label) gives what "
            "update takes"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _one_or_list(values: list[float]) -> float | list[float]:
    return values[0] if len(values) == 1 else values
