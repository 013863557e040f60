"""Seconds of one block on one microbatch: arithmetic, what is computed again, and communication that nothing hides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polyreme.mesh import AXES, Plan
from polyreme.planner.cluster import Cluster
from polyreme.planner.collectives import Collective, collectives
from polyreme.planner.communication import LinkGroup, group
from polyreme.planner.compute import Arithmetic, Seconds, operation_seconds
from polyreme.planner.graph import BlockCost, ModelGraph
from polyreme.planner.prediction import Training
from polyreme.planner.sharding import cuts_of

RECOMPUTED = {"none": (), "core_attn": ("core_attn",), "full_attn": ("core_attn", "full_attn")}
"""Parts of a layer that a plan's recompute runs again; "full" runs all of it."""


@dataclass(slots=True)
class BlockTime:
    """Of one run of a block on one microbatch, seconds.

    forward, inputs, weights: arithmetic, as Seconds. again: forward arithmetic run a second time. products: the part of
    all of it that is limited by matrix units. exposed_forward, exposed_backward: communication that arithmetic does not
    hide, by mesh axis; what recompute sends again is in the backward.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    products: float = 0.0
    exposed_forward: Mapping[str, float] = field(default_factory=dict)
    exposed_backward: Mapping[str, float] = field(default_factory=dict)

    @property
    def backward(self) -> float:
        """Arithmetic of the backward."""
        return self.inputs + self.weights


@dataclass(frozen=True, slots=True)
class Setting:
    """What blocks are priced under; samples: of one microbatch over the whole job."""

    graph: ModelGraph
    plan: Plan
    cluster: Cluster
    training: Training
    samples: float
    arithmetic: Arithmetic

    def hides(self, axis: str) -> bool:
        """Whether communication over the axis runs beside arithmetic; devices that share units do one thing at once."""
        return axis in self.training.overlap and self.cluster.shared == 1

    @property
    def goes_round(self) -> bool:
        """Whether what mp gathers and scatters goes round in parts."""
        return self.plan.overlap.mp == "ring" and self.cluster.shared == 1


def block_time(block: BlockCost, setting: Setting) -> BlockTime:
    """Of one run of the block on one microbatch."""
    plan, cuts = setting.plan, cuts_of(setting.plan)
    weights = {value.name: value for value in block.parameters}
    for op in block.operations:
        for name in op.weights:
            if name not in weights:  # the head's, where it is the embedding's
                weights[name] = setting.graph.parameter(name)
    time, seconds_of = BlockTime(), {}
    is_again = _again(block, setting)
    made = frozenset(op.output.name for op in block.operations if op.kind in ("norm", "elementwise"))
    on = setting.arithmetic._replace(elementwise=made)
    for op in block.operations:
        seconds = operation_seconds(op, weights, cuts, setting.samples, on)
        if setting.training.idle:
            seconds = Seconds(*(each * (1 + setting.training.idle) for each in seconds))
        if setting.training.trains == "adapters":
            seconds = seconds._replace(weights=0.0)
        seconds_of[op.name] = seconds
        time.forward += seconds.forward
        time.inputs += seconds.inputs
        time.weights += seconds.weights
        repeated = seconds.forward if op.name in is_again else 0.0
        time.again += repeated
        if op.kind in ("product", "attention", "convolution"):
            time.products += sum(seconds) + repeated
    found = list(collectives(block, weights, cuts, setting.samples, setting.arithmetic.itemsize, plan))
    time.exposed_forward = _exposed(found, seconds_of, setting, is_forward=True)
    time.exposed_backward = _exposed(found, seconds_of, setting, is_forward=False)
    repeats = _exposed([c for c in found if c.beside in is_again], seconds_of, setting, is_forward=True)
    time.exposed_backward = added(time.exposed_backward, repeats)
    _hide_experts(time, setting)
    _gather_parameters(block, time, setting)
    return time


def added(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by axis, summed."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for axis, seconds in part.items():
            total[axis] += seconds
    return dict(total)


def _again(block: BlockCost, setting: Setting) -> set[str]:
    """Names of the operations that the block's backward runs again; whole layers only: embeddings and heads are kept.

    A compiler prunes those from which nothing that a gradient reads follows: a layer's last product, for one.
    """
    recompute = setting.plan.recompute
    if setting.training.cheap and block.part == "layer" and (recompute != "full" or not block.recomputes):
        return {op.name for op in block.operations if op.kind in ("norm", "elementwise")} | _parts_again(block, setting)
    return _parts_again(block, setting)


def _parts_again(block: BlockCost, setting: Setting) -> set[str]:
    recompute = setting.plan.recompute
    if block.part != "layer" or recompute == "none" or not block.recomputes:
        return set()
    parts = ("", "core_attn", "full_attn") if recompute == "full" else RECOMPUTED[recompute]
    rerun = [op for op in block.operations if op.part in parts]
    if not setting.training.prunes:
        return {op.name for op in rerun}
    wanted = {name for op in block.operations for name in op.saved}
    names: set[str] = set()
    for op in reversed(rerun):
        if op.output.name in wanted:
            names.add(op.name)
            wanted.update(value.name for value in op.inputs)
    return names


def _exposed(
    found: Iterable[Collective], seconds_of: Mapping[str, Seconds], setting: Setting, *, is_forward: bool
) -> dict[str, float]:
    exposed: dict[str, float] = defaultdict(float)
    for c in found:
        if c.is_forward is not is_forward:
            continue
        among = group(setting.cluster, setting.plan.mesh, c.axes, c.among)
        seconds = _seconds(c, among, setting)
        axis = next(axis for axis in reversed(AXES) if axis in c.axes)
        beside = seconds_of[c.beside]
        room = beside.forward if is_forward else beside.inputs + beside.weights
        is_ring = c.what == "send" or (
            axis == "mp" and setting.goes_round and c.what in ("all_gather", "reduce_scatter")
        )
        if is_ring or (setting.hides(axis) and not c.choices):  # in as many parts as devices, of which one sticks out
            seconds = max(seconds / among.size, seconds - room)
        elif not is_forward and setting.hides(f"{axis}_grad"):
            seconds = max(0.0, seconds - beside.weights)
        exposed[axis] += seconds
    return exposed


def _seconds(c: Collective, among: LinkGroup, setting: Setting) -> float:
    if c.choices and setting.training.copies == "nodes":
        return among.all_to_all(c.nbytes, c.choices, c.reach)
    return getattr(among, c.what)(c.nbytes)


def _hide_experts(time: BlockTime, setting: Setting) -> None:
    """Rows for experts sent beside the arithmetic of another microbatch, as DualPipe does (arXiv:2412.19437, section
    3.2.1): a tenth sticks out at each end of the block."""
    if not setting.hides("ep"):
        return
    for name, room in (("exposed_forward", time.forward), ("exposed_backward", time.backward + time.again)):
        exposed = dict(getattr(time, name))
        for axis in setting.plan.expert_axes:
            if axis in exposed and axis != "mp":
                hidden = min(exposed[axis] * _BESIDE, room)
                exposed[axis] -= hidden
                room -= hidden
        setattr(time, name, exposed)


_BESIDE = 0.9
"""Share of the rows' time that lies beside arithmetic, where there is enough of it."""


def _gather_parameters(block: BlockCost, time: BlockTime, setting: Setting) -> None:
    """ZeRO stage 3: parameters are gathered before they are used, forward and backward, and gradients scattered after,
    each beside the arithmetic of the block before. Source: arXiv:1910.02054, section 5.3; arXiv:2304.11277."""
    cuts = cuts_of(setting.plan)
    parts: dict[frozenset[str], list[float]] = defaultdict(list)
    for value in block.parameters:
        moved = cuts.axes("param", value.dims, value.shape) - cuts.axes("use", value.dims, value.shape)
        if moved:
            parts[moved].append(value.size / cuts.ways("use", value))
    for axes, sizes in parts.items():
        among, elements = group(setting.cluster, setting.plan.mesh, axes), sum(sizes)
        gather = among.all_gather(elements * setting.arithmetic.itemsize, len(sizes))
        scatter = among.reduce_scatter(elements * setting.training.gradients)
        axis = "sharding" if "sharding" in axes else next(iter(axes))
        forward, backward = gather, gather + scatter
        if setting.hides(axis):
            forward = max(0.0, forward - time.forward - sum(time.exposed_forward.values()))
            room = time.backward + time.again + sum(time.exposed_backward.values())
            backward = max(0.0, backward - room)
        time.exposed_forward = added(time.exposed_forward, {axis: forward})
        time.exposed_backward = added(time.exposed_backward, {axis: backward})
