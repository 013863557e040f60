"""Metrics added up over minibatches on the host, from what a Program computed for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme import metric as ours
from polyreme.errors import ConfigError, DataError
from polyreme.fluid.absent import refusing
from polyreme.fluid.detection_map import PrecisionCounts, check_version
from polyreme.sequences import lod as lods
from polyreme.static import host


class MetricBase:
    """Base of them. name: what it is called, its class's name if None."""

    def __init__(self, name: str | None) -> None:
        self._name = type(self).__name__ if name is None else name
        self.reset()

    def __str__(self) -> str:
        return self._name

    def reset(self) -> None:
        """Forget what was added."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(); write one")

    def update(self, preds: Any, labels: Any) -> None:
        """Add a minibatch."""
        raise NotImplementedError(f"{type(self).__name__} has no update(); write one")

    def eval(self) -> Any:
        """The metric of all that was added."""
        raise NotImplementedError(f"{type(self).__name__} has no eval(); write one")

    def get_config(self) -> dict[str, Any]:
        """Its settings and counts by name."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}


class CompositeMetric(MetricBase):
    """Several metrics of the same predictions and labels."""

    def __init__(self, name: str | None = None) -> None:
        self._metrics: list[MetricBase] = []
        super().__init__(name)

    def add_metric(self, metric: MetricBase) -> None:
        """Add one."""
        if not isinstance(metric, MetricBase):
            raise TypeError(f"CompositeMetric.add_metric takes a metric, got {type(metric).__name__}")
        self._metrics.append(metric)

    def reset(self) -> None:
        for metric in self._metrics:
            metric.reset()

    def update(self, preds: Any, labels: Any) -> None:
        for metric in self._metrics:
            metric.update(preds, labels)

    def eval(self) -> list[Any]:
        return [metric.eval() for metric in self._metrics]


class _Binary(MetricBase):
    """A metric of polyreme.metric, over probabilities [n, 1] and labels of 0 and 1."""

    of: Any

    def reset(self) -> None:
        self._counted = self.of()

    def update(self, preds: Any, labels: Any) -> None:
        self._counted.update(np.asarray(preds), np.asarray(labels))

    def eval(self) -> float:
        return self._counted.accumulate()


class Precision(_Binary):
    """True positives among predicted positives; 0 if there are none."""

    of = ours.Precision

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)


class Recall(_Binary):
    """True positives among actual positives; 0 if there are none."""

    of = ours.Recall

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)


class Auc(MetricBase):
    """Area under the "ROC" or "PR" curve, of probabilities [n, 2]."""

    def __init__(self, name: str | None, curve: str = "ROC", num_thresholds: int = 4095) -> None:
        self._new_metric = lambda: ours.Auc(curve, num_thresholds)
        super().__init__(name)

    def reset(self) -> None:
        self._counted = self._new_metric()

    def update(self, preds: Any, labels: Any) -> None:
        self._counted.update(np.asarray(preds), np.asarray(labels))

    def eval(self) -> float:
        return self._counted.accumulate()

    @staticmethod
    def trapezoid_area(x1: float, x2: float, y1: float, y2: float) -> float:
        """The area below a line from (x1, y1) to (x2, y2)."""
        return abs(x1 - x2) * (y1 + y2) / 2.0


class Accuracy(MetricBase):
    """The average of accuracies, each by its minibatch's size."""

    value: float
    weight: float

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def reset(self) -> None:
        self.value, self.weight = 0.0, 0.0

    def update(self, value: Any, weight: float) -> None:  # type: ignore[override]  (1.7's names)
        """value: the accuracy of a minibatch of `weight` samples. Raises ConfigError for a negative weight."""
        if not weight >= 0:
            raise ConfigError(f"Accuracy.update: weight={weight!r}; give the number of samples")
        self.value += float(np.asarray(value).reshape(())) * weight
        self.weight += weight

    def eval(self) -> float:
        if self.weight == 0:
            raise DataError("Accuracy.eval: nothing was added; call update() first")
        return self.value / self.weight


class ChunkEvaluator(MetricBase):
    """Precision, recall and F1 of chunks, from their counts."""

    num_infer_chunks: int
    num_label_chunks: int
    num_correct_chunks: int

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def reset(self) -> None:
        self.num_infer_chunks = self.num_label_chunks = self.num_correct_chunks = 0

    def update(  # type: ignore[override]
        self, num_infer_chunks: Any, num_label_chunks: Any, num_correct_chunks: Any
    ) -> None:
        """Counts of a minibatch: chunks found, chunks there are, chunks found rightly."""
        self.num_infer_chunks += int(np.sum(num_infer_chunks))
        self.num_label_chunks += int(np.sum(num_label_chunks))
        self.num_correct_chunks += int(np.sum(num_correct_chunks))

    def eval(self) -> tuple[float, float, float]:
        right = self.num_correct_chunks
        precision = right / self.num_infer_chunks if self.num_infer_chunks else 0.0
        recall = right / self.num_label_chunks if self.num_label_chunks else 0.0
        return precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0


class EditDistance(MetricBase):
    """The average edit distance, and the part of sequences that are not right."""

    total_distance: float
    seq_num: int
    instance_error: int

    def __init__(self, name: str | None) -> None:
        super().__init__(name)

    def reset(self) -> None:
        self.total_distance, self.seq_num, self.instance_error = 0.0, 0, 0

    def update(self, distances: Any, seq_num: Any) -> None:  # type: ignore[override]
        """distances: one for each of seq_num sequences."""
        array = np.asarray(distances)
        self.total_distance += float(array.sum())
        self.seq_num += int(np.sum(seq_num))
        self.instance_error += int((array != 0).sum())

    def eval(self) -> tuple[float, float]:
        if not self.seq_num:
            raise DataError("EditDistance.eval: nothing was added; call update() first")
        return self.total_distance / self.seq_num, self.instance_error / self.seq_num


class DetectionMAP:
    """Mean average precision of detections, computed by the Program that it is made in.

    input: rows of multiclass_nms; gt_label [rows, 1], gt_box [rows, 4] and gt_difficult [rows, 1], a sequence for each
    image, boxes as fractions of it. class_num changes nothing. A detection is right that overlaps an object of its
    class by more than overlap_threshold; difficult objects count only if evaluate_difficult. ap_version: "integral" of
    precision over recall, or its mean at 11 recalls, "11point". Raises ConfigError for another.
    """

    def __init__(
        self, input: Any, gt_label: Any, gt_box: Any, gt_difficult: Any = None, class_num: int | None = None,
        background_label: int = 0, overlap_threshold: float = 0.5, evaluate_difficult: bool = True,
        ap_version: str = "integral",
    ) -> None:  # fmt: skip
        check_version(ap_version)
        self._counts = PrecisionCounts()
        self._settings = float(overlap_threshold), bool(evaluate_difficult)
        self._average = ap_version, int(background_label)
        levels = [lods.inner(lods.sequences("DetectionMAP", v)[1]) for v in (input, gt_box)]
        extra = [] if gt_difficult is None else [gt_difficult]
        meta = ([1], "float32")
        self._results = host.called(self._evaluate, None, [], [meta, meta], [input, gt_label, gt_box, *levels, *extra])

    def _evaluate(self, rows: Any, labels: Any, boxes: Any, found: Any, true: Any, difficult: Any = None) -> list[Any]:
        """(of this minibatch, of all since reset)."""
        hard = np.zeros(len(boxes), bool) if difficult is None else difficult.reshape(-1) != 0
        parts = (np.split(v, np.cumsum(true)[:-1]) for v in (labels.reshape(-1).astype(np.int64), boxes, hard))
        batch = PrecisionCounts()
        for image in zip(np.split(rows, np.cumsum(found)[:-1]), *parts, strict=True):
            for counts in (batch, self._counts):
                counts.add(*image, *self._settings)
        return [np.array([c.mean_average_precision(*self._average)], np.float32) for c in (batch, self._counts)]

    def get_map_var(self) -> tuple[Any, Any]:
        """(of the minibatch of a run, of all since reset), float32 [1]."""
        return tuple(self._results)  # type: ignore[return-value]

    def reset(self, executor: Any, reset_program: Any = None) -> None:
        """Forget what was added. No Program is needed for it."""
        self._counts = PrecisionCounts()


__all__ = [
    "Accuracy", "Auc", "ChunkEvaluator", "CompositeMetric", "DetectionMAP", "EditDistance", "MetricBase", "Precision",
    "Recall",
]  # fmt: skip

__getattr__ = refusing("fluid.metrics", __name__)
