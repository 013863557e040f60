"""Running sums, products and extremes along a dim, differences, and integrals by the trapezoidal rule.

axis None flattens the Tensor first: a 0-D one gives [1].
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import DTypeLike
from polyreme.core.dtype import floating, promote
from polyreme.core.op import op
from polyreme.errors import ShapeError
from polyreme.ops.reduce import dims_of
from polyreme.ops.sharding import along_axis


def _along(x: Array, axis: int | None, what: str) -> tuple[Array, int]:
    """x and the dim to walk, x being flattened for axis None and a 0-D x given one dim."""
    if axis is None or x.ndim == 0:
        if axis not in (None, 0, -1):
            raise ShapeError(f"{what}: axis {axis} of a 0-D Tensor")
        return x.reshape(-1), 0
    return x, dims_of(x, axis, what)[0]


def _shape(result: Array, x: Array, axis: int | None) -> Array:
    return result.reshape(()) if x.ndim == 0 and axis is not None else result


def _cast(x: Array, dtype: Any) -> Array:
    if dtype is not None:
        return x.astype(dtypes.as_dtype(dtype))
    return x.astype(dtypes.int64) if x.dtype == dtypes.bool_ else x


@op(amp="fp32", inplace=True, rule=along_axis("jointly"))
def cumsum(x: Array, axis: int | None = None, dtype: DTypeLike | None = None) -> Array:
    """Sums of the elements up to and including each one; int64 of integers and bools unless dtype says otherwise."""
    wide = dtypes.int64 if dtype is None and not dtypes.is_inexact(x.dtype) else dtype
    flat, dim = _along(_cast(x, wide), axis, "cumsum")
    return _shape(jnp.cumsum(flat, dim, dtype=flat.dtype), x, axis)


@op(amp="fp32", inplace=True, rule=along_axis())
def cumprod(x: Array, dim: int | None = None, dtype: DTypeLike | None = None) -> Array:
    """Products of the elements up to and including each one; gradients are right at zeros too."""
    flat, at = _along(_cast(x, dtype), dim, "cumprod")
    return _shape(jnp.cumprod(flat, at, dtype=flat.dtype), x, dim)


@op(amp="fp32", rule=along_axis())
def logcumsumexp(x: Array, axis: int | None = None, dtype: DTypeLike | None = None) -> Array:
    """log of the running sum of e^x, without overflow; of complex numbers the imaginary part is in [-pi, pi]."""
    x = floating(x) if dtype is None else x.astype(dtypes.as_dtype(dtype))
    flat, dim = _along(x, axis, "logcumsumexp")
    sums = lax.cumlogsumexp(flat, dim)
    if dtypes.is_complex(sums.dtype):
        # the scan adds multiples of 2 pi as its blocks fall
        sums = lax.complex(sums.real, jnp.arctan2(jnp.sin(sums.imag), jnp.cos(sums.imag)))
    return _shape(sums, x, axis)


@op(rule=along_axis(), real=True)
def cummax(x: Array, axis: int | None = None, dtype: DTypeLike = "int64") -> tuple[Array, Array]:
    """(largest element so far, its index in the dim); of equal elements the last, and a NaN stays the largest."""
    return _running(x, axis, dtype, "cummax", lax.cummax)


@op(rule=along_axis(), real=True)
def cummin(x: Array, axis: int | None = None, dtype: DTypeLike = "int64") -> tuple[Array, Array]:
    """(smallest element so far, its index in the dim); of equal elements the last, and a NaN stays the smallest."""
    return _running(x, axis, dtype, "cummin", lax.cummin)


def _running(x: Array, axis: int | None, dtype: Any, what: str, scan: Any) -> tuple[Array, Array]:
    to = dtypes.as_dtype(dtype)
    flat, dim = _along(x, axis, what)
    fixed = lax.stop_gradient(flat)
    nan = jnp.isnan(fixed)
    # a NaN is the extreme of all that follows: only NaNs after it are looked at
    best = scan(jnp.where(nan, jnp.zeros((), flat.dtype), fixed), axis=dim)
    after_nan = lax.cummax(nan.astype(dtypes.int32), axis=dim) > 0
    found = jnp.where(after_nan, nan, fixed == best)
    index = lax.broadcasted_iota(dtypes.int64, flat.shape, dim)
    index = lax.cummax(jnp.where(found, index, -1), axis=dim)
    values = jnp.take_along_axis(flat, index, dim)
    return _shape(values, x, axis), _shape(index, x, axis).astype(to)


@op(rule=along_axis())
def diff(x: Array, n: int = 1, axis: int = -1, prepend: Array | None = None, append: Array | None = None) -> Array:
    """n times: each element but the first, minus the one before it. prepend and append are joined on first.

    Of bool, True where neighbours differ.
    """
    if n < 1:
        raise ShapeError(f"diff: n={n}; take at least 1 difference")
    dim = dims_of(x, axis, "diff")[0] if x.ndim else _no_dims("diff")
    parts = [p for p in (prepend, x, append) if p is not None]
    return jnp.diff(jnp.concatenate(promote(*parts), dim) if len(parts) > 1 else x, n, dim)


def _no_dims(what: str) -> int:
    raise ShapeError(f"{what}: a 0-D Tensor has no neighbours to compare; give at least 1 dim")


@op
def trapezoid(y: Array, x: Array | None = None, dx: float | None = None, axis: int = -1) -> Array:
    """Integral of y over axis by the trapezoidal rule, y being sampled at x, or at steps of dx (1 by default).

    sum over i of (y[i] + y[i+1]) / 2 * (x[i+1] - x[i]).
    """
    pieces, dim = _trapezoids(y, x, dx, axis, "trapezoid")
    return jnp.sum(pieces, dim)


@op
def cumulative_trapezoid(y: Array, x: Array | None = None, dx: float | None = None, axis: int = -1) -> Array:
    """The trapezoidal integral of y up to each sample but the first; arguments as for trapezoid."""
    pieces, dim = _trapezoids(y, x, dx, axis, "cumulative_trapezoid")
    return jnp.cumsum(pieces, dim)


def _trapezoids(y: Array, x: Array | None, dx: float | None, axis: int, what: str) -> tuple[Array, int]:
    if x is not None and dx is not None:
        raise ShapeError(f"{what}: both x and dx={dx} say where y is sampled; give one")
    dim = dims_of(y, axis, what)[0] if y.ndim else _no_dims(what)
    y = floating(y)
    n = y.shape[dim]
    width = jnp.asarray(1.0 if dx is None else dx, y.dtype)
    if x is not None:
        y, points = promote(y, x)
        if points.ndim == 1:
            points = points.reshape([-1 if d == dim else 1 for d in range(y.ndim)])
        if points.shape[dim] != n:
            raise ShapeError(
                f"{what}: x has {points.shape[dim]} samples, y of shape {list(y.shape)} has {n} in axis {axis}"
            )
        width = jnp.diff(points, axis=dim)
    sides = lax.slice_in_dim(y, 1, n, axis=dim) + lax.slice_in_dim(y, 0, max(n - 1, 0), axis=dim)
    return sides * width / 2, dim
