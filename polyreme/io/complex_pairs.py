"""Complex arrays in files that have no complex dtype: pairs of a real and an imaginary part in a new last dim."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes


def to_pairs(array: Any) -> np.ndarray:
    """The array on the host as files store it: [..., 2] if it is complex, else unchanged."""
    host = np.asarray(array)
    if not dtypes.is_complex(host.dtype):
        return host
    return np.stack([np.real(host), np.imag(host)], axis=-1)


def from_pairs(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array of this dtype that to_pairs stored; one that is complex already, or is not to be, is unchanged."""
    if dtypes.is_complex(dtype) and not dtypes.is_complex(array.dtype):
        return np.ascontiguousarray(array).view(dtype)[..., 0]
    return array
