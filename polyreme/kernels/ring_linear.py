"""Linear maps between a sequence in parts and features in parts over the same devices, whose exchange is a ring.

gather_linears is an all-gather of the sequence and then products, scatter_linear a product and then a reduce-scatter,
each taken apart by the devices' parts of the sequence: while one part is multiplied, another is on its way to the next
device, so that a compiler that starts permutes early hides all of them. Source: doi:10.1145/3567955.3567959. Backward,
an input goes round once more for the weights' gradients, the other way than the sums of its own gradient.

The plain twin is linear_plain of whole arrays. With n devices along the ring each sends n - 1 times b_l s_l d numbers
forward, and as many backward for each of the two gradients of gather_linears, together for both of scatter_linear.
Shape legend: b batch, s sequence, d whole features, f features in parts; _l marks a device's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from polyreme.errors import ShapeError
from polyreme.kernels.custom_vjp import custom_vjp
from polyreme.kernels.linear import linear, rows_product

Axes = tuple[str, ...]


@dataclass(frozen=True)
class RingSplit:
    """The layout of arrays over a mesh: the axes that split batch and sequence everywhere, outermost first, and the one
    along which the ring goes, which splits the sequence of d features further, and f features."""

    mesh: Mesh
    batch: Axes
    seq: Axes
    ring: str

    def ways(self, axes: Axes) -> int:
        """Number of parts along these axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def whole(self) -> PartitionSpec:
        """Layout of [b, s, d]."""
        return PartitionSpec(self._rows, (*self.seq, self.ring), None)

    @property
    def parted(self) -> PartitionSpec:
        """Layout of [b, s, f]."""
        return PartitionSpec(self._rows, self.seq or None, self.ring)

    @property
    def _rows(self) -> Axes | None:
        # axes of one device, named here, keep a backward pass from summing over them
        idle = tuple(a for a, n in self.mesh.shape.items() if n == 1 and a not in (*self.batch, *self.seq, self.ring))
        return self.batch + idle or None

    def check(self, what: str, x: jax.Array, features: Sequence[int]) -> None:
        """Raise ShapeError, beginning with `what`, for sizes that do not divide; features: of all that are in parts."""
        parts = (*self.seq, self.ring)
        dims = [("batch", x.shape[0], self.batch), ("sequence", x.shape[1], parts)]
        for name, size, axes in (*dims, *(("features", size, (self.ring,)) for size in features)):
            if size % self.ways(axes):
                raise ShapeError(
                    f"{what}: {name} of size {size} does not divide into {self.ways(axes)} equal parts over mesh axis "
                    f"{'+'.join(axes)}"
                )


def gather_linears(x: jax.Array, weights: Sequence[jax.Array], split: RingSplit) -> tuple[jax.Array, ...]:
    """x @ weight for each weight: x [b, s, d] laid out as split.whole, [d, f] each -> [b, s, f] each, as split.parted.

    Raises ShapeError for dims that do not fit or divide.
    """
    for weight in weights:
        _check("gather_linears", x, weight)
    split.check("gather_linears", x, [weight.shape[1] for weight in weights])
    ring = _PartRing(split.ring, split.mesh.shape[split.ring])
    specs = split.whole, [PartitionSpec(None, split.ring)] * len(weights)
    local = partial(_gathered, ring)
    # check_vma off: what the parts are written into does not vary over devices
    over = jax.shard_map(
        local, mesh=split.mesh, in_specs=specs, out_specs=(split.parted,) * len(weights), check_vma=False
    )
    return over(x, list(weights))


def scatter_linear(x: jax.Array, weight: jax.Array, split: RingSplit) -> jax.Array:
    """x @ weight: x [b, s, f] laid out as split.parted, [f, d] -> [b, s, d], as split.whole.

    Sums over devices are in the dtype of the result. Raises ShapeError for dims that do not fit or divide.
    """
    _check("scatter_linear", x, weight)
    split.check("scatter_linear", x, [weight.shape[0]])
    ring = _PartRing(split.ring, split.mesh.shape[split.ring])
    specs = split.parted, PartitionSpec(split.ring, None)
    over = jax.shard_map(
        partial(_scattered, ring), mesh=split.mesh, in_specs=specs, out_specs=split.whole, check_vma=False
    )
    return over(x, weight)


def _check(what: str, x: jax.Array, weight: jax.Array) -> None:
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            f"{what}: x {list(x.shape)} and weight {list(weight.shape)} do not fit; needs [batch, seq, in] and "
            "[in, out]"
        )


@dataclass(frozen=True)
class _PartRing:
    """The devices along an axis, each of which has a part of a sequence [b, s_l, ...]."""

    axis: str
    ways: int

    def visits(self, mine: jax.Array, step: int = 1) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Each device's part and the device's number, this one's first; parts go `step` places on each time."""
        me, part = lax.axis_index(self.axis), mine
        for n in range(self.ways):
            coming = self._sent(part, step) if n < self.ways - 1 else part
            yield (me - n * step) % self.ways, part
            part = coming

    def sums(self, addend: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """This device's part of the sum over devices of addend(number of the part), which each computes for all."""
        me, total = lax.axis_index(self.axis), None
        for n in range(self.ways):
            here = addend((me - 1 - n) % self.ways)
            total = here if total is None else self._sent(total, 1) + here
        assert total is not None
        return total

    def _sent(self, part: jax.Array, step: int) -> jax.Array:
        return lax.ppermute(part, self.axis, [(i, (i + step) % self.ways) for i in range(self.ways)])

    def part(self, x: jax.Array, number: jax.Array) -> jax.Array:
        """One part of a sequence that is whole here."""
        length = x.shape[1] // self.ways
        return lax.dynamic_slice_in_dim(x, number * length, length, 1)

    def with_part(self, whole: jax.Array | None, number: jax.Array, part: jax.Array) -> jax.Array:
        """The sequence with this part in it; zeros elsewhere to begin with."""
        if whole is None:
            whole = jnp.zeros((part.shape[0], part.shape[1] * self.ways, *part.shape[2:]), part.dtype)
        return lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[1], 1)


def _weight_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """x^T dy of [b, s, a] and [b, s, c], of 16-bit numbers in 32: it is one addend of several."""
    acc = jnp.promote_types(x.dtype, jnp.float32)
    return rows_product(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), acc)


@custom_vjp(0)
def _gathered(ring: _PartRing, x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, ...]:
    """On one device: x [b_l, s_l, d] and its columns [d, f_l] of each weight -> [b_l, s, f_l] each."""
    out: list[jax.Array | None] = [None] * len(weights)
    for number, part in ring.visits(x):
        out = [ring.with_part(y, number, linear(part, weight)) for y, weight in zip(out, weights, strict=True)]
    return tuple(y for y in out if y is not None)


def _gathered_fwd(ring, x, weights):
    return _gathered(ring, x, weights), (x, weights)


def _gathered_bwd(ring, residuals, cotangents):
    x, weights = residuals

    def pulled(number: jax.Array) -> jax.Array:
        parts = [linear(ring.part(dy, number), w.T) for dy, w in zip(cotangents, weights, strict=True)]
        return sum(parts[1:], parts[0]).astype(x.dtype)

    gradients: list[Any] = [0] * len(weights)
    for number, part in ring.visits(x, -1):
        parts = [_weight_gradient(part, ring.part(dy, number)) for dy in cotangents]
        gradients = [total + more for total, more in zip(gradients, parts, strict=True)]
    return ring.sums(pulled), [g.astype(w.dtype) for g, w in zip(gradients, weights, strict=True)]


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


@custom_vjp(0)
def _scattered(ring: _PartRing, x: jax.Array, weight: jax.Array) -> jax.Array:
    """On one device: x [b_l, s, f_l] and its rows [f_l, d] of the weight -> [b_l, s_l, d]."""
    return ring.sums(lambda number: linear(ring.part(x, number), weight))


def _scattered_fwd(ring, x, weight):
    return _scattered(ring, x, weight), (x, weight)


def _scattered_bwd(ring, residuals, dy):
    x, weight = residuals
    dx: Any = None
    gradient: Any = 0
    for number, part in ring.visits(dy):
        dx = ring.with_part(dx, number, linear(part, weight.T).astype(x.dtype))
        gradient = gradient + _weight_gradient(ring.part(x, number), part)
    return dx, gradient.astype(weight.dtype)


_scattered.defvjp(_scattered_fwd, _scattered_bwd)
