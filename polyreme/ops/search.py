"""Order and comparison: sorting, the largest and smallest elements and where they are, membership.

Floor: 2.  Indices are int64. Among equal elements the first one counts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import op
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.manipulation import dim_of


def _arg(find: Any, x: Array, axis: int | None, keepdim: bool, dtype: Any, what: str) -> Array:
    to = dtypes.as_dtype(dtype)
    if to not in (dtypes.int32, dtypes.int64):
        raise DTypeError(f"{what}: dtype={dtype!r} for indices; choose int32 or int64")
    if axis is None:
        found = find(x.reshape(-1))
        return (found.reshape((1,) * x.ndim) if keepdim else found).astype(to)
    if x.ndim == 0 and axis in (0, -1):
        return jnp.zeros((), to)
    return find(x, axis=dim_of(axis, x.ndim, what), keepdims=keepdim).astype(to)


@op
def argmax(x: Array, axis: int | None = None, keepdim: bool = False, dtype: Any = "int64") -> Array:
    """Index of the first largest element along axis, or in the flattened Tensor; NaN counts as largest.

    dtype: int32 or int64, else DTypeError.
    """
    return _arg(jnp.argmax, x, axis, keepdim, dtype, "argmax")


@op
def argmin(x: Array, axis: int | None = None, keepdim: bool = False, dtype: Any = "int64") -> Array:
    """Index of the first smallest element along axis, or in the flattened Tensor; NaN counts as smallest.

    dtype: int32 or int64, else DTypeError.
    """
    return _arg(jnp.argmin, x, axis, keepdim, dtype, "argmin")


def _descending_key(x: Array) -> Array:
    """A value whose increasing order is x's decreasing order; NaN last in both directions of it."""
    if x.dtype == dtypes.bool_:
        return ~x
    return ~x if dtypes.is_integer(x.dtype) else -x


@op
def topk(x: Array, k: int, axis: int | None = None, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    """(values, int64 indices) of the k largest (or smallest) elements along axis (the last by default).

    Best first, whatever `sorted` says; NaN counts as largest. Raises ShapeError unless 1 <= k <= the dim's size.
    """
    if x.ndim == 0:
        x, scalar = x.reshape(1), True
    else:
        scalar = False
    dim = dim_of(-1 if axis is None else axis, x.ndim, "topk")
    if not 1 <= k <= x.shape[dim]:
        raise ShapeError(f"topk: k={k} of dim {dim} of {list(x.shape)}; give k from 1 to {x.shape[dim]}")
    moved = jnp.moveaxis(x, dim, -1)
    # an int's complement orders backwards without overflow; NaN is the last choice when the smallest are asked for
    key = moved if largest else jnp.where(jnp.isnan(moved), -jnp.inf, -moved) if dtypes.is_floating(x.dtype) else ~moved
    _, at = jax.lax.top_k(jax.lax.stop_gradient(key), k)
    values = jnp.take_along_axis(moved, at, -1)
    values, at = jnp.moveaxis(values, -1, dim), jnp.moveaxis(at, -1, dim).astype(dtypes.int64)
    return (values.reshape(()), at.reshape(())) if scalar else (values, at)
