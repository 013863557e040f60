"""Linear maps of which something goes round in parts, where the plan in force says so: the exchange over mp
(overlap.mp), or the sum of the weight's gradient over sharding (overlap.sharding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array

from polyreme import kernels
from polyreme.core import layout
from polyreme.core.dtype import promote_floating
from polyreme.core.op import op
from polyreme.kernels.ring_gradient import GradientRing
from polyreme.kernels.ring_linear import RingSplit

_MP, _SHARDING = "mp", "sharding"
_INNER = ("heads", "kv_heads", "ffn")


@op(amp="low", method=False)
def gathered_linears(x: Array, weights: list[Array], split: Any = None) -> list[Array]:
    """x @ weight for each weight: [b, s, in], [in, out] each -> [b, s, out] each. split: the kernels.RingSplit of x in
    parts of its sequence and results in parts of their features; None for whole arrays."""
    x, *weights = promote_floating(x, *weights)
    if split is None:
        return [kernels.linear(x, weight) for weight in weights]
    return list(kernels.gather_linears(x, weights, split))


@op(amp="low", method=False)
def scattered_linear(x: Array, weight: Array, split: Any = None) -> Array:
    """x @ weight: [b, s, in], [in, out] -> [b, s, out]. split: the kernels.RingSplit of x in parts of its features and
    the result in parts of its sequence; None for whole arrays."""
    x, weight = promote_floating(x, weight)
    return kernels.linear(x, weight) if split is None else kernels.scatter_linear(x, weight, split)


@op(amp="low", method=False, in_pieces=("weight",))
def ring_gradient_linear(x: Array, weight: Array, ring: Any = None) -> Array:
    """x @ weight: [b, s, in], [in, out] -> [b, s, out]. ring: the kernels.GradientRing of a weight whose gradient is
    summed piece by piece; None for a plain product."""
    x, weight = promote_floating(x, weight)
    return kernels.linear(x, weight) if ring is None else kernels.ring_gradient_linear(x, weight, ring)


def gathering(x: Sequence[int], dims: Sequence[str | None]) -> RingSplit | None:
    """The RingSplit of x of this shape, [batch, seq, embed], times a weight of these dims, [embed, features in parts];
    None where no ring is used: no plan with overlap.mp, or sizes that do not divide and are whole everywhere."""
    return _ring_split(x) if len(dims) == 2 and dims[0] == "embed" and dims[1] in _INNER else None


def scattering(x: Sequence[int], dims: Sequence[str | None]) -> RingSplit | None:
    """The same as gathering for the opposite direction: x of this shape, [batch, seq, features in parts], comes out of
    a weight of these dims, [features, embed], in parts of its sequence."""
    return _ring_split(x) if len(dims) == 2 and dims[0] in _INNER and dims[1] == "embed" else None


def gathers_sequence(x: Sequence[int]) -> bool:
    """Whether x of this shape, [batch, seq, features], comes in parts of its sequence over mp, which blocks gather."""
    placed = layout.active.layout
    if placed is None or len(x) != 3:
        return False
    axes = _live_axes(placed)
    return axes["seq"] == (*axes["block_seq"], _MP) and placed.ways("seq", x[1]) > 1


def _ring_split(x: Sequence[int]) -> RingSplit | None:
    placed = layout.active.layout
    if placed is None or placed.plan.overlap.mp != "ring" or not gathers_sequence(x):
        return None
    axes = _live_axes(placed)
    batch = axes["batch"] if placed.ways("batch", x[0]) > 1 else ()
    return RingSplit(placed.mesh, batch, axes["block_seq"], _MP)


def summing(x: Sequence[int], weight: Any) -> GradientRing | None:
    """The GradientRing of a weight that multiplies rows of this shape, [batch, seq, in]; None where the plan in force
    asks for none, and for rows that do not divide over the devices."""
    placed, place = layout.active.layout, getattr(weight, "layouts", {}).get("sum")
    if placed is None or place is None or place.mesh != placed.mesh or len(x) != 3:
        return None
    axes = _live_axes(placed)
    if _SHARDING not in axes["batch"] or placed.ways("batch", x[0]) == 1:
        return None
    seq = axes["block_seq"] if placed.ways("block_seq", x[1]) > 1 else ()
    ins, outs = _axes_by_dim(weight.layouts.get("use", weight.layouts["param"]).spec)
    dim = next(at for at, split in enumerate(_axes_by_dim(place.spec)) if _SHARDING in split)
    return GradientRing(placed.mesh, axes["batch"], seq, (ins, outs), _SHARDING, dim)


def _live_axes(placed: layout.Layout) -> dict[str, tuple[str, ...]]:
    """The axes of several devices that split each of these dims of activations."""
    rule = placed.plan.strategy.rule("act")
    return {
        dim: tuple(axis for axis in rule.get(dim, ()) if placed.mesh.shape.get(axis, 1) > 1)
        for dim in ("batch", "seq", "block_seq")
    }


def _axes_by_dim(spec: Sequence[Any]) -> list[tuple[str, ...]]:
    """The axes that split each of the two dims of a weight."""
    entries = [*spec, None, None][:2]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
