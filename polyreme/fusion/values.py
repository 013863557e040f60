"""Arguments of calls as values to compare."""

from __future__ import annotations

from typing import Any

import numpy as np


def frozen(value: Any) -> Any:
    """An argument as something hashable that is equal only for what means the same: 1, 1.0 and True differ."""
    cls = value.__class__
    if isinstance(value, (list, tuple)):
        return cls, tuple(map(frozen, value))
    if isinstance(value, dict):
        return cls, tuple((k, frozen(value[k])) for k in sorted(value))
    if isinstance(value, slice):
        return cls, tuple(map(frozen, (value.start, value.stop, value.step)))
    if isinstance(value, np.ndarray):
        return cls, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (float, complex)):
        return cls, repr(value)  # 0.0 and -0.0 are equal
    return cls, value


def plain(value: Any) -> Any:
    """An argument to compare; lists and tuples of the same are the same."""
    return frozen(tuple(value) if isinstance(value, list) else value)
