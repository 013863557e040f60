"""Exchange of keys and values between devices when the plan in force splits the sequence over them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import Array
from jax import numpy as jnp
from jax.sharding import Mesh

from polyreme import kernels
from polyreme.core import layout
from polyreme.core.layout import Layout
from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels.ring_attention import Axes, Split
from polyreme.kernels.zigzag import check_zigzag
from polyreme.mesh import SegmentWay, check_heads, nearest_multiples

WHOLE = (1, 1)
"""What token_ways gives for a sequence that is not split."""
_KERNELS = {
    "ulysses": (kernels.ulysses_attention, kernels.ulysses_column_attention),
    "ring": (kernels.ring_attention, kernels.ring_column_attention),
    "gather": (kernels.gather_attention, kernels.gather_column_attention),
    "usp": (kernels.usp_attention, kernels.usp_column_attention),
}


@dataclass(frozen=True)
class SegmentExchange:
    """Attention over a split sequence: by "ulysses", "ring", "gather" or "usp".

    repeat: copies of each key head that are made first. reorders: queries, keys and values come in their own order and
    are sent into the split's zigzag first, the result back.
    """

    how: str
    split: Split
    repeat: int
    reorders: bool = False

    def attend(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """kernels.attention of arrays [b, s, h, d] that the split lays out."""
        if self.repeat > 1:
            k, v = (jnp.repeat(x, self.repeat, 2) for x in (k, v))
        kernel: Callable[..., Array] = _KERNELS[self.how][0]
        return self._home(kernel(*self._sent(q, k, v), split=self.split, **options))

    def attend_columns(
        self, q: Array, k: Array, v: Array, columns: kernels.Columns, **options: Any
    ) -> tuple[Array, Array]:
        """kernels.column_attention of arrays [b, s, h, d] that the split lays out."""
        if self.repeat > 1:
            k, v = (jnp.repeat(x, self.repeat, 2) for x in (k, v))
            columns = columns.alike()
            columns = columns if columns.bounds.shape[1] == 1 else columns.for_heads(q.shape[2])
        kernel: Callable[..., tuple[Array, Array]] = _KERNELS[self.how][1]
        out, lse = kernel(*self._sent(q, k, v), columns, split=self.split, **options)
        return self._home(out), self._home(lse, 2)

    def _sent(self, *arrays: Array) -> tuple[Array, ...]:
        if not self.reorders:
            return arrays
        return tuple(kernels.move_into_zigzag(x, self.split.mesh, self.split.spec) for x in arrays)

    def _home(self, x: Array, dim: int = 1) -> Array:
        spec = self.split.spec if dim == 1 else self.split.logsumexp_spec(self.split.heads, self.split.seq)
        return kernels.move_out_of_zigzag(x, self.split.mesh, spec, dim) if self.reorders else x


Chooser = Callable[[Sequence[int], Sequence[int]], SegmentExchange | None]
"""(shape of the queries, of the keys) -> how attention of them exchanges."""


class _ChooserInForce(threading.local):
    """The function that stands in for the plan in force in this thread."""

    def __init__(self) -> None:
        self.by: Chooser | None = None


_chosen = _ChooserInForce()


@contextmanager
def exchanging(chooser: Chooser) -> Iterator[None]:
    """Inside the block attention exchanges as chooser says, whatever plan is in force."""
    outer, _chosen.by = _chosen.by, chooser
    try:
        yield
    finally:
        _chosen.by = outer


def exchange(
    query: Sequence[int], key: Sequence[int], whole: bool = False, causal: bool = False
) -> SegmentExchange | None:
    """The SegmentExchange for attention of these shapes ([batch, s, heads, d] or [s, heads, d]); None if its sequence
    is whole.

    whole: a kernel that the partitioner cannot split; where the sequence is whole and batch or heads are not, "ulysses"
    over no axis runs it on each device's own. causal: no query sees a later key, so that a zigzag balances the devices.

    The plan's sep_attention chooses (mesh.segment says how "auto" does). Raises ShapeError for a length that does not
    divide, ConfigError where heads are to be dealt out and do not.
    """
    if _chosen.by is not None:
        return _chosen.by(query, key)
    placed = layout.active.layout
    if placed is None or len(query) not in (3, 4) or len(key) != len(query):
        return None
    seq = _live(placed, placed.plan.strategy.rule("act").get("block_seq", ()))
    if not seq and not whole:
        return None
    batch = (query[0] if len(query) == 4 else 1, key[0] if len(key) == 4 else 1)
    ways = math.prod(placed.mesh.shape[a] for a in seq)
    for what, size in (("queries", query[-3]), ("keys", key[-3])):
        if size % ways:
            raise ShapeError(
                f"attention: {size} {what} (dim 'block_seq') do not divide into {ways} equal parts over mesh axis "
                f"{'+'.join(seq)}; make it {nearest_multiples(size, ways)}"
            )
    by_batch, _, by_heads = _axes(placed, ("batch", "block_seq", "heads"), (batch[0], query[-3], query[-2]))
    by_kv_heads = _axes(placed, ("batch", "block_seq", "kv_heads"), (batch[1], key[-3], key[-2]))[2]
    # where the key heads are not split as the query heads are, each query head gets a key head of its own
    repeat = 1 if by_kv_heads == by_heads else query[-2] // key[-2]
    split = Split(placed.mesh, by_batch, seq, by_heads)
    if not seq:
        return SegmentExchange("ulysses", split, repeat) if split.ways(by_batch + by_heads) > 1 else None
    way = _way(placed, split, query, key[-2] * repeat)
    if way.how == "ulysses":
        return SegmentExchange(way.how, split, repeat)
    if way.how == "usp":
        split = _with_inner(split, way.inner)
    is_square = query[-3] == key[-3]
    if placed.zigzag > 1 and not is_square:
        raise ShapeError(
            f"attention: {query[-3]} queries in zigzag order and {key[-3]} keys, whose order is not known; set "
            "sep_order to contiguous"
        )
    reorders = placed.zigzag == 1 and placed.plan.sep_order == "zigzag" and causal and is_square
    if reorders:
        check_zigzag(query[-3], ways)
    return SegmentExchange(way.how, replace(split, zigzag=placed.zigzag > 1 or reorders), repeat, reorders)


def zigzag_ways(seq: int, heads: int, kv_heads: int) -> int:
    """The zigzag order in which a model of causal attention, whose code asks where its tokens are, is to keep rows of
    seq tokens under the plan in force: its ways, 1 for their own order.

    Raises ShapeError where the plan asks for a zigzag into which they do not divide.
    """
    placed = layout.active.layout
    if placed is None or placed.plan.sep_order == "contiguous":
        return 1
    over = exchange((1, seq, heads, 1), (1, seq, kv_heads, 1))
    if over is None or over.how == "ulysses":
        return 1
    ways = over.split.ways(over.split.seq)
    if placed.plan.sep_order == "zigzag":
        check_zigzag(seq, ways)
    return ways if seq % (2 * ways) == 0 else 1


def token_ways(shape: Sequence[int]) -> tuple[int, int]:
    """Equal parts that the batch and the sequence of an activation [batch, seq, ..., embed] are split in."""
    placed = layout.active.layout
    if placed is None or len(shape) < 2:
        return WHOLE
    return placed.ways("batch", shape[0]), placed.ways("block_seq", shape[1]) if len(shape) > 2 else 1


def join_tokens(x: Array, ways: tuple[int, int], kept: int = 1) -> Array:
    """[batch, seq, ..., embed] -> [tokens, embed], all dims but the last `kept` joined.

    Where the sequence is split the tokens of one device come to lie next to each other, so that both splits survive.
    """
    if ways[1] > 1:
        (b, s), (wb, ws) = x.shape[:2], ways
        x = jnp.swapaxes(x.reshape(wb, b // wb, ws, s // ws, *x.shape[2:]), 1, 2)
    return x.reshape(-1, *x.shape[x.ndim - kept :])


def part_tokens(x: Array, shape: Sequence[int], ways: tuple[int, int]) -> Array:
    """The inverse of join_tokens: shape is that of the dims that were joined, [batch, seq, ...]."""
    rest = x.shape[1:]
    if ways[1] == 1:
        return x.reshape(*shape, *rest)
    (b, s), (wb, ws) = shape[:2], ways
    parts = x.reshape(wb, ws, b // wb, s // ws, *shape[2:], *rest)
    return jnp.swapaxes(parts, 1, 2).reshape(*shape, *rest)


def _way(placed: Layout, split: Split, query: Sequence[int], kv_heads: int) -> SegmentWay:
    ways, among = split.ways(split.seq), split.ways(split.heads)
    heads, kv_heads = query[-2] // among, kv_heads // among
    way = placed.plan.segment.way(ways, query[-3] // ways, heads, kv_heads, _near(placed.mesh, split.seq))
    check_heads(way, ways, heads, kv_heads, "+".join(split.seq))
    return way


def _near(mesh: Mesh, seq: Axes) -> int:
    """Neighbours along these axes, the last fastest, that always share a process; they divide the devices there."""
    order = [mesh.axis_names.index(axis) for axis in mesh.axis_names if axis not in seq]
    order += [mesh.axis_names.index(axis) for axis in seq]
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    ways = math.prod(mesh.shape[axis] for axis in seq)
    rows = processes.transpose(order).reshape(-1, ways)
    return max(n for n in range(1, ways + 1) if ways % n == 0 and not np.ptp(rows.reshape(-1, n), axis=1).any())


def _with_inner(split: Split, inner: int) -> Split:
    """split over a mesh of axes such that the last of its seq have `inner` devices: the axis that they share with
    others is cut in two."""
    mesh, seq, dealt, left = split.mesh, [], [], inner
    shape = dict(mesh.shape)
    for axis in reversed(split.seq):
        size = shape[axis]
        if left % size == 0:
            dealt.insert(0, axis)
            left //= size
        elif left == 1:
            seq.insert(0, axis)
        elif size % left:
            raise ConfigError(
                f"plan: sep_attention 'usp' over {inner} of the devices of {dict(mesh.shape)} along "
                f"{'+'.join(split.seq)}: {left} does not divide {axis}; choose 'ring', or give ulysses_degree"
            )
        else:
            outer, near = f"{axis}_ring", f"{axis}_ulysses"
            cut = {axis: {axis: size} for axis, size in shape.items()} | {axis: {outer: size // left, near: left}}
            shape = {name: size for part in cut.values() for name, size in part.items()}
            seq.insert(0, outer)
            dealt.insert(0, near)
            left = 1
    mesh = Mesh(mesh.devices.reshape(list(shape.values())), tuple(shape))
    return replace(split, mesh=mesh, seq=(*seq, *dealt), inner=tuple(dealt))


def _live(placed: Layout, axes: Sequence[str]) -> Axes:
    return tuple(a for a in axes if placed.mesh.shape.get(a, 1) > 1)


def _axes(placed: Layout, dims: Sequence[str], shape: Sequence[int]) -> list[Axes]:
    """The mesh axes that split each dim of an activation."""
    spec = placed.activation(dims, shape).spec
    entries = [*spec, *[None] * (len(dims) - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
