"""A mask of attention that is kept as a few row numbers for each key, and what it says of blocks of queries and keys.

Shape legend: b batch, m mask heads (1, or as many as there are key or query heads), s queries, t keys, i hidden
intervals. Source: arXiv:2410.01359.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
"""Queries, and keys, in one block of Columns.blocks."""
NEVER = jnp.iinfo(jnp.int32).max
PARTIAL, FULL, HIDDEN = 0, 1, 2


class Columns(NamedTuple):
    """The queries that see each key.

    bounds: int32 [b, m, t, 2 + 2 i]. Key j is seen by the rows from bounds[..., j, 0] up to, not with,
    bounds[..., j, 1], but for those of the intervals [bounds[..., j, 2], bounds[..., j, 3]), ... blocks: None, or bool
    [b, m, s / BLOCK, t / BLOCK], rounded up: a block that is False is hidden besides. b may be 1 in either.
    """

    bounds: jax.Array
    blocks: jax.Array | None = None

    def for_heads(self, heads: int) -> "Columns":
        """The same mask with `heads` mask heads, a multiple of those it has."""

        def repeat(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, heads // x.shape[1], 1)

        return Columns(repeat(self.bounds), None if self.blocks is None else repeat(self.blocks))

    def alike(self) -> "Columns":
        """The same mask with as many heads in both parts."""
        return self.for_heads(max(x.shape[1] for x in self if x is not None))


def seen(columns: Columns, rows: int, start=0, keys: int | None = None) -> jax.Array:
    """The mask of `rows` queries from start on and the first `keys` keys, as bool [b, m, rows, keys]."""
    bounds = columns.bounds[:, :, :keys]
    row = start + jnp.arange(rows, dtype=jnp.int32)
    shown = seen_between(bounds, row)
    if columns.blocks is None:
        return shown
    key = jnp.arange(bounds.shape[2], dtype=jnp.int32)
    return shown & columns.blocks[:, :, row // BLOCK][..., key // BLOCK]


def part_of(columns: Columns, row, key, rows: int, keys: int) -> Columns:
    """The mask of `rows` queries and `keys` keys from these places on, rows counted from there."""
    bounds = lax.dynamic_slice_in_dim(columns.bounds, key, keys, 2) - row
    blocks = columns.blocks
    if blocks is not None:
        blocks = lax.dynamic_slice_in_dim(blocks, row // BLOCK, rows // BLOCK, 2)
        blocks = lax.dynamic_slice_in_dim(blocks, key // BLOCK, keys // BLOCK, 3)
    return Columns(bounds, blocks)


def seen_between(bounds, row) -> jax.Array:
    """bounds [..., t, 2 + 2 i], row numbers [r] -> bool [..., r, t]."""
    row = row[:, None]
    first, last, *hidden = (bounds[..., None, :, c] for c in range(bounds.shape[-1]))
    shown = (row >= first) & (row < last)
    for begin, end in zip(hidden[::2], hidden[1::2], strict=True):
        shown &= (row < begin) | (row >= end)
    return shown


def without_empty(bounds) -> jax.Array:
    """The same mask, its empty ranges written so that they do not widen the extremes of a block."""
    pairs = bounds.reshape(*bounds.shape[:-1], -1, 2)
    empty = pairs[..., :1] >= pairs[..., 1:]
    return jnp.where(empty, jnp.array([NEVER, 0], jnp.int32), pairs).reshape(bounds.shape)


def kinds(least, most, start, stop) -> jax.Array:
    """PARTIAL, FULL or HIDDEN for the rows [start, stop) and blocks of keys, from the extremes of their bounds.

    least, most: [..., 2 + 2 i], over the keys of a block, of bounds that went through without_empty.
    """
    hidden = (least[..., 0] >= stop) | (most[..., 1] <= start)
    full = (most[..., 0] <= start) & (least[..., 1] >= stop)
    for c in range(2, least.shape[-1], 2):
        hidden |= (most[..., c] <= start) & (least[..., c + 1] >= stop)
        full &= (most[..., c + 1] <= start) | (least[..., c] >= stop)
    return jnp.where(hidden, HIDDEN, jnp.where(full, FULL, PARTIAL))
