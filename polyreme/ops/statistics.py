"""Counts over values and covariances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import floating
from polyreme.core.op import op
from polyreme.core.symbol import DYNAMIC
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.bounds import at_hand, preceded
from polyreme.ops.by_index import add, bounded
from polyreme.ops.creation import republish


def _edges(
    x: Array,
    bins: int,
    min: float,
    max: float,
    what: str,
    room: float,
    least: Callable = jnp.min,
    most: Callable = jnp.max,
) -> tuple[Array, Array]:
    """The first and the last edge: those given, or those of the data if both are 0; with room on either side if they
    are equal.
    """
    if bins < 1 or min > max:
        raise ShapeError(f"{what}: bins={bins}, min={min}, max={max}; give bins >= 1 and min <= max")
    if min == max == 0 and x.size:
        low, high = least(x), most(x)
    else:
        low, high = jnp.asarray(min), jnp.asarray(max)
    low, high = low.astype(dtypes.float64), high.astype(dtypes.float64)
    same = low == high
    return jnp.where(same, low - room, low), jnp.where(same, high + room, high)


def _check_range(what: str) -> Callable[..., None]:
    """A step before an op: raises ConfigError if infinite data shall say the range."""

    def check(input: Any, bins: int = 100, min: float = 0.0, max: float = 0.0, *_: Any, **__: Any) -> None:
        seen = at_hand(input) if min == max == 0 else None
        if seen is not None and dtypes.is_inexact(seen.dtype) and np.isinf(seen.astype(np.float64)).any():
            raise ConfigError(f"{what}: the data has infinite values, and so no range; give min and max")

    return check


@preceded(_check_range("histogram"))
@op(real=True)
def histogram(
    input: Array,
    bins: int = 100,
    min: float = 0.0,
    max: float = 0.0,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    """Number of elements in each of `bins` equal intervals from min to max -> [bins]; int64, or floating if weighted.

    Both 0 mean the smallest and largest element, and where both are equal the range goes from one below to one above.
    An interval holds its lower edge, the last one its upper edge too; what is outside is not counted, nor is NaN.
    weight, of input's shape, is summed instead of ones; density divides by the total and by the width of an interval.
    Raises ConfigError for a range from infinite data.
    """
    if weight is not None and weight.shape != input.shape:
        raise ShapeError(f"histogram: weight has shape {list(weight.shape)}, input {list(input.shape)}")
    x = input.reshape(-1).astype(dtypes.float64)
    low, high = _edges(x, bins, min, max, "histogram", 1, jnp.nanmin, jnp.nanmax)
    place = jnp.floor((x - low) * bins / (high - low))
    place = jnp.where(x == high, bins - 1, place)
    inside = (x >= low) & (x <= high)
    at = jnp.where(inside, place, bins).astype(dtypes.int64)
    amount = jnp.ones(x.shape, dtypes.int64) if weight is None else weight.reshape(-1)
    counts = add(jnp.zeros((bins,), amount.dtype), (at,), amount)
    counts = jnp.where(jnp.isinf(low) | jnp.isinf(high), dtypes.not_a_number(counts.dtype), counts)
    if not density:
        return counts
    counts = floating(counts)
    return counts / (jnp.sum(counts) * ((high - low) / bins).astype(counts.dtype))


@op
def histogramdd(
    x: Array, edges: list[Array], weights: Array | None, bins: tuple[int, ...], ranges: Any, density: bool
) -> tuple[Array, ...]:
    """Points x [*b, n] counted in a grid of n dims: -> (counts [bins[0], ..., bins[n - 1]] in x's dtype, list of n
    vectors of edges).

    bins: intervals in every dim, a list with the number for each, or a list of n vectors of increasing edges. ranges:
    2 n numbers, the least and greatest edge of each dim, else the smallest and largest element. An interval holds its
    lower edge, the last one its upper edge too. weights [*b] are summed instead of ones; density divides by their total
    and the volume of an interval.
    """
    n = x.shape[-1]
    if len(edges or bins) != n:
        raise ShapeError(f"histogramdd: {len(edges or bins)} bins for points of {n} dims; give one each")
    if ranges is not None and len(ranges) != 2 * n:
        raise ShapeError(f"histogramdd: {len(ranges)} ranges for {n} dims; give the least and greatest edge of each")
    if weights is not None and weights.shape != x.shape[:-1]:
        raise ShapeError(f"histogramdd: weights has shape {list(weights.shape)}, x {list(x.shape)}; give one a point")
    points = x.reshape(-1, n)
    edges = [e.astype(x.dtype) for e in edges] or _grid_edges(points, bins, ranges)
    sizes = tuple(e.shape[0] - 1 for e in edges)
    flat, inside = jnp.zeros(points.shape[0], dtypes.int64), jnp.ones(points.shape[0], bool)
    for column, e, size in zip(points.T, edges, sizes, strict=True):
        at = jnp.searchsorted(e, column, side="right") - 1
        at = jnp.where(column == e[-1], size - 1, at)
        inside &= (at >= 0) & (at < size)
        flat = flat * size + at
    amount = jnp.ones(points.shape[0], x.dtype) if weights is None else weights.reshape(-1).astype(x.dtype)
    counts = add(jnp.zeros(math.prod(sizes), x.dtype), (jnp.where(inside, flat, math.prod(sizes)),), amount)
    counts = counts.reshape(sizes)
    if density:
        counts = counts / jnp.sum(counts)
        for dim, e in enumerate(edges):
            counts = counts / jnp.diff(e).reshape([-1 if d == dim else 1 for d in range(len(sizes))])
    return (counts, *edges)


def _grid_edges(points: Array, bins: tuple, ranges: Any) -> list[Array]:
    n = points.shape[1]
    if ranges is None:
        empty = points.shape[0] == 0
        low, high = (jnp.zeros(n), jnp.ones(n)) if empty else (points.min(0), points.max(0))
    else:
        low, high = (jnp.asarray(ranges[at::2], points.dtype) for at in (0, 1))
    # as NumPy has it: an interval of one point is widened by half on both sides
    low, high = jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)
    return [jnp.linspace(low[d], high[d], bins[d] + 1).astype(points.dtype) for d in range(n)]


_histogramdd = histogramdd


def _over_dims(
    x: AnyTensor,
    bins: int | Sequence[int] | Sequence[AnyTensor] = 10,
    ranges: Sequence[float] | None = None,
    density: bool = False,
    weights: AnyTensor | None = None,
    name: str | None = None,
) -> tuple[AnyTensor, list[AnyTensor]]:
    shape = list(x.shape)
    if len(shape) < 2 or not dtypes.is_floating(x.dtype):
        raise ShapeError(f"histogramdd takes floating points [..., n], got {x.dtype.name} of shape {shape}")
    if isinstance(bins, int) and shape[-1] == DYNAMIC:
        raise ShapeError(
            f"histogramdd: bins={bins} in every dim of points [..., n], and this Program does not say n; give a list"
        )
    listed = [bins] * shape[-1] if isinstance(bins, int) else list(bins)
    counts = [b for b in listed if isinstance(b, int)]
    if any(b < 1 for b in counts) or (counts and len(counts) < len(listed)):
        raise ShapeError(
            f"histogramdd: bins={bins!r}; give positive numbers of intervals, or a vector of edges for each dim"
        )
    edges = [] if counts else listed
    hist, *found = _histogramdd(x, edges, weights, tuple(counts), None if ranges is None else tuple(ranges), density)
    return hist, found


histogramdd = republish(_histogramdd, _over_dims)


@preceded(_check_range("histogram_bin_edges"))
@op(real=True)
def histogram_bin_edges(input: Array, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Array:
    """Edges of `bins` equal intervals from min to max -> [bins + 1], in the default dtype for integers.

    The range is that of histogram, but that one of a single value goes from a half below to a half above. Raises
    ConfigError for a range from infinite data.
    """
    low, high = _edges(input, bins, min, max, "histogram_bin_edges", 0.5)
    return jnp.linspace(low, high, bins + 1).astype(floating(input).dtype)


@op
def bincount(x: Array, weights: Array | None = None, minlength: int = 0, length: int | None = None) -> Array:
    """The number of times that each of 0, 1, 2, ... occurs in a vector x of integers >= 0 -> [max(largest + 1,
    minlength)].

    int64; with weights, of x's shape, their sums instead. length, if given, is the size of the result, and spares
    looking at the values, so that it can be captured; larger values are then not counted.
    """
    if x.ndim != 1 or not (dtypes.is_integer(x.dtype) or x.size == 0):
        raise ShapeError(f"bincount takes a vector of integers, got {x.dtype.name} of shape {list(x.shape)}")
    if weights is not None and weights.shape != x.shape:
        raise ShapeError(f"bincount: weights has shape {list(weights.shape)}, x {list(x.shape)}")
    amount = jnp.ones(x.shape, dtypes.int64) if weights is None else weights
    size = max(minlength, length or 0)
    return add(jnp.zeros((size,), amount.dtype), (bounded(x, size, negative=False),), amount)


_bincount = bincount


def _count(
    x: AnyTensor,
    weights: AnyTensor | None = None,
    minlength: int = 0,
    name: str | None = None,
    *,
    length: int | None = None,
) -> AnyTensor:
    if minlength < 0:
        raise ShapeError(f"bincount: minlength={minlength}; give a length >= 0")
    if length is None:
        value = state.host(x, "bincount(x), whose result is as long as the largest value says; give length=")
        if value.size and value.min() < 0:
            raise ShapeError(f"bincount counts integers >= 0, got {value.min()}")
        length = int(value.max()) + 1 if value.size else 0
    return _bincount(x, weights, minlength, length)


bincount = republish(_bincount, _count)


@op(amp="fp32")
def cov(
    x: Array,
    rowvar: bool = True,
    ddof: bool = True,
    fweights: Array | None = None,
    aweights: Array | None = None,
) -> Array:
    """Covariances of variables: x [variables, observations], or the other way round with rowvar=False -> [v, v].

    ddof divides by n - 1 rather than n. fweights: how often each observation counts, integers; aweights: its weight.
    A vector is one variable and gives [].
    """
    if x.ndim > 2:
        raise ShapeError(f"cov takes [variables, observations], got shape {list(x.shape)}")
    if fweights is not None and not dtypes.is_integer(fweights.dtype):
        raise DTypeError(f"cov: fweights are counts, got {fweights.dtype.name}; use aweights for others")
    # a matrix of one row is one variable, whatever rowvar says
    variables_first = x.ndim < 2 or rowvar or x.shape[0] == 1
    observations = x.size if x.ndim < 2 else x.shape[1 if variables_first else 0]
    for name, weights in (("fweights", fweights), ("aweights", aweights)):
        if weights is not None and weights.shape != (observations,):
            raise ShapeError(f"cov: {name} {list(weights.shape)}; needs [{observations}], one an observation")
    return jnp.cov(floating(x), rowvar=rowvar, ddof=int(ddof), fweights=fweights, aweights=aweights)


@op(amp="fp32")
def corrcoef(x: Array, rowvar: bool = True) -> Array:
    """Correlation coefficients of variables, covariances divided by both standard deviations; x as in cov."""
    if x.ndim > 2:
        raise ShapeError(f"corrcoef takes [variables, observations], got shape {list(x.shape)}")
    return jnp.corrcoef(floating(x), rowvar=rowvar)
