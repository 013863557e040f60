"""Order and comparison: sorting, the largest and smallest elements and where they are, membership.

Indices are int64. Among equal elements the first one counts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import DTypeLike
from polyreme.core.dtype import promote
from polyreme.core.op import op
from polyreme.errors import DTypeError, ShapeError
from polyreme.kernels.order import stable_order
from polyreme.ops.bounds import dim_of
from polyreme.ops.sharding import along_axis, elementwise, reduction


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


@op(rule=reduction(), real=True)
def argmax(x: Array, axis: int | None = None, keepdim: bool = False, dtype: DTypeLike = "int64") -> Array:
    """Index of the first largest element along axis, or in the flattened Tensor; NaN counts as largest.

    dtype: int32 or int64, else DTypeError.
    """
    return _arg(jnp.argmax, x, axis, keepdim, dtype, "argmax")


@op(rule=reduction(), real=True)
def argmin(x: Array, axis: int | None = None, keepdim: bool = False, dtype: DTypeLike = "int64") -> Array:
    """Index of the first smallest element along axis, or in the flattened Tensor; NaN counts as smallest.

    dtype: int32 or int64, else DTypeError.
    """
    return _arg(jnp.argmin, x, axis, keepdim, dtype, "argmin")


@op(rule=along_axis(default=-1), real=True)
def topk(x: Array, k: int, axis: int | None = None, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    """(values, int64 indices) of the k largest (or smallest) elements along axis (the last by default).

    Best first, whatever `sorted` says; NaN counts as largest. Raises ShapeError unless 1 <= k <= the dim's size.
    """
    if x.ndim == 0:
        values, index = topk.op.fn(x.reshape(1), k, axis, largest, sorted)
        return values[0], index[0]
    dim = dim_of(-1 if axis is None else axis, x.ndim, "topk")
    if not 1 <= k <= x.shape[dim]:
        raise ShapeError(f"topk: k={k} of dim {dim} of {list(x.shape)}; give k from 1 to {x.shape[dim]}")
    moved = jnp.moveaxis(x, dim, -1)
    _, index = jax.lax.top_k(jax.lax.stop_gradient(moved if largest else _reverse(moved)), k)
    values = jnp.take_along_axis(moved, index, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim).astype(dtypes.int64)


def _reverse(x: Array) -> Array:
    """A key that orders x backwards, NaN last: an integer's complement does it without overflow."""
    return jnp.where(jnp.isnan(x), -jnp.inf, -x) if dtypes.is_floating(x.dtype) else ~x


# sorting


@op(rule=along_axis(), real=True)
def sort(x: Array, axis: int = -1, descending: bool = False, stable: bool = False) -> Array:
    """The elements in order along axis; NaN counts as largest. Always stable."""
    if x.ndim == 0:
        return x
    dim = dim_of(axis, x.ndim, "sort")
    return jnp.take_along_axis(x, stable_order(jax.lax.stop_gradient(x), dim, descending=descending), dim)


@op(real=True)
def msort(input: Array) -> Array:
    """sort along dim 0."""
    return sort.op.fn(input, 0)


@op(rule=along_axis(), real=True)
def argsort(x: Array, axis: int = -1, descending: bool = False, stable: bool = False) -> Array:
    """Indices that put the elements in order along axis, always stable; NaN counts as largest."""
    if x.ndim == 0:
        return jnp.zeros((), dtypes.int64)
    dim = dim_of(axis, x.ndim, "argsort")
    return stable_order(x, dim, descending=descending).astype(dtypes.int64)


def _pick(x: Array, at: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """(x at one index along dim, that index); `at` has size 1 there."""
    values, at = jnp.take_along_axis(x, at, dim), at.astype(dtypes.int64)
    return (values, at) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(at, dim))


@op(rule=along_axis(default=-1), real=True)
def kthvalue(x: Array, k: int, axis: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    """(value, int64 index) of the k-th smallest element along axis (the last by default), k counted from 1.

    NaN counts as largest; among equal elements the order of position counts. Raises ShapeError for k out of range.
    """
    if x.ndim == 0:
        return kthvalue.op.fn(x.reshape(1), k)
    dim = dim_of(-1 if axis is None else axis, x.ndim, "kthvalue")
    if not 1 <= k <= x.shape[dim]:
        raise ShapeError(f"kthvalue: k={k} of dim {dim} of {list(x.shape)}; give k from 1 to {x.shape[dim]}")
    order = stable_order(x, dim)
    return _pick(x, jax.lax.slice_in_dim(order, k - 1, k, axis=dim), dim, keepdim)


@op(rule=along_axis(default=-1))
def mode(x: Array, axis: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """(value, int64 index) of the most frequent element along axis: the smallest of several, at its last place."""
    if x.ndim == 0:
        return x, jnp.zeros((), dtypes.int64)
    dim = dim_of(axis, x.ndim, "mode")
    if x.shape[dim] == 0:
        raise ShapeError(f"mode: dim {dim} of {list(x.shape)} is empty")
    order = stable_order(x, dim)
    ranked = jnp.take_along_axis(x, order, dim)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    new = ranked != jnp.roll(ranked, 1, dim)
    # length so far of the run of equal elements that each one ends
    run = place - jax.lax.cummax(jnp.where(new | (place == 0), place, 0), axis=dim)
    longest = jnp.argmax(run, axis=dim, keepdims=True)
    return _pick(x, jnp.take_along_axis(order, longest, dim), dim, keepdim)


# places in a sorted sequence


def _side(right: bool, side: str | None) -> str:
    if side not in (None, "left", "right") or (right and side == "left"):
        raise ShapeError(
            f"searchsorted: right={right}, side={side!r}; give side 'left' or 'right' that agrees with right"
        )
    return "right" if right else side or "left"


@op(real=True)
def searchsorted(
    sorted_sequence: Array,
    values: Array,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """Index of the first element not below each value (right: above it) in an increasing sequence -> shape of values.

    sorted_sequence [n] for values of any shape, or [*b, n] for values [*b, m]. sorter: indices that put an unsorted
    sequence in order. int64, or int32 with out_int32. Raises ShapeError if the leading dims differ.
    """
    which = _side(right, side)
    if sorter is not None:
        if sorter.shape != sorted_sequence.shape:
            raise ShapeError(f"searchsorted: sorter {list(sorter.shape)} must be {list(sorted_sequence.shape)}")
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    sequence, values = promote(sorted_sequence, values)
    to = dtypes.int32 if out_int32 else dtypes.int64
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, values, side=which).astype(to)
    if sequence.ndim == 0 or sequence.shape[:-1] != values.shape[:-1]:
        raise ShapeError(
            f"searchsorted: sorted_sequence {list(sequence.shape)} and values {list(values.shape)} need one set of "
            "leading dims, or a 1-D sequence"
        )
    rows = jax.vmap(lambda s, v: jnp.searchsorted(s, v, side=which))
    found = rows(sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1]))
    return found.reshape(values.shape).astype(to)


@op(real=True)
def bucketize(x: Array, sorted_sequence: Array, out_int32: bool = False, right: bool = False) -> Array:
    """The index of the interval between the elements of an increasing sequence [n] that each x falls in, 0 to n ->
    shape of x.

    Interval i is (s[i - 1], s[i]], or [s[i - 1], s[i]) with right.
    """
    if sorted_sequence.ndim != 1:
        raise ShapeError(f"bucketize: sorted_sequence must be 1-D, got {list(sorted_sequence.shape)}")
    return searchsorted.op.fn(sorted_sequence, x, out_int32, right)


# comparing whole Tensors


def _same_shape(x: Array, y: Array, what: str) -> tuple[Array, Array]:
    if x.shape != y.shape:
        raise ShapeError(f"{what}: x is {list(x.shape)}, y is {list(y.shape)}; they must have one shape")
    return promote(x, y)


@op(rule=elementwise)
def isclose(x: Array, y: Array, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Array:
    """|x - y| <= atol + rtol * |y| elementwise -> bool; infinities are close to themselves, NaN if equal_nan."""
    return jnp.isclose(*_same_shape(x, y, "isclose"), rtol=rtol, atol=atol, equal_nan=equal_nan)


@op
def allclose(x: Array, y: Array, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Array:
    """Whether isclose holds for all elements, as a 0-D bool Tensor. Raises ShapeError if the shapes differ."""
    return jnp.all(jnp.isclose(*_same_shape(x, y, "allclose"), rtol=rtol, atol=atol, equal_nan=equal_nan))


@op
def equal_all(x: Array, y: Array) -> Array:
    """Whether x and y have one shape and equal elements, as a 0-D bool Tensor."""
    return jnp.all(jnp.equal(*promote(x, y))) if x.shape == y.shape else jnp.asarray(False)


@op
def isin(x: Array, test_x: Array, assume_unique: bool = False, invert: bool = False) -> Array:
    """Whether each element of x is among those of test_x (or, with invert, is not) -> bool; NaN is nowhere."""
    x, test_x = promote(x, test_x)
    if test_x.size == 0 or x.size == 0:
        return jnp.full(x.shape, invert)
    ordered = jnp.sort(test_x.reshape(-1))
    found = ordered[jnp.minimum(jnp.searchsorted(ordered, x), ordered.size - 1)] == x
    return ~found if invert else found
