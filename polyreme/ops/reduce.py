"""Reductions over dims.

Floor: 2.  axis is None (all dims), an int or a list of ints, negative from the end; keepdim leaves size-1 dims.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import op
from polyreme.errors import ShapeError


def _wide(x: Array, dtype: Any) -> Array:
    """x as sums are taken: in the dtype asked for, bool and narrow integers in int64."""
    if dtype is not None:
        return x.astype(dtypes.as_dtype(dtype))
    if x.dtype == dtypes.bool_ or (dtypes.is_integer(x.dtype) and x.dtype.itemsize < 8):
        return x.astype(dtypes.int64)
    return x


def dims_of(x: Array, axis: Any, what: str) -> tuple[int, ...]:
    """The dims that axis names, counted from 0; all of them for None, and for [], as Paddle has it.

    Raises ShapeError for a dim that x does not have or that is named twice.
    """
    if axis is None or axis == ():
        return tuple(range(x.ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    # a 0-D Tensor is reduced over axis 0 and -1 as if it had one dim
    if x.ndim == 0 and given in ((0,), (-1,)):
        return ()
    for dim in given:
        if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
            raise ShapeError(f"{what}: axis {dim!r} of a Tensor of shape {list(x.shape)}; give {-x.ndim}..{x.ndim - 1}")
    found = tuple(dim % x.ndim for dim in given)
    if len(set(found)) < len(found):
        raise ShapeError(f"{what}: axis {list(given)} names a dim of shape {list(x.shape)} twice")
    return found


@op
def sum(x: Array, axis: Any = None, dtype: Any = None, keepdim: bool = False) -> Array:
    """Sum over axis; bool and narrow integers are summed in int64, half precision in float32 inside."""
    return jnp.sum(_wide(x, dtype), dims_of(x, axis, "sum"), keepdims=keepdim)


@op
def mean(x: Array, axis: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """Mean over axis; integers give the default dtype, half precision is summed in float32 inside."""
    x = dtypes.floating(x) if dtype is None else x.astype(dtypes.as_dtype(dtype))
    return jnp.mean(x, dims_of(x, axis, "mean"), keepdims=keepdim)


@op
def max(x: Array, axis: Any = None, keepdim: bool = False) -> Array:
    """Largest element over axis; ties share the gradient evenly."""
    return jnp.max(x, dims_of(x, axis, "max"), keepdims=keepdim)


@op
def min(x: Array, axis: Any = None, keepdim: bool = False) -> Array:
    """Smallest element over axis; ties share the gradient evenly."""
    return jnp.min(x, dims_of(x, axis, "min"), keepdims=keepdim)
