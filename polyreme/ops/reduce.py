"""Reductions over dims.

axis is None (all dims), an int or a list of ints, negative from the end; keepdim leaves size-1 dims.
A dim that is not there raises ShapeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import Axes, DTypeLike
from polyreme.core.op import op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.sharding import reduction


def _wide(x: Array, dtype: Any) -> Array:
    """x as sums are taken: in the dtype asked for, bool and narrow integers in int64."""
    if dtype is not None:
        return x.astype(dtypes.as_dtype(dtype))
    if x.dtype == dtypes.bool_ or (dtypes.is_integer(x.dtype) and x.dtype.itemsize < 8):
        return x.astype(dtypes.int64)
    return x


def _to_dtype(total: Array, dtype: Any) -> Array:
    """total in the dtype that was asked for: jax adds up narrow integers and bool in int64."""
    return total if dtype is None else total.astype(dtypes.as_dtype(dtype))


def dims_of(x: Array, axis: Any, what: str) -> tuple[int, ...]:
    """The dims that axis names, counted from 0; all of them for None, and for [], as Paddle has it.

    Raises ShapeError for a dim that x does not have or that is named twice.
    """
    if axis is None or axis == ():
        return tuple(range(x.ndim))
    dims = axis if isinstance(axis, tuple) else (axis,)
    # a 0-D Tensor is reduced over axis 0 and -1 as if it had one dim
    if x.ndim == 0 and dims in ((0,), (-1,)):
        return ()
    for dim in dims:
        if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
            most = x.ndim or 1
            raise ShapeError(f"{what}: axis {dim!r} of a Tensor of shape {list(x.shape)}; give {-most}..{most - 1}")
    found = tuple(dim % x.ndim for dim in dims)
    if len(set(found)) < len(found):
        raise ShapeError(f"{what}: axis {list(dims)} names a dim of shape {list(x.shape)} twice")
    return found


@op(amp="fp32", rule=reduction("sum", "zero", linear="jointly"))
def sum(x: Array, axis: Axes | None = None, dtype: DTypeLike | None = None, keepdim: bool = False) -> Array:
    """Sum over axis; bool and narrow integers are summed in int64, half precision in float32 inside."""
    return _to_dtype(jnp.sum(_wide(x, dtype), dims_of(x, axis, "sum"), keepdims=keepdim), dtype)


@op(amp="fp32")
def reduce_as(x: Array, target: Array) -> Array:
    """Sum of x over the dims that broadcasting target to x's shape would make: -> target's shape, as sum's dtype.

    Raises ShapeError if target does not broadcast to x.
    """
    extra = x.ndim - target.ndim
    if extra < 0 or [t for t, n in zip(target.shape, x.shape[extra:], strict=True) if t not in (1, n)]:
        raise ShapeError(f"reduce_as: target {list(target.shape)} does not broadcast to x {list(x.shape)}")
    grown = tuple(i for i, n in enumerate(x.shape) if i < extra or target.shape[i - extra] != n)
    return jnp.sum(_wide(x, None), grown, keepdims=True).reshape(target.shape)


@op(amp="fp32", rule=reduction("avg", "zero", linear="jointly"))
def mean(x: Array, axis: Axes | None = None, keepdim: bool = False, *, dtype: DTypeLike | None = None) -> Array:
    """Mean over axis; integers give the default dtype, half precision is summed in float32 inside."""
    return jnp.mean(_real(x, dtype), dims_of(x, axis, "mean"), keepdims=keepdim)


def _real(x: Array, dtype: Any = None) -> Array:
    return dtypes.floating(x) if dtype is None else x.astype(dtypes.as_dtype(dtype))


@op(amp="fp32", rule=reduction("sum", "zero"))
def nansum(x: Array, axis: Axes | None = None, dtype: DTypeLike | None = None, keepdim: bool = False) -> Array:
    """Sum over axis of the elements that are not NaN."""
    return _to_dtype(jnp.nansum(_wide(x, dtype), dims_of(x, axis, "nansum"), keepdims=keepdim), dtype)


@op(amp="fp32", rule=reduction())
def nanmean(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """Mean over axis of the elements that are not NaN; NaN where all are."""
    x = _real(x)
    dims = dims_of(x, axis, "nanmean")
    there = ~jnp.isnan(x)
    total = jnp.sum(jnp.where(there, x, 0), dims, keepdims=keepdim)
    return total / jnp.sum(there, dims, keepdims=keepdim).astype(x.real.dtype)


@op(amp="fp32", rule=reduction("prod", "one"))
def prod(x: Array, axis: Axes | None = None, keepdim: bool = False, dtype: DTypeLike | None = None) -> Array:
    """Product over axis; bool and narrow integers are multiplied in int64. Gradients are right at zeros too."""
    return _to_dtype(jnp.prod(_wide(x, dtype), dims_of(x, axis, "prod"), keepdims=keepdim), dtype)


@op(rule=reduction("max", "low"), real=True)
def max(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """Largest element over axis, NaN if there is one; equal elements share the gradient evenly."""
    return _extreme(jnp.max, x, axis, keepdim, "max")


@op(rule=reduction("min", "high"), real=True)
def min(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """Smallest element over axis, NaN if there is one; equal elements share the gradient evenly."""
    return _extreme(jnp.min, x, axis, keepdim, "min")


@op(rule=reduction("max", "low"), real=True)
def amax(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """max, under its other name."""
    return _extreme(jnp.max, x, axis, keepdim, "amax")


@op(rule=reduction("min", "high"), real=True)
def amin(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """min, under its other name."""
    return _extreme(jnp.min, x, axis, keepdim, "amin")


def _extreme(reduce: Callable, x: Array, axis: Any, keepdim: bool, what: str) -> Array:
    dims = dims_of(x, axis, what)
    if x.size == 0 and 0 in [x.shape[d] for d in dims]:
        raise ShapeError(f"{what}: no elements over axis {axis} of shape {list(x.shape)}")
    return reduce(x, dims, keepdims=keepdim)


@op(rule=reduction("all", "one"))
def all(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """True where every element over axis is nonzero -> bool."""
    return jnp.all(x, dims_of(x, axis, "all"), keepdims=keepdim)


@op(rule=reduction("any", "zero"))
def any(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """True where some element over axis is nonzero -> bool."""
    return jnp.any(x, dims_of(x, axis, "any"), keepdims=keepdim)


@op(rule=reduction("sum", "zero"))
def count_nonzero(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """Number of nonzero elements over axis, int64."""
    return jnp.count_nonzero(x, dims_of(x, axis, "count_nonzero"), keepdims=keepdim).astype(dtypes.int64)


@op(amp="fp32", rule=reduction())
def var(
    x: Array, axis: Axes | None = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: float = 1
) -> Array:
    """Variance over axis: sum |x - mean|^2 / (n - correction); NaN or inf where n <= correction.

    unbiased, if given, stands for correction 1 (True) or 0 (False). Raises ConfigError where both are given.
    """
    if unbiased is not None and correction != 1:
        raise ConfigError(f"var: unbiased={unbiased} and correction={correction}; give one of them")
    if unbiased is not None:
        correction = 1 if unbiased else 0
    return _variance(_real(x), dims_of(x, axis, "var"), keepdim, correction)


@op(amp="fp32", rule=reduction())
def std(x: Array, axis: Axes | None = None, unbiased: bool = True, keepdim: bool = False) -> Array:
    """Square root of the variance over axis; the gradient is 0 where all elements are equal."""
    variance = _variance(_real(x), dims_of(x, axis, "std"), keepdim, 1 if unbiased else 0)
    zero = variance == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, variance)))


def _variance(x: Array, dims: tuple[int, ...], keepdim: bool, correction: float) -> Array:
    return jnp.var(x, dims, ddof=correction, keepdims=keepdim)  # pyright: ignore[reportArgumentType]  (ddof may be a fraction)


@op(amp="fp32", rule=reduction())
def logsumexp(x: Array, axis: Axes | None = None, keepdim: bool = False) -> Array:
    """log of the sum of e^x over axis, without overflow."""
    x = _real(x)
    return jax.nn.logsumexp(x, dims_of(x, axis, "logsumexp"), keepdims=keepdim)
