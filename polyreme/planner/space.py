"""Which plans there are for a model on a cluster: meshes that divide, then how a step is cut, then what is kept.

What divides is asked of Plan and Strategy themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from polyreme.errors import PlacementError
from polyreme.mesh import Plan
from polyreme.mesh.axes import AXES
from polyreme.mesh.plan import EXPERT_DISPATCH
from polyreme.mesh.schedules import SCHEDULES
from polyreme.planner.cluster import Cluster
from polyreme.planner.graph import ModelGraph, PipelineCut

_DIM_OF = {"mp": ("heads", "kv_heads", "ffn", "inner", "vocab", "expert_ffn"), "ep": ("expert",), "sep": ("block_seq",)}
_MOST_CHUNKS = 8  # of a stage; each further one sends more and saves little bubble
_MOST_ROWS = 16  # of a pipeline's microbatch; larger ones lengthen the bubble and no longer the products


@dataclass(frozen=True, slots=True)
class Space:
    """What a search may choose. axes: mesh axes of degree above 1; microbatches: their numbers, () for any that divide
    the batch; recompute_shares: of the blocks that recompute, besides all of them; sequence_parallel: whether mp splits
    the residual stream; the others as in Plan. Experts are split over ep and, with folding, over sep and mp too."""

    axes: tuple[str, ...] = AXES
    sharding_stages: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = field(default_factory=lambda: _search())
    recompute: tuple[str, ...] = ("none", "core_attn", "full_attn", "full")
    recompute_shares: tuple[float, ...] = ()
    offload: tuple[tuple[str, ...], ...] = ((), ("state",), ("state", "act"))
    microbatches: tuple[int, ...] = ()
    sequence_parallel: tuple[bool, ...] = (False, True)
    expert_dispatch: tuple[str, ...] = ("gather", "padded", "ragged", "balanced")
    folding: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a plan that says which device holds what."""

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    sep: int = 1
    mp: int = 1
    ep: int = 1
    sharding_stage: int = 1
    sequence_parallel: bool = False
    expert_axes: tuple[str, ...] = ("ep",)

    @property
    def batch_ways(self) -> int:
        """Parts that a microbatch is split into."""
        return self.dp * self.sharding * self.ep

    def plan(self, **rest: Any) -> Plan:
        """A Plan of this shape; plans of a shape share their mesh and strategy, by which predict remembers."""
        return replace(_base(self), **rest)


@lru_cache(maxsize=4096)
def _base(shape: Shape) -> Plan:
    return Plan.from_degrees(**{f.name: getattr(shape, f.name) for f in fields(shape)})


@dataclass(slots=True)
class Refused:
    """Meshes that cannot be, by reason, with how many plans' worth of meshes each reason refuses."""

    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        """Count one more."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


def shapes(
    graph: ModelGraph, cluster: Cluster, batch: int, space: Space, refused: Refused, cut: PipelineCut = "items"
) -> Iterator[Shape]:
    """Every shape that uses all devices and that the model and the batch divide into; why others do not, in refused.

    mp stays inside a node (the nearest link). Of the degrees of sharding, those are taken that span all replicas, a
    node, or nothing between: one in between costs as much memory as time.
    """
    for mp, sep, ep, pp in _degrees(graph, cluster, space):
        orders = space.sequence_parallel if mp > 1 and _names(graph, ("seq",)) else (False,)
        for is_sequence_parallel, folded in itertools.product(orders, _foldings(graph, space, sep, mp)):
            inner = Shape(1, pp, 1, sep, mp, ep, 1, is_sequence_parallel, folded)
            reason = _misfit(graph, replace(inner, pp=1)) or _too_many_stages(graph, pp, cut)
            if reason:
                refused.add(reason)
                continue
            replicas = cluster.num_devices // (mp * sep * ep * pp)
            if batch % (replicas * ep):
                refused.add(f"batch {batch} does not divide over {replicas * ep} replicas")
                continue
            yield from _split_replicas(inner, replicas, cluster, space)


def cuts(
    shape: Shape, graph: ModelGraph, batch: int, space: Space, cut: PipelineCut = "items"
) -> list[dict[str, object]]:
    """How a step may be cut: num_microbatches, schedule and virtual_stages, as arguments of Shape.plan.

    Without a pipeline fewer microbatches are better while they fit, so they come in rising number.
    """
    rows = batch // shape.batch_ways
    counts = [m for m in divisors(rows) if not space.microbatches or m in space.microbatches]
    if shape.pp == 1:
        return _with_dispatch(shape, graph, space, [{"num_microbatches": m} for m in counts])
    counts = [m for m in counts if rows // m <= _MOST_ROWS or m == max(counts)]
    items = graph.num_items(cut)
    result: list[dict[str, object]] = []
    for m, schedule in itertools.product(counts, space.schedules):
        kind = SCHEDULES[schedule]
        for virtual in range(kind.least_virtual, int(min(kind.most_virtual, _MOST_CHUNKS)) + 1):
            # chunks as even as the layers allow
            if virtual * shape.pp > items or (kind.in_groups and m % shape.pp):
                continue
            result.append({"num_microbatches": m, "schedule": schedule, "virtual_stages": virtual})
    return _with_dispatch(shape, graph, space, result)


def _with_dispatch(
    shape: Shape, graph: ModelGraph, space: Space, ways: list[dict[str, object]]
) -> list[dict[str, object]]:
    if not shape.plan().expert_axes:
        return ways
    # experts that choose tokens compute equally many by themselves, and refuse what levels that
    is_even = _is_even(graph)
    dispatch = [how for how in space.expert_dispatch if how != "balanced" or not is_even]
    return [{**way, "expert_dispatch": how} for how in dispatch for way in ways]


def _foldings(graph: ModelGraph, space: Space, sep: int, mp: int) -> list[tuple[str, ...]]:
    """The axes that may split experts: ep, and with it sep, whose parts of a sequence then have experts of their own,
    and mp, which then leaves their widths whole."""
    if not space.folding or "ep" not in space.axes or not _names(graph, ("expert",)):
        return [("ep",)]
    others = [axis for axis, degree in (("sep", sep), ("mp", mp)) if degree > 1]
    return [(*among, "ep") for count in range(len(others) + 1) for among in itertools.combinations(others, count)]


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, rising.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def simplicity(plan: Plan) -> tuple[Any, ...]:
    """A key by which the plainer of two plans is the smaller: fewer things cut, then fewer other features.

    dp and sharding cut the same thing, the batch: a sharded state is no less plain than one that every device holds.
    """
    mesh = plan.mesh
    return (
        sum(degree > 1 for degree in (mesh.dp * mesh.sharding, mesh.pp, mesh.sep, mesh.mp, mesh.ep)),
        len(plan.offload),
        ("none", "core_attn", "full_attn", "full").index(plan.recompute),
        plan.recompute_share != 1,
        _by_simplicity().index(plan.schedule),
        plan.virtual_stages,
        len(plan.strategy.rule("act")),
        plan.num_microbatches,
        EXPERT_DISPATCH.index(plan.expert_dispatch),
    )


def _search() -> tuple[str, ...]:
    return tuple(name for name, kind in SCHEDULES.items() if kind.is_searched)


def _by_simplicity() -> list[str | None]:
    """No pipeline, then the schedules in the order of their table, those that are not searched last."""
    names: list[str] = sorted(SCHEDULES, key=lambda name: not SCHEDULES[name].is_searched)
    return [None, *names]


def _degrees(graph: ModelGraph, cluster: Cluster, space: Space) -> Iterator[tuple[int, int, int, int]]:
    near = cluster.links[0].devices if cluster.links else 1
    most = {"mp": near, "sep": near}
    choices = {
        axis: [
            n
            for n in divisors(cluster.num_devices)
            if n == 1 or (axis in space.axes and n <= most.get(axis, n) and _names(graph, _DIM_OF[axis]))
        ]
        for axis in ("mp", "sep", "ep")
    }
    stages = divisors(cluster.num_devices) if "pp" in space.axes else (1,)
    for mp, sep, ep, pp in itertools.product(choices["mp"], choices["sep"], choices["ep"], stages):
        if cluster.num_devices % (mp * sep * ep * pp) == 0:
            yield mp, sep, ep, pp


def _split_replicas(inner: Shape, replicas: int, cluster: Cluster, space: Space) -> Iterator[Shape]:
    if replicas == 1 or "dp" in space.axes:
        yield replace(inner, dp=replicas)
    if replicas == 1 or "sharding" not in space.axes:
        return
    node = cluster.links[0].devices if cluster.links else 1
    inside = node // (inner.mp * inner.sep * inner.ep)
    degrees = {n for n in divisors(replicas) if n > 1 and (n in (replicas, inside) or replicas <= 8)}
    if "dp" not in space.axes:
        degrees = {replicas}
    for sharding, stage in itertools.product(sorted(degrees), space.sharding_stages):
        yield replace(inner, dp=replicas // sharding, sharding=sharding, sharding_stage=stage)


@lru_cache(maxsize=64)
def _dims(graph: ModelGraph) -> frozenset[str | None]:
    values = [v for b in graph.blocks for op in b.operations for v in (*op.inputs, op.output)]
    values += [p for b in graph.blocks for p in b.parameters]
    return frozenset(dim for value in values for dim in value.dims)


@lru_cache(maxsize=64)
def _is_even(graph: ModelGraph) -> bool:
    return any(op.output.is_even for block in graph.blocks for op in block.operations)


def _names(graph: ModelGraph, dims: tuple[str, ...]) -> bool:
    return not _dims(graph).isdisjoint(dims)


@lru_cache(maxsize=4096)
def _misfit(graph: ModelGraph, inner: Shape) -> str:
    """Why the model's tensors do not divide over the degrees of a shape without stages; "" if they do."""
    plan = inner.plan()
    try:
        for block in graph.blocks:
            for p in block.parameters:
                plan.strategy.param_spec(p.dims, p.shape, plan.mesh)
            for value in dict.fromkeys(v for op in block.operations for v in (*op.inputs, op.output)):
                # a sample is no dim to divide: the batch is checked as a whole; rows of experts have left their places
                free = ("batch", "seq", "block_seq") if "expert" in value.dims else ("batch",)
                dims = tuple(None if dim in free else dim for dim in value.dims)
                plan.strategy.act_spec(dims, value.shape, plan.mesh)
    except PlacementError as error:
        return _in_short(str(error))
    return ""


def _in_short(error: str) -> str:
    """Which dim does not divide over which axes, the same of all meshes that differ elsewhere: without the tensor's
    other dims, and without advice, whose degrees may be none of the cluster's.

    >>> _in_short("dim 'heads' of size 6 (dims ('heads',), shape (6,)) does not divide into 4 equal parts; make it 8")
    "dim 'heads' of size 6 does not divide into 4 equal parts"
    """
    dim, _, rest = error.partition("; ")[0].partition(" (dims ")
    return dim + rest[rest.rfind(" does not divide") :]


@lru_cache(maxsize=4096)
def _too_many_stages(graph: ModelGraph, pp: int, cut: PipelineCut) -> str:
    items = graph.num_items(cut)
    if pp <= items:
        return ""
    counted = ", embedding and head counted" if cut == "items" else ""
    return f"pp{pp} has more stages than the model has layers ({items}{counted})"
