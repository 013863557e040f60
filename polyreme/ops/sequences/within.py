"""Ops within the sequences of ragged rows: pooling, softmax, convolution, reversal, windows.

x [total, ...] and lengths [n] as in sequences.rows. Source: PaddlePaddle 1.7, `fluid.layers.sequence_*`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import floating, promote
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.bounds import preceded
from polyreme.ops.sequences.rows import Rows, column, rows_of, take_rows, with_lengths

# pooling


def _summed(x: Array, rows: Rows) -> Array:
    return jax.ops.segment_sum(x, rows.ids, rows.n, indices_are_sorted=True)


def _sum(x: Array, rows: Rows) -> Array:
    return _summed(wide(x), rows).astype(x.dtype) if dtypes.is_floating(x.dtype) else _summed(x, rows)


def _divide(x: Array, rows: Rows, by: Array) -> Array:
    by = jnp.maximum(by, 1).reshape(-1, *(1,) * (x.ndim - 1))
    return (_summed(wide(x), rows) / by).astype(floating(x).dtype)


def _average(x: Array, rows: Rows) -> Array:
    return _divide(x, rows, rows.lengths.astype(wide(x).dtype))


def _sqrt(x: Array, rows: Rows) -> Array:
    return _divide(x, rows, jnp.sqrt(rows.lengths.astype(wide(x).dtype)))


def _extreme(x: Array, rows: Rows, reduce: object) -> Array:
    """The extreme of each sequence; of equal ones the first, which alone has the gradient."""
    still = jax.lax.stop_gradient(x)
    best = reduce(still, rows.ids, rows.n, indices_are_sorted=True)  # type: ignore[operator]
    here = jnp.arange(rows.total).reshape(-1, *(1,) * (x.ndim - 1))
    # a NaN equals nothing, so its sequence is left without a row and reads NaN
    at = jnp.where(still == rows.of_row(best), here, rows.total)
    first = jax.ops.segment_min(at, rows.ids, rows.n, indices_are_sorted=True)
    return jnp.take_along_axis(x, jnp.minimum(first, rows.total), 0, mode="fill")


def _max(x: Array, rows: Rows) -> Array:
    return _extreme(x, rows, jax.ops.segment_max)


def _min(x: Array, rows: Rows) -> Array:
    return _extreme(x, rows, jax.ops.segment_min)


def _first(x: Array, rows: Rows) -> Array:
    return take_rows(x, rows.starts, rows.lengths > 0)


def _last(x: Array, rows: Rows) -> Array:
    return take_rows(x, rows.ends - 1, rows.lengths > 0)


_POOLS = {"sum": _sum, "average": _average, "sqrt": _sqrt, "max": _max, "min": _min, "first": _first, "last": _last}


@preceded(with_lengths("sequence_pool"))
@op(method=False)
def sequence_pool(x: Array, lengths: Array, pool_type: str, pad_value: float = 0.0) -> Array:
    """One row for each sequence: [total, *d], [n] -> [n, *d]; pad_value for a sequence without rows.

    pool_type: "sum", "average", "sqrt" (sum / sqrt(length)), "max", "min" (of equal rows the first has the gradient),
    "first" or "last", in either case. Half precision is summed in float32. Raises ConfigError for another pool_type.
    """
    pool = _POOLS.get(pool_type.lower())
    if pool is None:
        raise ConfigError(f"sequence_pool: pool_type={pool_type!r}; choose one of {', '.join(_POOLS)}")
    rows = rows_of("sequence_pool", lengths, x.shape[0])
    if not rows.total:
        return jnp.full((rows.n, *x.shape[1:]), pad_value, x.dtype)
    pooled = pool(x, rows)
    some = (rows.lengths > 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(some, pooled, jnp.asarray(pad_value, pooled.dtype))


# within each sequence


@preceded(with_lengths("sequence_softmax"))
@op(amp="fp32", method=False)
def sequence_softmax(x: Array, lengths: Array) -> Array:
    """e^x / sum of e^x over each sequence, computed without overflow: [total] or [total, 1], in the shape of x."""
    dtype, v = floating(x).dtype, wide(column("sequence_softmax", "x", x))
    rows = rows_of("sequence_softmax", lengths, x.shape[0])
    top = jax.ops.segment_max(jax.lax.stop_gradient(v), rows.ids, rows.n, indices_are_sorted=True)
    e = jnp.exp(v - rows.of_row(top))
    total = jnp.where(rows.inside, rows.of_row(_summed(e, rows)), 1)
    return jnp.where(rows.inside, e / total, 0).reshape(x.shape).astype(dtype)


@preceded(with_lengths("sequence_reverse"))
@op(method=False)
def sequence_reverse(x: Array, lengths: Array) -> Array:
    """The rows of each sequence from last to first: [total, *d] -> [total, *d]."""
    rows = rows_of("sequence_reverse", lengths, x.shape[0])
    here = jnp.arange(rows.total, dtype=lengths.dtype)
    return take_rows(x, rows.of_row(rows.starts) + rows.of_row(rows.ends) - 1 - here, rows.inside)


# windows


def _neighbours(rows: Rows, start: int, length: int) -> tuple[Array, Array]:
    """Rows start .. start + length - 1 away from each row, and whether they are of its sequence: [total, length]."""
    at = jnp.arange(rows.total, dtype=rows.starts.dtype)[:, None] + jnp.arange(start, start + length)
    first, end = rows.of_row(rows.starts)[:, None], rows.of_row(rows.ends)[:, None]
    return at, (at >= first) & (at < end)


@preceded(with_lengths("sequence_conv"))
@op(amp="low", method=False)
def sequence_conv(
    x: Array, lengths: Array, weight: Array, context_length: int = 3, context_start: int | None = None
) -> Array:
    """Each row and its neighbours times weight: [total, in], [n], [context_length * in, out] -> [total, out].

    The neighbours of row t are rows t + context_start up to t + context_start + context_length - 1, zeros outside of
    t's sequence; context_start is -(context_length // 2) unless given. Raises ShapeError for a weight of another shape,
    ConfigError unless context_length > 0.
    """
    if context_length < 1:
        raise ConfigError(f"sequence_conv: context_length={context_length}; it must be positive")
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != context_length * x.shape[1]:
        raise ShapeError(
            f"sequence_conv: x {list(x.shape)} and weight {list(weight.shape)} with context_length={context_length}; "
            "needs [total, in] and [context_length * in, out]"
        )
    start = -(context_length // 2) if context_start is None else context_start
    rows = rows_of("sequence_conv", lengths, x.shape[0])
    x, weight = promote(x, weight)
    near = take_rows(x, *_neighbours(rows, start, context_length)).reshape(rows.total, weight.shape[0])
    return jnp.matmul(near, weight, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


@preceded(with_lengths("row_conv"))
@op(method=False)
def row_conv(x: Array, lengths: Array, weight: Array) -> Array:
    """Lookahead convolution: out[t] = sum over j of weight[j] * x[t + j], within each sequence. arXiv:1512.02595.

    [total, d], [n], [1 + future rows, d] -> [total, d]. Raises ShapeError if the widths differ.
    """
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ShapeError(
            f"row_conv: x {list(x.shape)} and weight {list(weight.shape)}; needs [total, d] and [1 + future rows, d]"
        )
    rows = rows_of("row_conv", lengths, x.shape[0])
    x, weight = promote(x, weight)
    near = take_rows(x, *_neighbours(rows, 0, weight.shape[0]))
    return jnp.einsum("tjd,jd->td", wide(near), wide(weight)).astype(x.dtype)


@preceded(with_lengths("sequence_enumerate"))
@op(method=False)
def sequence_enumerate(x: Array, lengths: Array, win_size: int, pad_value: int = 0) -> Array:
    """Each id with the win_size - 1 that follow it in its sequence: [total] or [total, 1] -> [total, win_size].

    pad_value stands where the sequence has ended. Raises ConfigError unless win_size > 0, DTypeError unless x is
    integer.
    """
    if win_size < 1:
        raise ConfigError(f"sequence_enumerate: win_size={win_size}; it must be positive")
    if not dtypes.is_integer(x.dtype):
        raise DTypeError(f"sequence_enumerate: x is {x.dtype.name}, needs integers; use astype('int64')")
    rows = rows_of("sequence_enumerate", lengths, x.shape[0])
    at, valid = _neighbours(rows, 0, win_size)
    found = take_rows(column("sequence_enumerate", "x", x), at, valid)
    return jnp.where(valid, found, jnp.asarray(pad_value, x.dtype))
