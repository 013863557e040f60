"""Ragged rows: which sequence each row belongs to, and rows laid out in a rectangle and back.

Floor: 2.  The sequences of a batch lie one after the other in the rows of x [total, ...]; offsets [n + 1] says where
each begins, the last one being total. Every shape follows from total and n, so that one program serves every division
of total rows into n sequences. Rows from offsets[-1] on belong to no sequence: they are zero in every result.
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


@dataclass(frozen=True)
class Rows:
    """Where rows stand. ids: the sequence of each row, n for a row of none; starts, ends: first row of each sequence
    and the row after its last; total: number of rows.
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


def rows_of(what: str, offsets: Array, total: int) -> Rows:
    """How offsets divide total rows. Raises ShapeError or DTypeError for what are no offsets."""
    if not dtypes.is_integer(offsets.dtype):
        raise DTypeError(f"{what}: offsets are {offsets.dtype.name}, need int32 or int64; use astype('int64')")
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ShapeError(f"{what}: offsets {list(offsets.shape)} must be [n + 1], where each of n sequences begins")
    starts, ends = offsets[:-1], offsets[1:]
    ids = jnp.searchsorted(ends, jnp.arange(total, dtype=offsets.dtype), side="right")
    return Rows(ids, starts, ends, total)


def take_rows(x: Array, at: Array, valid: Array) -> Array:
    """x[at] where valid, else zero: x [m, ...], at, valid [*b] -> [*b, ...]. Where it is False nothing is read."""
    shape = at.shape + x.shape[1:]
    if not x.shape[0]:
        return jnp.zeros(shape, x.dtype)
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - 1))
    return jnp.where(mask, jnp.take(x, jnp.where(valid, at, 0), 0, mode="clip"), jnp.zeros((), x.dtype))


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


def check_offsets(what: str, offsets: Any, total: int) -> None:
    """Raise ShapeError if offsets are at hand and do not rise from 0 to total."""
    found = at_hand(offsets)
    if found is None or found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        return
    falls = np.flatnonzero(np.diff(found) < 0)
    if falls.size:
        i = int(falls[0])
        raise ShapeError(
            f"{what}: offsets fall from {found[i]} to {found[i + 1]} at {i + 1}; each says where a sequence begins, so "
            "they never fall"
        )
    if found[0] != 0 or found[-1] != total:
        raise ShapeError(
            f"{what}: offsets run from {found[0]} to {found[-1]}, x has {total} rows; they must run from 0 to {total}"
        )


def with_offsets(what: str) -> Callable[..., None]:
    """The step before an op on (x, offsets, ...) that checks its offsets."""

    def check(x: Any, offsets: Any, *_: Any, **__: Any) -> None:
        if np.shape(x):
            check_offsets(what, offsets, np.shape(x)[0])

    return check


def on_host(value: Any, what: str) -> np.ndarray:
    """value as an ndarray. Raises CaptureError, beginning with `what`, where it has none yet."""
    return state.host(value, what) if isinstance(value, TensorState) else np.asarray(value)


def longest(what: str, offsets: Any) -> int:
    """Rows of the longest sequence, read on the host."""
    lengths = np.diff(on_host(offsets, f"{what}, whose result's size is the length of the longest sequence"))
    return int(lengths.max()) if lengths.size else 0


def given_size(what: str, name: str, size: int | None) -> int:
    """The size that an op was given. Raises ShapeError for none and for a negative one."""
    if size is None or size < 0:
        raise ShapeError(f"{what}: {name}={size}; give a number from 0 on")
    return size
