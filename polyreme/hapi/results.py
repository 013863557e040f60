"""Results: losses and metrics of a pass over the data, fetched from the device only when somebody reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor
from polyreme.hapi.step import as_list
from polyreme.metric.metrics import Metric

# Batches whose results may wait on the device: enough for the host to run ahead, few enough to hold in memory
_WAITING = 8


class Results:
    """Gathers batches; `logs` waits for the device, `add` only for a batch _WAITING batches ago."""

    metrics: Sequence[Metric]
    averages: bool
    samples: int

    def __init__(self, metrics: Sequence[Metric], averages: bool) -> None:
        """averages: whether "loss" is the mean over all samples so far, or the last batch's."""
        self.metrics, self.averages = metrics, averages
        self._waiting: deque[tuple[list, list, list, int]] = deque()
        self._loss: list[float] = []
        self._loss_sums = np.zeros(0)
        self.samples = 0
        for metric in metrics:
            metric.reset()

    def add(self, outputs: list[Tensor], labels: list[Tensor], losses: list[Tensor], batch_size: int) -> None:
        """Takes in one batch."""
        self._waiting.append((outputs, labels, losses, batch_size))
        if len(self._waiting) > _WAITING:
            self._take()

    def logs(self) -> dict[str, Any]:
        """Everything so far: "loss" as a list of floats, if there is one, and each metric by name."""
        while self._waiting:
            self._take()
        found: dict[str, Any] = {}
        if self._loss:
            found["loss"] = (self._loss_sums / self.samples).tolist() if self.averages else self._loss
        return found | metric_values(self.metrics)

    def _take(self) -> None:
        outputs, labels, losses, batch_size = self._waiting.popleft()
        self._loss = [float(loss.item()) for loss in losses]
        self._loss_sums = np.asarray(self._loss) * batch_size + (self._loss_sums if self.samples else 0.0)
        self.samples += batch_size
        update_metrics(self.metrics, outputs, labels)


def update_metrics(metrics: Sequence[Metric], outputs: list[Tensor], labels: list[Tensor]) -> list[Any]:
    """Each metric's compute on Tensors, then its update on ndarrays; -> what update returns."""
    found = []
    for metric in metrics:
        computed = as_list(metric.compute(*outputs, *labels))
        found.append(metric.update(*[c.numpy() if isinstance(c, Tensor) else c for c in computed]))
    return found


def metric_names(metrics: Sequence[Metric]) -> list[str]:
    """All names, in order."""
    return [name for metric in metrics for name in as_list(metric.name())]


def metric_values(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Name -> value since the last reset."""
    values = [value for metric in metrics for value in as_list(metric.accumulate())]
    return dict(zip(metric_names(metrics), values, strict=True))
