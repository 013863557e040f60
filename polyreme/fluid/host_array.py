"""What Fluid's Executor returns: ndarrays of which one element is a Python number, whatever its dims."""

from __future__ import annotations

from typing import Any

import numpy as np


class HostArray(np.ndarray):
    """An ndarray that float(), int(), complex(), math and % take if it has one element, also of shape [1] or [1, 1].

    Scripts of Fluid's time write float(loss) of shape [1], which NumPy takes no more (from 2.4 on). Rows and results
    of arithmetic are of this class too; those without dims are NumPy's numbers.

    >>> loss = np.ones([1], "float32").view(HostArray)
    >>> float(loss * 2), "%.1f" % loss, loss.mean()
    (2.0, '1.0', np.float32(1.0))
    """

    def __float__(self) -> float:
        return float(self._element())

    def __int__(self) -> int:
        return int(self._element())

    def __complex__(self) -> complex:
        return complex(self._element())

    def _element(self) -> Any:
        return self.item() if self.size == 1 else np.asarray(self)  # NumPy's error says what it is of more

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return array.view(HostArray) if array.ndim else array[()]

    def __repr__(self) -> str:
        return repr(np.asarray(self))
