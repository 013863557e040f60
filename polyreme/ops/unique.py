"""Distinct elements: unique and unique_consecutive.

Both read the host, since the number found is the shape; the elements are gathered, so that gradients flow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor, DTypeLike
from polyreme.core.op import OPS, composite
from polyreme.errors import DTypeError
from polyreme.ops.bounds import dim_of
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import reshape


def _result(x: Any, first: np.ndarray, axis: int | None, dtype: Any, wanted: Sequence[np.ndarray | None]) -> Any:
    """(x at the places in `first`, the wanted index arrays), or the former alone."""
    to = dtypes.as_dtype(dtype)
    if to not in (dtypes.int32, dtypes.int64):
        raise DTypeError(f"unique: dtype={dtype!r} for indices; choose int32 or int64")
    values = gather(reshape(x, [math.prod(x.shape)]) if axis is None else x, first, axis or 0)
    indices = [OPS["cast"](w.reshape(-1), to) for w in wanted if w is not None]
    return (values, *indices) if indices else values


@composite
def unique(
    x: AnyTensor,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    dtype: DTypeLike = "int64",
    sorted: bool = True,
    name: str | None = None,
) -> Any:
    """The distinct elements in increasing order, or the distinct slices along axis.

    Then, as asked for: where each first stands in x (flattened without axis), which one each of x's is, how often each
    occurs, in dtype. Raises CaptureError inside a capture.
    """
    value = state.host(x, "unique(), whose result has a shape only known on the host")
    dim = None if axis is None else dim_of(axis, value.ndim, "unique")
    _, first, inverse, counts = np.unique(value, True, True, True, axis=dim)
    wanted = (first if return_index else None, inverse if return_inverse else None, counts if return_counts else None)
    return _result(x, first, dim, dtype, wanted)


@composite
def unique_consecutive(
    x: AnyTensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    dtype: DTypeLike = "int64",
    name: str | None = None,
) -> Any:
    """x without the elements (or slices along axis) equal to the one before; without axis, flattened.

    Then, as asked for: which one of the result each of x's is, how many in a row each stands for, in dtype. Raises
    CaptureError inside a capture.
    """
    value = state.host(x, "unique_consecutive(), whose result has a shape only known on the host")
    dim = None if axis is None else dim_of(axis, value.ndim, "unique_consecutive")
    rows = value.reshape(-1, 1) if dim is None else np.moveaxis(value, dim, 0).reshape(value.shape[dim], -1)
    new = np.concatenate([np.ones(min(len(rows), 1), bool), (rows[1:] != rows[:-1]).any(1)])
    first = np.flatnonzero(new)
    inverse = np.cumsum(new) - 1 if return_inverse else None
    counts = np.diff(first, append=len(rows)) if return_counts else None
    return _result(x, first, dim, dtype, (inverse, counts))
