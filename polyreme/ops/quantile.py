"""Medians and quantiles over dims.

axis and keepdim as in ops.reduce. The plain forms give NaN where there is a NaN, the nan forms leave
NaNs out.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import Axes
from polyreme.core.op import op
from polyreme.errors import ShapeError
from polyreme.kernels.order import stable_order
from polyreme.ops.reduce import dims_of
from polyreme.ops.sharding import reduction

_METHODS = ("linear", "lower", "higher", "nearest", "midpoint")


@op(rule=reduction(), real=True)
def median(x: Array, axis: Axes | None = None, keepdim: bool = False, mode: str = "avg") -> Any:
    """Middle element over axis; of an even number, the mean of the middle two (mode "avg") or the lower (mode "min").

    "avg" gives floating numbers, NaN of no elements. "min" keeps x's dtype and, when axis is an int, returns (values,
    indices in that dim).
    """
    return _median(x, axis, keepdim, mode, "median", skip=False)


@op(real=True)
def nanmedian(x: Array, axis: Axes | None = None, keepdim: bool = False, mode: str = "avg") -> Any:
    """median of the elements that are not NaN; NaN where all are."""
    return _median(x, axis, keepdim, mode, "nanmedian", skip=True)


def _median(x: Array, axis: Any, keepdim: bool, mode: str, what: str, skip: bool) -> Any:
    if mode not in ("avg", "min"):
        raise ValueError(f"mode={mode!r}; choose 'avg' or 'min'")
    x = dtypes.floating(x) if mode == "avg" else x
    dims = dims_of(x, axis, what)
    rows = _rows(x, dims)
    shape = _keep(x, dims) if keepdim else tuple(s for d, s in enumerate(x.shape) if d not in dims)
    if rows.shape[-1] == 0:
        if mode == "min":
            raise ShapeError(f"{what}: no elements over axis {axis} of shape {list(x.shape)}")
        return jnp.full(shape, jnp.nan, x.dtype)
    nan = jnp.isnan(rows)
    count = jnp.sum(~nan, -1, keepdims=True) if skip else jnp.full((*rows.shape[:-1], 1), rows.shape[-1])
    # NaNs sort last
    order = stable_order(rows, rows.ndim - 1)
    low = jnp.take_along_axis(order, jnp.maximum(count - 1, 0) // 2, -1)
    if not skip:
        low = jnp.where(jnp.any(nan, -1, keepdims=True), jnp.argmax(nan, -1, keepdims=True), low)
    value = jnp.take_along_axis(rows, low, -1)
    if mode == "avg":
        high = jnp.take_along_axis(order, jnp.minimum(count // 2, rows.shape[-1] - 1), -1)
        # half of each, so that large numbers do not overflow; a lone middle element is counted once
        middle = value / 2 + jnp.take_along_axis(rows, high, -1) / 2
        value = jnp.where((count % 2 == 1) | (count == 0) | jnp.isnan(value), value, middle)
    if mode == "min" and isinstance(axis, int):
        return value.reshape(shape), low.reshape(shape).astype(dtypes.int64)
    return value.reshape(shape)


def _rows(x: Array, dims: tuple[int, ...]) -> Array:
    """x with dims moved to the end and made one."""
    last = tuple(range(x.ndim - len(dims), x.ndim))
    moved = jnp.moveaxis(x, dims, last)
    kept = moved.shape[: x.ndim - len(dims)]
    return moved.reshape(*kept, math.prod(moved.shape[len(kept) :]))


def _keep(x: Array, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in dims else s for d, s in enumerate(x.shape))


@op(real=True)
def quantile(x: Array, q: Any, axis: Axes | None = None, keepdim: bool = False, interpolation: str = "linear") -> Array:
    """The value that a share q of the elements over axis does not exceed, NaN of none; q in [0, 1], one or several.

    With several, the first dim of the result runs over q. interpolation between two elements: "linear", "lower",
    "higher", "nearest" (of two equally near, the even one) or "midpoint".
    """
    return _quantile(x, q, axis, keepdim, interpolation, "quantile", jnp.quantile)


@op(real=True)
def nanquantile(
    x: Array, q: Any, axis: Axes | None = None, keepdim: bool = False, interpolation: str = "linear"
) -> Array:
    """quantile of the elements that are not NaN; NaN where all are."""
    return _quantile(x, q, axis, keepdim, interpolation, "nanquantile", jnp.nanquantile)


def _quantile(x: Array, q: Any, axis: Any, keepdim: bool, interpolation: str, what: str, fn: Any) -> Array:
    if interpolation not in _METHODS:
        raise ValueError(f"interpolation={interpolation!r}; choose one of {', '.join(_METHODS)}")
    for share in q if isinstance(q, tuple) else (q,):
        if not 0 <= share <= 1:
            raise ShapeError(f"{what}: q={share} is no share; give numbers from 0 to 1")
    x = dtypes.floating(x)
    dims = dims_of(x, axis, what)
    shares, rows = jnp.asarray(q, x.dtype), _rows(x, dims)
    other_dims = _keep(x, dims) if keepdim else rows.shape[:-1]
    if rows.shape[-1] == 0:
        return jnp.full((*shares.shape, *other_dims), jnp.nan, x.dtype)
    if interpolation == "nearest":
        values = _nearest(rows, jnp.asarray(q, dtypes.float64).reshape(-1), skip=what == "nanquantile")
        return values.reshape(*shares.shape, *other_dims)
    return fn(rows, shares, axis=-1, method=interpolation).reshape(*shares.shape, *other_dims)


def _nearest(rows: Array, shares: Array, skip: bool) -> Array:
    """Elements nearest to the shares, the even one of two that are equally near, as NumPy has it: [q, *b]."""
    nan = jnp.isnan(rows)
    count = jnp.sum(~nan, -1) if skip else jnp.full(rows.shape[:-1], rows.shape[-1])
    places = jnp.round(jnp.multiply.outer(shares, jnp.maximum(count - 1, 0)))
    values = jnp.take_along_axis(jnp.sort(rows, -1)[None], places[..., None].astype(dtypes.int64), -1)[..., 0]
    return values if skip else jnp.where(jnp.any(nan, -1), jnp.nan, values)
