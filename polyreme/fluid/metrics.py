"""Metrics added up over minibatches on the host, from what a Program computed for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme import metric as ours
from polyreme.errors import ConfigError, DataError
from polyreme.fluid.absent import refusing


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
        self._made = lambda: ours.Auc(curve, num_thresholds)
        super().__init__(name)

    def reset(self) -> None:
        self._counted = self._made()

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


__all__ = [
    "Accuracy", "Auc", "ChunkEvaluator", "CompositeMetric", "EditDistance", "MetricBase", "Precision", "Recall",
]  # fmt: skip

__getattr__ = refusing("fluid.metrics", __name__)
