"""Checking integer ids against a range where their values can be seen.

Floor: 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.core.state import TensorState


def visible(x: Any) -> np.ndarray | None:
    """The value of a Tensor, array or nested list; None where it cannot be seen now.

    That is inside a captured function, in a recorded Program, and of an array that other processes hold a part of.
    """
    if not isinstance(x, TensorState):
        return np.asarray(x) if isinstance(x, (np.ndarray, np.generic, list, tuple, int)) else None
    array = x._array
    if state.capturing() or isinstance(array, state.Tracer):
        return None
    return np.asarray(array) if getattr(array, "is_fully_addressable", False) else None


def check_range(x: Any, size: int, what: str, allowed: int | None = None) -> None:
    """Raise IndexError if a visible id is below 0 or not below size, and is not `allowed`.

    Reading the ids waits for the device; a captured function does not check, and gives NaN for such an id instead.
    """
    ids = visible(x)
    if ids is None or ids.size == 0 or ids.dtype.kind not in "iu":
        return
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < size:
        return
    bad = (ids < 0) | (ids >= size)
    if allowed is not None:
        bad &= ids != allowed
    if bad.any():
        at = np.unravel_index(int(np.argmax(bad)), ids.shape)
        besides = "" if allowed is None else f" or {allowed}"
        raise IndexError(
            f"{what}: {int(ids[at])} at {[int(i) for i in at]} is out of range; needs 0 <= id < {size}{besides}"
        )
