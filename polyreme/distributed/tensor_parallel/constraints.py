"""Constraints that place one dim of an activation over the `mp` axis; the other dims are left to the partitioner.

A layer that is told nothing about its input's other dims (is the first one batch or seq?) must not say
where they go: naming them whole would gather the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import layout as layouts
from polyreme.core import state
from polyreme.core.layout import Layout
from polyreme.distributed.placement import parameter_layouts, set_layouts
from polyreme.eager.host import put
from polyreme.errors import PlacementError
from polyreme.mesh.axes import nearest_multiples
from polyreme.nn.layer import Layer
from polyreme.ops.layout import relayout, sharding_constraint, whole_over

MP = "mp"


def check_group(what: str, group: Any) -> None:
    """PlacementError unless group is None or lies along `mp`: which axis splits a layer is the plan's to say."""
    if group is not None and tuple(getattr(group, "axes", ())) != (MP,):
        raise PlacementError(
            f"{what}: mp_group={group!r} does not lie along the mesh axis 'mp', the one that splits tensor-parallel "
            "layers; leave it out, or give get_hybrid_communicate_group().get_model_parallel_group()"
        )


def settle(layer: Layer) -> None:
    """Place a layer that was built while a plan is in force, as apply_plan will place the whole model.

    Under a pipeline it waits for that: which stage it belongs to is not known yet. Raises PlacementError, with the
    nearest sizes that do, for a dim that does not divide.
    """
    layout = layouts.active.layout
    if layout is None or layout.plan.mesh.pp > 1:
        return
    for name, p in layer.named_parameters():
        try:
            set_layouts(p, layout.plan, parameter_layouts(layout, p))
        except PlacementError as error:
            raise PlacementError(f"{type(layer).__name__} {name}: {error}") from None
        state.write(p, put(p._array, p.layouts["param"]))


def constrain_dim(x: Any, axis: int, dim: str | None) -> Any:
    """x with its dim `at` split as the plan in force splits the logical dim `dim` of activations; whole for None.

    x itself without a plan, where the plan splits no such dim, and for a size that does not divide.
    """
    layout = layouts.active.layout
    if layout is None:
        return x
    axes = _live(layout, (MP,) if dim is None else layout.plan.strategy.rule("act").get(dim, ()))
    if not axes or (dim is not None and x.shape[axis] % _ways(layout, axes)):
        return x
    axes = () if dim is None else axes
    return sharding_constraint(x, one_dim_layout(layout, len(x.shape), axis, axes))


def whole_over_mp(x: Any) -> Any:
    """x, the same on all devices of each `mp` group, and as the partitioner likes over the other axes."""
    found = layouts.active.layout
    if found is None or found.plan.mesh.degree(MP) == 1:
        return x
    return whole_over(x, found.mesh, MP)


def move_sequence(x: Any, what: str, before: bool, after: bool) -> Any:
    """x [seq, ...] whose seq was (before) and becomes (after) split over `mp`, or not; its gradient goes the other way.

    Over `sep` it stays as the plan has it. Raises PlacementError, with the nearest sizes that do, for a seq that does
    not divide.
    """
    layout = layouts.active.layout
    if layout is None or layout.plan.mesh.degree(MP) == 1:
        return x
    inside = _live(layout, layout.plan.strategy.rule("act").get("block_seq", ()))
    split = (*inside, MP)
    if not x.shape or x.shape[0] % _ways(layout, split):
        raise PlacementError(
            f"{what}: dim 0 of shape {list(x.shape)} does not divide into {_ways(layout, split)} equal parts over "
            f"{'+'.join(split)}; make it {nearest_multiples(x.shape[0] if x.shape else 0, _ways(layout, split))}"
        )
    ndim = len(x.shape)
    there, back = (one_dim_layout(layout, ndim, 0, split if is_split else inside) for is_split in (after, before))
    return relayout(x, there, back) if _has_gradient(x) else sharding_constraint(x, there)


def _has_gradient(x: Any) -> bool:
    return x.dtype.kind not in "iub"


def _live(layout: Layout, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if layout.plan.mesh.degree(axis) > 1)


def _ways(layout: Layout, axes: Sequence[str]) -> int:
    return math.prod(layout.plan.mesh.degree(axis) for axis in axes)


def one_dim_layout(layout: Layout, ndim: int, at: int, axes: Sequence[str]) -> NamedSharding:
    """One dim split over axes, whole for none; the others as the partitioner likes."""
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * ndim
    entries[at] = None if not axes else axes[0] if len(axes) == 1 else tuple(axes)
    return NamedSharding(layout.mesh, PartitionSpec(*entries))
