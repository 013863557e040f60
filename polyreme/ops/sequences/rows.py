"""Ragged rows: which sequence each row belongs to, and rows laid out in a rectangle and back.

The sequences of a batch lie one after the other in the rows of x [total, ...]; lengths [n] says how many
rows each has. Every shape follows from total and n, so that one program serves every division of total rows into n
sequences. Rows behind the last sequence belong to none: they are zero in every result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.bounds import at_hand
from polyreme.ops.by_index import read


@dataclass(frozen=True)
class Rows:
    """The sequences that rows belong to. ids: the sequence of each row, n for a row of none; starts, ends: first row of
    each sequence and the row after its last; total: number of rows.
    """

    ids: Array
    starts: Array
    ends: Array
    total: int

    @property
    def n(self) -> int:
        """Number of sequences."""
        return self.starts.shape[0]

    @property
    def lengths(self) -> Array:
        """Rows of each sequence, [n]."""
        return self.ends - self.starts

    @property
    def inside(self) -> Array:
        """True for rows that belong to a sequence, [total]."""
        return self.ids < self.n

    def of_row(self, per_sequence: Array) -> Array:
        """Values of sequences [n, ...] as each row's sequence has them, [total, ...]; zero for rows of none."""
        return take_rows(per_sequence, self.ids, self.inside)


def rows_of(what: str, lengths: Array, total: int) -> Rows:
    """The Rows of sequences of these lengths, [n] or [n, 1], that divide total rows. Raises ShapeError or DTypeError
    for others."""
    if not dtypes.is_integer(lengths.dtype):
        raise DTypeError(f"{what}: lengths are {lengths.dtype.name}, need int32 or int64; use astype('int64')")
    if lengths.ndim == 2 and lengths.shape[1] == 1:
        lengths = lengths[:, 0]
    if lengths.ndim != 1:
        raise ShapeError(f"{what}: lengths {list(lengths.shape)} must be [n], one for each sequence")
    ends = jnp.cumsum(lengths, dtype=lengths.dtype)
    ids = jnp.searchsorted(ends, jnp.arange(total, dtype=ends.dtype), side="right")
    return Rows(ids, ends - lengths, ends, total)


def take_rows(x: Array, index: Array, valid: Array) -> Array:
    """x[at] where valid, else zero: x [m, ...], at, valid [*b] -> [*b, ...]. Where it is False nothing is read."""
    shape = index.shape + x.shape[1:]
    if not x.shape[0]:
        return jnp.zeros(shape, x.dtype)
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - 1))
    return jnp.where(mask, read(x, (jnp.where(valid, index, 0),), mode="clip"), jnp.zeros((), x.dtype))


def padded(x: Array, rows: Rows, length: int, reverse: bool = False) -> tuple[Array, Array]:
    """Sequences side by side: [total, ...] -> ([n, length, ...], which elements are rows, [n, length]).

    reverse: each sequence from its last row to its first. What is not a row is zero.
    """
    step = jnp.arange(length, dtype=rows.starts.dtype)
    valid = step < rows.lengths[:, None]
    at = rows.ends[:, None] - 1 - step if reverse else rows.starts[:, None] + step
    return take_rows(x, at, valid), valid


def unpadded(x: Array, rows: Rows, reverse: bool = False) -> Array:
    """The inverse of padded: [n, length, ...] -> [total, ...]; a row that the rectangle had no room for is NaN."""
    n, length = x.shape[:2]
    if not n * length:
        return jnp.zeros((rows.total, *x.shape[2:]), x.dtype)
    here = jnp.arange(rows.total, dtype=rows.starts.dtype)
    step = rows.of_row(rows.ends) - 1 - here if reverse else here - rows.of_row(rows.starts)
    # an index past the end of the flattened rectangle reads NaN, as every index out of range does
    at = jnp.where(step < length, rows.ids * length + step, n * length)
    found = jnp.take(x.reshape(n * length, *x.shape[2:]), at, 0, mode="fill")
    return jnp.where(rows.inside.reshape(-1, *(1,) * (x.ndim - 2)), found, jnp.zeros((), x.dtype))


def column(what: str, name: str, x: Any) -> Any:
    """x [total] or [total, 1] as [total]. Raises ShapeError for other shapes."""
    if x.ndim == 2 and x.shape[1] == 1:
        return x[:, 0]
    if x.ndim != 1:
        raise ShapeError(f"{what}: {name} {list(x.shape)} must be [total] or [total, 1], one value a row")
    return x


# on the host, before an op


def check_lengths(what: str, lengths: Any, total: int) -> None:
    """Raise ShapeError if lengths are at hand and do not add up to total."""
    values = at_hand(lengths)
    if values is None or values.dtype.kind not in "iu":
        return
    if values.size and values.min() < 0:
        raise ShapeError(f"{what}: length {values.min()} is negative; a sequence has 0 rows or more")
    if values.sum() != total:
        raise ShapeError(f"{what}: lengths add up to {values.sum()}, x has {total} rows; they must be the same")


def with_lengths(what: str) -> Callable[..., None]:
    """The step before an op on (x, lengths, ...) that checks its lengths."""

    def check(x: Any, lengths: Any, *_: Any, **__: Any) -> None:
        if np.shape(x):
            check_lengths(what, lengths, np.shape(x)[0])

    return check


def on_host(value: Any, what: str) -> np.ndarray:
    """value as an ndarray. Raises CaptureError, beginning with `what`, where it has none yet."""
    return state.host(value, what) if isinstance(value, TensorState) else np.asarray(value)


def longest(what: str, lengths: Any) -> int:
    """Rows of the longest sequence, read on the host."""
    found = on_host(lengths, f"{what}, whose result's size is the length of the longest sequence")
    return int(found.max()) if found.size else 0


def check_room(what: str, lengths: Any, maxlen: int) -> None:
    """Raise ShapeError if lengths are at hand and one is more than maxlen."""
    found = at_hand(lengths)
    if found is not None and found.size and found.max() > maxlen:
        raise ShapeError(f"{what}: maxlen={maxlen}, the longest sequence has {found.max()} rows; give at least that")


def given_size(what: str, name: str, size: int | None) -> int:
    """The size that an op was given. Raises ShapeError for none and for a negative one."""
    if size is None or size < 0:
        raise ShapeError(f"{what}: {name}={size}; give a number from 0 on")
    return size
