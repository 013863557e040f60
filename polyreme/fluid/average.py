"""WeightedAverage."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.errors import DataError


class WeightedAverage:
    """The average of values by their weights.

    >>> average = WeightedAverage()
    >>> average.add(2.0, 1); average.add(4.0, 3); average.eval()
    3.5
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._total: Any = 0.0
        self._weight = 0.0

    def add(self, value: Any, weight: float) -> None:
        """Count value, a number or an array, with this weight."""
        self._total = self._total + np.asarray(value, np.float64) * float(weight)
        self._weight += float(weight)

    def eval(self) -> Any:
        """The average. Raises DataError if nothing was added."""
        if self._weight == 0:
            raise DataError("WeightedAverage.eval: nothing was added, or only weights of 0")
        mean = self._total / self._weight
        return float(mean) if np.size(mean) == 1 else mean


__all__ = ["WeightedAverage"]
