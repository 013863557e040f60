"""choose_plan: a plan for a model that was written for one device, with the reasons for it.

The model is traced, its dims are inferred, the planner searches the plans of the graph that results, and the
best one is what `prepare` makes the model ready for. docs/auto_parallel.md, section "Nothing marked".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from polyreme.autograd.recompute import Keep, recompute_forward
from polyreme.core import amp_policy, layout
from polyreme.core.engine.backend import Device
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.dims.blocks import repeated_blocks
from polyreme.distributed.auto_parallel.dims.constrain import constrain_layers, constraints
from polyreme.distributed.auto_parallel.dims.graph import graph_of
from polyreme.distributed.auto_parallel.dims.infer import Inferred, infer_dims
from polyreme.distributed.auto_parallel.dims.trace import BATCH, abstract
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.placement import apply_plan
from polyreme.distributed.recompute_calls import follows_plan
from polyreme.errors import CaptureError, ConfigError
from polyreme.hapi.input_spec import InputSpec
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Unmade
from polyreme.planner import ModelGraph, Training
from polyreme.planner.cluster import Cluster
from polyreme.planner.cluster_file import of_devices
from polyreme.planner.devices import cluster_of_kind, kind_called
from polyreme.planner.search import TIE, Ranked, Refuse, SearchResult, search
from polyreme.planner.space import Space
from polyreme.units import bytes_text

SHOWN = 5
"""Plans that a report lists."""


@dataclass
class Chosen:
    """A plan for a model, and how it came about; str() of it is the report.

    plans: the best first, with what is predicted of each. notes: what was left out of the search, or of the plan, and
    why. devices: that the plan is for.
    """

    model: Layer
    inferred: Inferred
    graph: ModelGraph
    cluster: Cluster
    training: Training
    batch: int
    plans: tuple[Ranked, ...]
    devices: Sequence[Device]
    notes: list[str] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The one to run."""
        return self.plans[0].plan

    def prepare(self) -> Plan:
        """Make the model ready to be placed: dims on its parameters, activations said at its layers, and its blocks
        run again in backward if the plan says so. Call it once. -> the plan."""
        self.notes += [f"left whole: {line}" for line in self.inferred.set_dims(self.plan)]
        if self.plan.mesh.size > 1:
            constrain_layers(self.model, constraints(self.inferred))
        if self.plan.recompute == "full" and not follows_plan(self.model):
            for run in repeated_blocks(self.inferred.traced):
                recomputed = [call for at, call in enumerate(run.calls) if self.plan.recomputes(at)]
                for call in recomputed:
                    call.layer.forward = recompute_forward(call.layer.forward, Keep("act" in self.plan.offload))
        return self.plan

    def apply(self) -> Layout:
        """prepare(), and put the plan in force: the model's parameters are moved to the devices.

        Raises ConfigError for a plan with a pipeline, whose stages an Engine runs.
        """
        if self.plan.mesh.pp > 1:
            raise ConfigError(
                f"the plan has {self.plan.mesh.pp} pipeline stages, which run task by task; give the model to an "
                "Engine with strategy='auto', or choose with space=Space(axes=('dp', 'sharding', 'mp', 'ep'))"
            )
        return apply_plan(self.prepare(), self.model, self.devices)

    def __str__(self) -> str:
        notes = ["\n".join(self.notes)] if self.notes else []
        return "\n\n".join([self._why(), self._ranking(), *notes, str(self.inferred)])

    def _why(self) -> str:
        best = self.plans[0].prediction
        memory, times = best.memory, best.times
        spent = {"arithmetic": times.compute, "done again": times.recompute, "pipeline bubble": times.bubble}
        spent |= {f"communication over {axis}": seconds for axis, seconds in times.exposed.items()}
        spent |= {"update": times.optimizer, "host memory": times.offload, "slowest device": times.slowest}
        parts = ", ".join(f"{name} {_seconds(each)}" for name, each in spent.items() if each > 0)
        memory_parts = ", ".join(
            f"{name} {bytes_text(getattr(memory, name))}"
            for name in ("parameters", "gradients", "optimizer", "activations", "workspace")
        )
        return (
            f"{self.graph.name}: {self.graph.num_parameters:,} parameters, batch {self.batch} on "
            f"{self.cluster.num_devices} x {self.cluster.device.name}\n{self.plan}\n"
            f"  step       {_seconds(best.step_seconds)} predicted: {parts}\n"
            f"  memory     {bytes_text(memory.total)} of {bytes_text(best.capacity)} a device: {memory_parts}\n"
            f"  binds      {best.binds}"
        )

    def _ranking(self) -> str:
        lines = [f"{'plans, best first':42} {'step':>8}  {'memory':>10}"]
        for each in self.plans[:SHOWN]:
            lines.append(
                f"  {words(each.plan):40} {_seconds(each.prediction.step_seconds):>8}  "
                f"{bytes_text(each.prediction.memory.total):>10}"
            )
        return "\n".join(lines)


def choose_plan(
    model: Layer,
    inputs: Sequence[Any],
    labels: Sequence[Any] = (),
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    batch: int | None = None,
    devices: Sequence[Device] | None = None,
    cluster: Cluster | None = None,
    overrides: Mapping[str, Sequence[str | None]] | None = None,
    training: Training | None = None,
    space: Space | None = None,
) -> Chosen:
    """The best plan to train a model by, by the planner's predictions; the model is not changed, see Chosen.prepare.

    inputs, labels, loss: as infer_dims takes them. batch: samples of a global batch, that of the inputs if not given.
    devices: to run on, all if not given. cluster: what they are like, what is known of this machine if not given.
    overrides: dims that go before what is inferred. training: how a step computes, read off the parameters, the
    autocast in force and the optimizer if not given. space: what may be chosen; a plain model is not split along its
    sequence (sep), and recomputes whole blocks or nothing.

    Raises ConfigError if no plan fits, with what the nearest needs, and where infer_dims does.

    >>> from polyreme.nn import Linear, ReLU, Sequential
    >>> net = Sequential(Linear(8, 32), ReLU(), Linear(32, 8))
    >>> choose_plan(net, [InputSpec([16, 8])], devices=jax.devices()[:1]).plan.mesh.size
    1
    """
    available = jax.devices() if devices is None else list(devices)
    inferred = infer_dims(model, inputs, labels, loss, overrides)
    size = batch or abstract(inputs[0], 0).shape[0]
    if not size:
        raise ConfigError("choose_plan: the inputs leave the batch open; give batch=, samples of a global batch")
    graph = graph_of(inferred)
    chosen = Chosen(
        model,
        inferred,
        graph,
        cluster or cluster_of(available),
        training or training_of(model, optimizer),
        size,
        (),
        available,
    )
    chosen.plans = _rank(chosen, space or space_of(chosen), inputs)
    return chosen


def _rank(chosen: Chosen, space: Space, inputs: Sequence[Any]) -> tuple[Ranked, ...]:
    """The plans that fit and can be run, best first. Without a pipeline a step is one batch: nothing adds gradients up.
    Of a pipeline and none that are as fast, none is simpler."""
    whole = replace(space, axes=tuple(axis for axis in space.axes if axis != "pp"), microbatches=(1,))
    plans = list(_search(chosen, whole).plans)
    staged = _staged(chosen, space, inputs) if "pp" in space.axes else []
    if not plans and not staged:
        raise ConfigError(_nothing_fits(chosen, space))
    if plans:
        enough = plans[0].prediction.step_seconds * (1 - TIE)
        faster = [each for each in staged if each.prediction.step_seconds < enough]
        return (*faster, *plans, *(each for each in staged if each not in faster))
    return tuple(staged)


def cluster_of(devices: Sequence[Device]) -> Cluster:
    """The cluster that the planner assumes: the data sheet of the devices' kind, else this machine as it was calibrated
    or declared."""
    known = kind_called(devices[0].device_kind)
    if devices[0].platform != "cpu" and known:
        return cluster_of_kind(known, len(devices))
    return of_devices(len(devices))


def training_of(model: Layer, optimizer: Any = None) -> Training:
    """How a training step of this model computes: its parameters' dtype or that of the autocast in force, and whether
    the optimizer keeps a float32 copy of parameters."""
    policy = amp_policy.active.policy
    held = [p.dtype.name for p in model.parameters()]
    name = max(held, key=held.count, default="float32")
    low = name in ("float16", "bfloat16")
    dtype = policy.low.name if policy is not None else name if low else "float32"
    master = low and getattr(optimizer, "_multi_precision", True)
    return Training(dtype=dtype, master=bool(master))


def space_of(chosen: Chosen) -> Space:
    """The choices of the planner for a plain model: axes that name one of its dims, stages if it has blocks, and
    recompute of whole blocks, or of what it recomputes by itself."""
    axes = ["dp", "pp", "sharding", "mp"]
    if any("expert" in row.dims for row in chosen.inferred.rows.values()):
        axes.append("ep")
    blocks = repeated_blocks(chosen.inferred.traced)
    recompute = ("none", "core_attn", "full_attn", "full") if follows_plan(chosen.model) else ("none", "full")
    return Space(
        axes=tuple(axes),
        recompute=recompute if blocks else ("none",),
        offload=((), ("state",)),
        expert_dispatch=("auto",),
        folding=False,
    )


def words(plan: Plan) -> str:
    """A plan in a line: its mesh, and what is out of the ordinary."""
    stages = {1: "state", 2: "gradients", 3: "parameters"}
    stage = 3 if plan.strategy.rule("param").get("*") else 2 if plan.strategy.rule("grad").get("*") else 1
    said = [str(plan.mesh)]
    said += [f"sharded {stages[stage]}"] if plan.mesh.sharding > 1 else []
    said += ["sequence parallel"] if "mp" in plan.strategy.rule("act").get("seq", ()) else []
    said += [f"{plan.schedule} of {plan.num_microbatches}"] if plan.schedule else []
    said += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    said += [f"offload {' '.join(plan.offload)}"] if plan.offload else []
    return ", ".join(said)


def _staged(chosen: Chosen, space: Space, inputs: Sequence[Any]) -> list[Ranked]:
    """Plans with a pipeline into whose stages the model can be cut; the notes say which it cannot."""
    refused: dict[int, str] = {}
    plans: list[Ranked] = []
    for ranked in _search(chosen, space, lambda plan: "" if plan.mesh.pp > 1 else "no pipeline").plans:
        count = len(ranked.plan.stage_of_chunk)
        if count not in refused:
            refused[count] = _cannot_cut(chosen.model, inputs, count)
        if not refused[count]:
            plans.append(ranked)
    chosen.notes += [f"no pipeline of {count} chunks: {why}" for count, why in refused.items() if why]
    return plans


def _cannot_cut(model: Layer, inputs: Sequence[Any], chunks: int) -> str:
    """Why a model cannot be cut into so many chunks; "" if it can."""
    unmade = any(isinstance(p._array, Unmade) for p in model.parameters())
    if isinstance(model, PipelineLayer) or hasattr(model, "pipeline_items") or unmade:
        return ""  # what has no values yet is cut when it has
    specs = [abstract(x) for x in inputs]
    given = [InputSpec([BATCH, *s.shape[1:]], s.dtype.name) for s in specs]
    try:
        with layout.using(None):
            cut_into_stages(model, tuple(given) if len(given) > 1 else given[0], chunks)
    except (ConfigError, CaptureError) as error:
        return str(error)
    return ""


def _search(chosen: Chosen, space: Space, refuse: Refuse | None = None) -> SearchResult:
    return search(chosen.graph, chosen.cluster, chosen.batch, chosen.training, space, refuse=refuse)


def _nothing_fits(chosen: Chosen, space: Space) -> str:
    """The error for a model that no plan fits."""
    search = _search(chosen, space)
    head = f"no plan trains {chosen.graph.name} with batch {chosen.batch} on {len(chosen.devices)} devices"
    if not search.too_big:
        reasons = sorted(search.refused, key=lambda reason: -search.refused[reason])[:3]
        return f"{head}: {'; '.join(reasons) or 'the search space is empty'}; change the batch or the devices"
    least = sorted(search.too_big, key=lambda each: each.prediction.memory.total)[0]
    need, have = least.prediction.memory.total, least.prediction.capacity
    return (
        f"{head}: the smallest, {words(least.plan)}, needs {bytes_text(need)} of {bytes_text(have)} a device; use "
        f"{math.ceil(need / have)} times as many devices, or a smaller batch"
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
