"""A linear map of a weight kept in pieces, whose gradient is summed over devices in a ring as its parts are computed.

Parameter sharding (arXiv:1910.02054, section 7) sums a weight's gradient over the devices that have other rows, of
which each keeps a piece. Here each device computes the piece that it will send next while another is on its way: a
reduce-scatter taken apart, so that a compiler that starts permutes early hides it behind the products that make it.
Source of such products: doi:10.1145/3567955.3567959.

The plain twin is linear_plain of a whole weight. With n devices along the ring each sends n - 1 pieces of the gradient,
in the weight's dtype. Shape legend: b batch, s sequence, i features in, o features out; _l marks a device's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.errors import ShapeError
from polyreme.kernels.custom_vjp import custom_vjp
from polyreme.kernels.linear import linear, rows_product

Axes = tuple[str, ...]


@dataclass(frozen=True)
class GradientRing:
    """The layout of a map's arrays over a mesh: the axes that split batch, sequence, features in and features out, in
    rows and in the weight as it is multiplied; and the axis that keeps the weight in pieces, along which the ring goes.

    dim: of the weight, the one that the pieces are of; where another axis splits it too, that one is outermost.
    """

    mesh: Mesh
    batch: Axes
    seq: Axes
    features: tuple[Axes, Axes]
    axis: str
    dim: int

    @property
    def whole(self) -> NamedSharding:
        """Layout of the weight while it is multiplied."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in self.features)))

    @property
    def ways(self) -> int:
        """Number of pieces."""
        return self.mesh.shape[self.axis]

    @property
    def others(self) -> Axes:
        """The axes beside the ring's over whose devices the gradient is a sum."""
        return tuple(axis for axis in (*self.batch, *self.seq) if axis != self.axis)

    def rows(self, features: int) -> PartitionSpec:
        """Layout of [b, s, i] (features 0) or [b, s, o] (1)."""
        return PartitionSpec(self.batch or None, self.seq or None, self.features[features] or None)

    @property
    def addends(self) -> PartitionSpec:
        """Layout of [others, i, o], the gradient in pieces, of which each device along the others has an addend."""
        dims = [(*axes, *((self.axis,) if at == self.dim else ())) or None for at, axes in enumerate(self.features)]
        return PartitionSpec(self.others or None, *dims)


def ring_gradient_linear(x: jax.Array, weight: jax.Array, ring: GradientRing) -> jax.Array:
    """x @ weight: [b, s, i], [i, o] in pieces -> [b, s, o].

    Raises ShapeError for dims that do not fit.
    """
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            f"ring_gradient_linear: x {list(x.shape)} and weight {list(weight.shape)} do not fit; needs "
            "[batch, seq, in] and [in, out]"
        )
    return _linear(ring, x, weight)


@custom_vjp(0)
def _linear(ring: GradientRing, x: jax.Array, weight: jax.Array) -> jax.Array:
    return linear(x, lax.with_sharding_constraint(weight, ring.whole))


def _linear_fwd(ring: GradientRing, x: jax.Array, weight: jax.Array) -> Any:
    return _linear(ring, x, weight), (x, weight)


def _linear_bwd(ring: GradientRing, residuals: Any, dy: jax.Array) -> Any:
    x, weight = residuals
    whole = lax.with_sharding_constraint(weight, ring.whole)
    # check_vma off: a part is sliced by the device's own number
    over = jax.shard_map(
        partial(_summed, ring), mesh=ring.mesh, in_specs=(ring.rows(0), ring.rows(1)), out_specs=ring.addends,
        check_vma=False,
    )  # fmt: skip
    gradient = over(x, dy).sum(0, dtype=weight.dtype)
    return linear(dy, whole.T).astype(x.dtype), gradient


_linear.defvjp(_linear_fwd, _linear_bwd)


def _summed(ring: GradientRing, x: jax.Array, dy: jax.Array) -> jax.Array:
    """On one device: [b_l, s_l, i_l], [b_l, s_l, o_l] -> [1, i_l, o_l], its piece of the sum along the ring."""
    rows = [x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])]
    me, total = lax.axis_index(ring.axis), None
    acc = jnp.promote_types(x.dtype, jnp.float32)
    size = rows[ring.dim].shape[-1] // ring.ways
    for n in range(ring.ways):
        # what this device adds last is its own piece
        number = (me - 1 - n) % ring.ways
        parts = list(rows)
        parts[ring.dim] = lax.dynamic_slice_in_dim(rows[ring.dim], number * size, size, 1)
        here = rows_product(parts[0], parts[1], acc)
        if total is not None:
            here += lax.ppermute(total, ring.axis, [(i, (i + 1) % ring.ways) for i in range(ring.ways)]).astype(acc)
        total = here.astype(x.dtype)
    assert total is not None
    return total[None]
