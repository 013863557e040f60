"""Ops that move the rows of sequences: padding, expansion, concatenation, slices, removal.

x [total, ...] and lengths [n] as in sequences.rows. A result whose number of rows depends on the
values of lengths takes it as an attribute; where it is not given it is read on the host, which raises CaptureError
inside a captured function. Source: PaddlePaddle 1.7, `fluid.layers.sequence_*`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote
from polyreme.core.op import OPS, composite, op
from polyreme.errors import ShapeError
from polyreme.ops.bounds import at_hand, check_index, preceded
from polyreme.ops.by_index import add, bounded
from polyreme.ops.indices.gather import as_column, gather
from polyreme.ops.sequences.rows import (
    Rows,
    check_lengths,
    check_room,
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


def _lengths_ready(lengths: Any, **_: Any) -> None:
    found = at_hand(lengths)
    if found is not None and found.size and found.min() < 0:
        raise ShapeError(f"sequence_offsets: length {found.min()} is negative; a sequence has 0 rows or more")


@preceded(_lengths_ready)
@op(method=False)
def sequence_offsets(lengths: Array) -> Array:
    """The starts of sequences of these lengths, and the end of the last one: [n] or [n, 1] -> [n + 1]."""
    lengths = as_column("sequence_offsets", lengths)
    return jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths, dtype=lengths.dtype)])


@composite(method=False)
def sequence_room(counts: AnyTensor, most: int | None = None) -> Any:
    """As many elements as counts add up to, False each: a size that depends on values, as a Tensor that has it.

    Reads the host. most: what counts do not add up to more than, the number of elements where counts cannot be read;
    without it CaptureError is raised inside a capture.
    """
    if most is None:
        known = on_host(counts, "sequence_room(), whose result's size is the sum of the counts")
    else:
        known = at_hand(counts)
    total = most if known is None else int(known.sum())
    return OPS["cast"](np.zeros(total, bool), dtypes.bool_)


# to a rectangle and back


def _pad_ready(x: Any, lengths: Any, pad_value: Any = 0.0, maxlen: int | None = None, **_: Any) -> Any:
    if np.shape(x):
        check_lengths("sequence_pad", lengths, np.shape(x)[0])
    if maxlen is None:
        return sequence_pad(x, lengths, pad_value, longest("sequence_pad without maxlen", lengths))
    check_room("sequence_pad", lengths, maxlen)
    return None


@preceded(_pad_ready)
@op(method=False)
def sequence_pad(
    x: Array, lengths: Array, pad_value: Array = NOTHING, maxlen: int | None = None
) -> tuple[Array, Array]:
    """Sequences side by side, pad_value after their end, and their lengths: -> [n, maxlen, *d], int64 [n].

    pad_value: a number, [1], or one row [*d]. maxlen is the length of the longest unless given; ShapeError if it is
    less (where lengths cannot be read, what does not fit is cut off).
    """
    rows = rows_of("sequence_pad", lengths, x.shape[0])
    result, valid = padded(x, rows, given_size("sequence_pad", "maxlen", maxlen))
    fill = pad_value.astype(x.dtype)
    if fill.shape not in ((), (1,), x.shape[1:]):
        raise ShapeError(
            f"sequence_pad: pad_value {list(fill.shape)}; needs one number or a row {list(x.shape[1:])} of x"
        )
    fill = fill if fill.shape == x.shape[1:] else fill.reshape(())
    result = jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 1)), result, fill)
    return result, rows.lengths.astype(dtypes.int64)


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
    return unpadded(x, rows_of("sequence_unpad", length, total))


# repetition


def _expand_as_ready(x: Any, lengths: Any, rows: int | None = None, **_: Any) -> Any:
    if rows is None:
        found = on_host(lengths, "sequence_expand_as without rows, whose result's size is the sum of the lengths")
        return sequence_expand_as(x, lengths, int(found.sum()))
    check_lengths("sequence_expand_as", lengths, rows)
    return None


@preceded(_expand_as_ready)
@op(method=False)
def sequence_expand_as(x: Array, lengths: Array, rows: int | None = None) -> Array:
    """Row i of x once for every row of sequence i: [n, *d], [n] -> [rows, *d]. ShapeError unless both have n."""
    where = rows_of("sequence_expand_as", lengths, given_size("sequence_expand_as", "rows", rows))
    _same_count("sequence_expand_as", x.shape[0], where.n)
    return where.of_row(x)


def _same_count(what: str, rows: int, n: int) -> None:
    if rows != n:
        raise ShapeError(f"{what}: x has {rows} rows, lengths {n} sequences; there must be one for each")


def _expand_ready(
    x: Any, lengths: Any, repeats: Any, sequences: int | None = None, rows: int | None = None, **_: Any
) -> Any:
    if np.shape(x):
        check_lengths("sequence_expand", lengths, np.shape(x)[0])
    if sequences is None or rows is None:
        why = "sequence_expand without rows, whose result's size depends on the repetitions"
        times, each = (on_host(v, why).reshape(-1) for v in (repeats, lengths))
        _same_sequences(len(each), len(times))
        return sequence_expand(x, lengths, repeats, int(times.sum()), int((times * each).sum()))
    return None


def _same_sequences(n: int, m: int) -> None:
    if n != m:
        raise ShapeError(f"sequence_expand: x has {n} sequences, repeats {m} counts; there must be one for each")


@preceded(_expand_ready)
@op(method=False)
def sequence_expand(
    x: Array, lengths: Array, repeats: Array, sequences: int | None = None, rows: int | None = None
) -> tuple[Array, Array]:
    """Sequence i of x repeats[i] times: -> [rows, *d] and the lengths [sequences] of the copies. repeats [n]."""
    source = rows_of("sequence_expand", lengths, x.shape[0])
    copies = rows_of("sequence_expand", repeats, given_size("sequence_expand", "sequences", sequences))
    _same_sequences(source.n, copies.n)
    made = copies.of_row(source.lengths)
    target = rows_of("sequence_expand", made, given_size("sequence_expand", "rows", rows))
    within = jnp.arange(target.total, dtype=target.starts.dtype) - target.of_row(target.starts)
    at = target.of_row(copies.of_row(source.starts)) + within
    return take_rows(x, at, target.inside), made


# joining and reshaping


@op(method=False)
def sequence_concat(xs: list[Array], lengths: list[Array]) -> tuple[Array, Array]:
    """Sequence i of each x one after the other, as sequence i: [total_j, *d], [n] each -> [sum of totals, *d],
    [n]. Raises ShapeError unless all have n sequences.
    """
    if not xs or len(xs) != len(lengths) or len({o.shape for o in lengths}) > 1:
        raise ShapeError(
            f"sequence_concat: {len(xs)} Tensors with lengths {[list(o.shape) for o in lengths]}; each needs lengths, "
            "and all the same number of sequences"
        )
    xs = list(promote(*xs))
    lengths = list(promote(*lengths))
    every = [rows_of("sequence_concat", o, x.shape[0]) for x, o in zip(xs, lengths, strict=True)]
    joined = jnp.sum(jnp.stack(lengths), 0)
    start = rows_of("sequence_concat", joined, 0).starts
    total = sum(x.shape[0] for x in xs)
    out = jnp.zeros((total, *xs[0].shape[1:]), xs[0].dtype)
    for x, rows in zip(xs, every, strict=True):
        at = rows.of_row(start) + jnp.arange(rows.total, dtype=start.dtype) - rows.of_row(rows.starts)
        out = out.at[jnp.where(rows.inside, at, total)].set(x, mode="drop")
        start = start + rows.lengths
    return out, joined


def _reshape_ready(x: Any, lengths: Any, new_dim: int, **_: Any) -> None:
    shape = np.shape(x)
    if len(shape) != 2 or new_dim < 1:
        raise ShapeError(
            f"sequence_reshape: x {list(shape)} with new_dim={new_dim}; needs [total, d] and a positive width"
        )
    check_lengths("sequence_reshape", lengths, shape[0])
    found = at_hand(lengths)
    uneven = [] if found is None else [int(n) for n in found.reshape(-1) if n * shape[1] % new_dim]
    if uneven:
        raise ShapeError(
            f"sequence_reshape: a sequence of {uneven[0]} rows of {shape[1]} does not divide into rows of {new_dim}"
        )


@preceded(_reshape_ready)
@op(method=False)
def sequence_reshape(x: Array, lengths: Array, new_dim: int) -> tuple[Array, Array]:
    """Each sequence's elements in rows of another width: [total, d] -> [total * d / new_dim, new_dim], and the lengths.

    Raises ShapeError if a sequence's elements do not divide into rows of new_dim.
    """
    if x.size % new_dim:
        raise ShapeError(f"sequence_reshape: x {list(x.shape)} does not divide into rows of {new_dim}")
    return x.reshape(x.size // new_dim, new_dim), lengths * x.shape[1] // new_dim


# parts


def _slice_ready(x: Any, lengths: Any, offset: Any, length: Any, rows: int | None = None, **_: Any) -> Any:
    if np.shape(x):
        check_lengths("sequence_slice", lengths, np.shape(x)[0])
    found = [v for v in map(at_hand, (lengths, offset, length)) if v is not None]
    if len(found) == 3:
        _check_slices(*(v.reshape(-1) for v in found))
    if rows is None:
        total = on_host(length, "sequence_slice without rows, whose result's size is the sum of the lengths").sum()
        return sequence_slice(x, lengths, offset, length, int(total))
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
def sequence_slice(x: Array, lengths: Array, offset: Array, length: Array, rows: int | None = None) -> Array:
    """length[i] rows of sequence i from its row offset[i] on, one after the other: -> [rows, *d].

    offset, length: [n] or [n, 1]. Raises ShapeError for rows that are not there.
    """
    source = rows_of("sequence_slice", lengths, x.shape[0])
    target = rows_of("sequence_slice", length, given_size("sequence_slice", "rows", rows))
    begin = source.starts + as_column("sequence_slice", offset) - target.starts
    return take_rows(x, target.of_row(begin) + jnp.arange(target.total), target.inside)


def _scatter_ready(x: Any, index: Any, updates: Any, lengths: Any, **_: Any) -> None:
    if np.shape(index):
        check_lengths("sequence_scatter", lengths, np.shape(index)[0])
    check_index("sequence_scatter", index, x.shape[1], 1, negative=False)


@preceded(_scatter_ready)
@op(method=False)
def sequence_scatter(x: Array, index: Array, updates: Array, lengths: Array) -> Array:
    """x with the updates of sequence i added to its row i, at the columns that index names.

    x [n, d]; index and updates [total] or [total, 1], divided by lengths [n]. Equal columns add up. Raises
    IndexError for one outside [0, d).
    """
    positions, updates = (column("sequence_scatter", n, v) for n, v in (("index", index), ("updates", updates)))
    if x.ndim != 2 or positions.shape != updates.shape:
        raise ShapeError(
            f"sequence_scatter: x {list(x.shape)}, index {list(index.shape)}, updates {list(updates.shape)}; needs "
            "[n, d] and as many indices as updates"
        )
    rows = rows_of("sequence_scatter", lengths, positions.shape[0])
    _same_count("sequence_scatter", x.shape[0], rows.n)
    places = bounded(positions, x.shape[1], negative=False)
    return add(x, (jnp.where(rows.inside, rows.ids, rows.n), places), updates.astype(x.dtype))


def kept_first(x: Array, rows: Rows, keep: Array) -> tuple[Array, Array]:
    """The rows where keep is True moved to the front in their order, and the lengths of what is kept: [total], [n].

    Behind them stand the others, rows of no sequence.
    """
    keep = keep & rows.inside
    counts = jax.ops.segment_sum(keep.astype(rows.starts.dtype), rows.ids, rows.n, indices_are_sorted=True)
    return jnp.take(x, jnp.argsort(~keep, stable=True), 0), counts


@composite(method=False)
def sequence_erase(
    x: AnyTensor, lengths: AnyTensor, tokens: Any, name: str | None = None
) -> tuple[AnyTensor, AnyTensor]:
    """x [total] or [total, 1] without the ids in tokens, and the lengths [n] of what is left.

    Reads the host: how many are left is the shape. Raises CaptureError inside a capture.
    """
    why = "sequence_erase(), whose result has a shape only known on the host"
    value, row_counts = on_host(x, why), on_host(lengths, why)
    check_lengths("sequence_erase", lengths, len(value))
    keep = ~np.isin(column("sequence_erase", "x", value), np.asarray(tokens))
    kept = np.concatenate([[0], np.cumsum(keep)])
    ends = np.cumsum(row_counts)
    left = kept[ends] - kept[ends - row_counts]
    return gather(x, np.flatnonzero(keep), 0), OPS["cast"](left, dtypes.int64)
