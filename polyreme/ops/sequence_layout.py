"""Ops that move the rows of sequences: padding, expansion, concatenation, slices, removal.

Floor: 2.  x [total, ...] and offsets [n + 1] as in sequence_rows. A result whose number of rows depends on the
values of offsets takes it as an attribute; where it is not given it is read on the host, which raises CaptureError
inside a captured function. Source: PaddlePaddle 1.7, `fluid.layers.sequence_*`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import promote
from polyreme.core.op import OPS, composite, op
from polyreme.errors import ShapeError
from polyreme.ops.bounds import at_hand, check_index, preceded
from polyreme.ops.gather_scatter import as_column, gather
from polyreme.ops.sequence_rows import (
    Rows,
    check_offsets,
    column,
    given_size,
    longest,
    on_host,
    padded,
    rows_of,
    take_rows,
    unpadded,
)

NOTHING: Any = 0.0
"""What sequence_pad fills with unless told: the default of an array parameter, a number."""

# lengths


def _check_lengths(length: Any, **_: Any) -> None:
    found = at_hand(length)
    if found is not None and found.size and found.min() < 0:
        raise ShapeError(f"sequence_offsets: length {found.min()} is negative; a sequence has 0 rows or more")


def _offsets(length: Array) -> Array:
    return jnp.concatenate([jnp.zeros(1, length.dtype), jnp.cumsum(length, dtype=length.dtype)])


@preceded(_check_lengths)
@op(method=False)
def sequence_offsets(length: Array) -> Array:
    """Where sequences of these lengths begin, and where the last one ends: [n] or [n, 1] -> [n + 1]."""
    return _offsets(as_column("sequence_offsets", length))


@composite(method=False)
def sequence_room(counts: Any) -> Any:
    """As many elements as counts add up to, False each: a size that depends on values, as a Tensor that has it.

    Reads the host. Raises CaptureError inside a capture.
    """
    total = int(on_host(counts, "sequence_room(), whose result's size is the sum of the counts").sum())
    return OPS["cast"](np.zeros(total, bool), dtypes.bool_)


# to a rectangle and back


def _pad_ready(x: Any, offsets: Any, pad_value: Any = 0.0, maxlen: int | None = None, **_: Any) -> Any:
    if np.shape(x):
        check_offsets("sequence_pad", offsets, np.shape(x)[0])
    if maxlen is None:
        return sequence_pad(x, offsets, pad_value, longest("sequence_pad without maxlen", offsets))
    found = at_hand(offsets)
    if found is not None and found.ndim == 1 and found.size > 1 and np.diff(found).max() > maxlen:
        raise ShapeError(
            f"sequence_pad: maxlen={maxlen}, the longest sequence has {np.diff(found).max()} rows; give at least that"
        )
    return None


@preceded(_pad_ready)
@op(method=False)
def sequence_pad(
    x: Array, offsets: Array, pad_value: Array = NOTHING, maxlen: int | None = None
) -> tuple[Array, Array]:
    """Sequences side by side, pad_value after their end, and their lengths: -> [n, maxlen, *d], int64 [n].

    pad_value: a number, [1], or one row [*d]. maxlen is the length of the longest unless given; ShapeError if it is
    less (where offsets cannot be read, what does not fit is cut off).
    """
    rows = rows_of("sequence_pad", offsets, x.shape[0])
    found, valid = padded(x, rows, given_size("sequence_pad", "maxlen", maxlen))
    fill = pad_value.astype(x.dtype)
    if fill.shape not in ((), (1,), x.shape[1:]):
        raise ShapeError(
            f"sequence_pad: pad_value {list(fill.shape)}; needs one number or a row {list(x.shape[1:])} of x"
        )
    fill = fill if fill.shape == x.shape[1:] else fill.reshape(())
    found = jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 1)), found, fill)
    return found, rows.lengths.astype(dtypes.int64)


def _unpad_ready(x: Any, length: Any, rows: int | None = None, **_: Any) -> Any:
    found = at_hand(length)
    if found is not None and found.size and (found.min() < 0 or found.max() > x.shape[1]):
        wrong = found.min() if found.min() < 0 else found.max()
        raise ShapeError(f"sequence_unpad: length {wrong} of x {list(x.shape)}; give lengths from 0 to {x.shape[1]}")
    if rows is None:
        total = on_host(length, "sequence_unpad without rows, whose result's size is the sum of the lengths").sum()
        return sequence_unpad(x, length, int(total))
    return None


@preceded(_unpad_ready)
@op(method=False)
def sequence_unpad(x: Array, length: Array, rows: int | None = None) -> Array:
    """The first length[i] rows of each x[i], one after the other: [n, maxlen, *d], [n] or [n, 1] -> [rows, *d]."""
    length = as_column("sequence_unpad", length)
    if x.ndim < 2 or x.shape[0] != length.shape[0]:
        raise ShapeError(
            f"sequence_unpad: x {list(x.shape)} and length {list(length.shape)}; needs [n, maxlen, ...], [n]"
        )
    total = given_size("sequence_unpad", "rows", rows)
    return unpadded(x, rows_of("sequence_unpad", _offsets(length), total))


# repetition


def _expand_as_ready(x: Any, offsets: Any, rows: int | None = None, **_: Any) -> Any:
    if rows is None:
        found = on_host(offsets, "sequence_expand_as without rows, whose result's size is the last offset")
        return sequence_expand_as(x, offsets, int(found[-1]) if found.ndim == 1 and found.size else 0)
    check_offsets("sequence_expand_as", offsets, rows)
    return None


@preceded(_expand_as_ready)
@op(method=False)
def sequence_expand_as(x: Array, offsets: Array, rows: int | None = None) -> Array:
    """Row i of x once for every row of sequence i: [n, *d], [n + 1] -> [rows, *d]. ShapeError unless both have n."""
    where = rows_of("sequence_expand_as", offsets, given_size("sequence_expand_as", "rows", rows))
    _same_count("sequence_expand_as", x.shape[0], where.n)
    return where.of_row(x)


def _same_count(what: str, rows: int, n: int) -> None:
    if rows != n:
        raise ShapeError(f"{what}: x {rows} rows, offsets divide into {n} sequences; there must be one for each")


def _expand_ready(
    x: Any, offsets: Any, repeats: Any, sequences: int | None = None, rows: int | None = None, **_: Any
) -> Any:
    if np.shape(x):
        check_offsets("sequence_expand", offsets, np.shape(x)[0])
    if sequences is None or rows is None:
        why = "sequence_expand without rows, whose result's size depends on the repetitions"
        times, lengths = (np.diff(on_host(v, why)) for v in (repeats, offsets))
        _same_sequences(len(lengths), len(times))
        return sequence_expand(x, offsets, repeats, int(times.sum()), int((times * lengths).sum()))
    return None


def _same_sequences(n: int, m: int) -> None:
    if n != m:
        raise ShapeError(f"sequence_expand: x has {n} sequences, repeats divides into {m}; there must be one for each")


@preceded(_expand_ready)
@op(method=False)
def sequence_expand(
    x: Array, offsets: Array, repeats: Array, sequences: int | None = None, rows: int | None = None
) -> tuple[Array, Array]:
    """Sequence i of x, repeats[i + 1] - repeats[i] times: -> [rows, *d] and the offsets [sequences + 1] of the copies.

    repeats [n + 1] are offsets of as many sequences as x has: how many there are of each.
    """
    source = rows_of("sequence_expand", offsets, x.shape[0])
    copies = rows_of("sequence_expand", repeats, given_size("sequence_expand", "sequences", sequences))
    _same_sequences(source.n, copies.n)
    made = _offsets(copies.of_row(source.lengths))
    target = rows_of("sequence_expand", made, given_size("sequence_expand", "rows", rows))
    within = jnp.arange(target.total, dtype=made.dtype) - target.of_row(target.starts)
    at = target.of_row(copies.of_row(source.starts)) + within
    return take_rows(x, at, target.inside), made


# joining and reshaping


@op(method=False)
def sequence_concat(xs: list[Array], offsets: list[Array]) -> tuple[Array, Array]:
    """Sequence i of each x one after the other, as sequence i: [total_j, *d], [n + 1] each -> [sum of totals, *d],
    [n + 1]. Raises ShapeError unless all have n sequences.
    """
    if not xs or len(xs) != len(offsets) or len({o.shape for o in offsets}) > 1:
        raise ShapeError(
            f"sequence_concat: {len(xs)} Tensors with offsets {[list(o.shape) for o in offsets]}; each needs offsets, "
            "and all the same number of sequences"
        )
    xs = list(promote(*xs))
    offsets = list(promote(*offsets))
    every = [rows_of("sequence_concat", o, x.shape[0]) for x, o in zip(xs, offsets, strict=True)]
    joined = jnp.sum(jnp.stack(offsets), 0)
    total = sum(x.shape[0] for x in xs)
    out = jnp.zeros((total, *xs[0].shape[1:]), xs[0].dtype)
    start = joined[:-1]
    for x, rows in zip(xs, every, strict=True):
        at = rows.of_row(start) + jnp.arange(rows.total, dtype=joined.dtype) - rows.of_row(rows.starts)
        out = out.at[jnp.where(rows.inside, at, total)].set(x, mode="drop")
        start = start + rows.lengths
    return out, joined


def _reshape_ready(x: Any, offsets: Any, new_dim: int, **_: Any) -> None:
    shape = np.shape(x)
    if len(shape) != 2 or new_dim < 1:
        raise ShapeError(
            f"sequence_reshape: x {list(shape)} with new_dim={new_dim}; needs [total, d] and a positive width"
        )
    check_offsets("sequence_reshape", offsets, shape[0])
    found = at_hand(offsets)
    uneven = [] if found is None else [int(n) for n in np.diff(found) if n * shape[1] % new_dim]
    if uneven:
        raise ShapeError(
            f"sequence_reshape: a sequence of {uneven[0]} rows of {shape[1]} does not divide into rows of {new_dim}"
        )


@preceded(_reshape_ready)
@op(method=False)
def sequence_reshape(x: Array, offsets: Array, new_dim: int) -> tuple[Array, Array]:
    """Each sequence's elements in rows of another width: [total, d] -> [total * d / new_dim, new_dim], and the offsets.

    Raises ShapeError if a sequence's elements do not divide into rows of new_dim.
    """
    if x.size % new_dim:
        raise ShapeError(f"sequence_reshape: x {list(x.shape)} does not divide into rows of {new_dim}")
    return x.reshape(x.size // new_dim, new_dim), offsets * x.shape[1] // new_dim


# parts


def _slice_ready(x: Any, offsets: Any, offset: Any, length: Any, rows: int | None = None, **_: Any) -> Any:
    if np.shape(x):
        check_offsets("sequence_slice", offsets, np.shape(x)[0])
    found = [v for v in map(at_hand, (offsets, offset, length)) if v is not None]
    if len(found) == 3:
        _check_slices(np.diff(found[0]), found[1].reshape(-1), found[2].reshape(-1))
    if rows is None:
        total = on_host(length, "sequence_slice without rows, whose result's size is the sum of the lengths").sum()
        return sequence_slice(x, offsets, offset, length, int(total))
    return None


def _check_slices(have: np.ndarray, offset: np.ndarray, length: np.ndarray) -> None:
    if not have.shape == offset.shape == length.shape:
        raise ShapeError(
            f"sequence_slice: {len(have)} sequences, {len(offset)} offset and {len(length)} length; give one each"
        )
    wrong = np.flatnonzero((offset < 0) | (length < 0) | (offset + length > have))
    if wrong.size:
        i = wrong[0]
        raise ShapeError(
            f"sequence_slice: rows {offset[i]} to {offset[i] + length[i]} of sequence {i}, which has {have[i]}; "
            "offset + length must not pass its end"
        )


@preceded(_slice_ready)
@op(method=False)
def sequence_slice(
    x: Array, offsets: Array, offset: Array, length: Array, rows: int | None = None
) -> tuple[Array, Array]:
    """length[i] rows of sequence i from its row offset[i] on: -> [rows, *d] and their offsets [n + 1].

    offset, length: [n] or [n, 1]. Raises ShapeError for rows that are not there.
    """
    source = rows_of("sequence_slice", offsets, x.shape[0])
    made = _offsets(as_column("sequence_slice", length))
    target = rows_of("sequence_slice", made, given_size("sequence_slice", "rows", rows))
    begin = source.starts + as_column("sequence_slice", offset) - target.starts
    return take_rows(x, target.of_row(begin) + jnp.arange(target.total), target.inside), made


def _scatter_ready(x: Any, index: Any, updates: Any, offsets: Any, **_: Any) -> None:
    if np.shape(index):
        check_offsets("sequence_scatter", offsets, np.shape(index)[0])
    check_index("sequence_scatter", index, x.shape[1], 1, negative=False)


@preceded(_scatter_ready)
@op(method=False)
def sequence_scatter(x: Array, index: Array, updates: Array, offsets: Array) -> Array:
    """x with the updates of sequence i added to its row i, at the columns that index names.

    x [n, d]; index and updates [total] or [total, 1], divided by offsets [n + 1]. Equal columns add up. Raises
    IndexError for one outside [0, d).
    """
    at, add = (column("sequence_scatter", n, v) for n, v in (("index", index), ("updates", updates)))
    if x.ndim != 2 or at.shape != add.shape:
        raise ShapeError(
            f"sequence_scatter: x {list(x.shape)}, index {list(index.shape)}, updates {list(updates.shape)}; needs "
            "[n, d] and as many indices as updates"
        )
    rows = rows_of("sequence_scatter", offsets, at.shape[0])
    _same_count("sequence_scatter", x.shape[0], rows.n)
    # a negative index would count from the end
    inside = rows.inside & (at >= 0)
    return x.at[jnp.where(inside, rows.ids, rows.n), at].add(add.astype(x.dtype), mode="drop")


def kept_first(x: Array, rows: Rows, keep: Array) -> tuple[Array, Array]:
    """The rows where keep is True moved to the front in their order, and the offsets of what is kept: [total], [n + 1].

    Behind them stand the others, rows of no sequence.
    """
    keep = keep & rows.inside
    counts = jax.ops.segment_sum(keep.astype(rows.starts.dtype), rows.ids, rows.n, indices_are_sorted=True)
    return jnp.take(x, jnp.argsort(~keep, stable=True), 0), _offsets(counts)


@composite(method=False)
def sequence_erase(x: Any, offsets: Any, tokens: Any, name: str | None = None) -> tuple[Any, Any]:
    """x [total] or [total, 1] without the ids in tokens, and the offsets [n + 1] of what is left.

    Reads the host: how many are left is the shape. Raises CaptureError inside a capture.
    """
    why = "sequence_erase(), whose result has a shape only known on the host"
    value, found = on_host(x, why), on_host(offsets, why)
    check_offsets("sequence_erase", offsets, len(value))
    keep = ~np.isin(column("sequence_erase", "x", value), np.asarray(tokens))
    left = np.concatenate([[0], np.cumsum(keep)])[found]
    return gather(x, np.flatnonzero(keep), 0), OPS["cast"](left, dtypes.int64)
