"""Pipelines over devices of several kinds: how much of the model each stage gets, so that none waits for another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyreme.errors import ConfigError
from polyreme.mesh import Durations, Plan
from polyreme.planner.cluster import Cluster
from polyreme.planner.graph import ModelGraph
from polyreme.planner.memory import Memory, memory
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.pipeline import pipeline_seconds
from polyreme.planner.predict import chunk_durations, stage_tails
from polyreme.planner.prediction import Training


@dataclass(frozen=True)
class MixedStages:
    """A plan whose stages lie on clusters of several kinds, and what a step of it costs.

    durations: of each chunk on its own kind. stages: memory of a device of each stage. step_seconds: of a step.
    """

    plan: Plan
    clusters: tuple[Cluster, ...]
    durations: tuple[Durations, ...]
    stages: tuple[Memory, ...]
    step_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the memory of every stage is enough."""
        return self.overflow == 0

    @property
    def overflow(self) -> float:
        """Bytes for which the stages' devices have no room, one device a stage."""
        return sum(max(0.0, memory.total - self.capacity_of(stage)) for stage, memory in enumerate(self.stages))

    def capacity_of(self, stage: int) -> float:
        """Bytes that a device of a stage can use."""
        device = self.clusters[stage].device
        return device.memory * device.usable

    def work_of(self, stage: int) -> float:
        """Seconds that a stage computes in a step."""
        owners = enumerate(self.plan.stage_of_chunk)
        each = sum(sum(self.durations[chunk][:3]) for chunk, owner in owners if owner == stage)
        return self.plan.num_microbatches * each


class _Question:
    """A model, its plan and the kinds of the stages' devices: prices ways to deal the model out."""

    def __init__(
        self, graph: ModelGraph, plan: Plan, clusters: Sequence[Cluster], batch: int, training: Training
    ) -> None:
        self.graph, self.plan, self.batch, self.training = graph, plan, batch, training
        # as if all stages were of the kind: what a chunk takes there
        self.clusters = tuple(replace(cluster, num_devices=plan.mesh.size) for cluster in clusters)

    def priced(self, items: Sequence[int]) -> MixedStages:
        plan = replace(self.plan, chunk_items=tuple(items))
        asked = (self.graph, plan)
        kinds = dict.fromkeys(self.clusters)
        of_kind = {kind: chunk_durations(*asked, kind, self.batch, self.training) for kind in kinds}
        tails = {kind: stage_tails(*asked, kind, self.batch, self.training) for kind in kinds}
        owners = [self.clusters[stage] for stage in plan.stage_of_chunk]
        sends = [of_kind[kind][0].send for kind in kinds]
        durations = tuple(of_kind[kind][at]._replace(send=max(sends)) for at, kind in enumerate(owners))
        behind = max(tails[kind][stage] for stage, kind in enumerate(self.clusters))
        stages = memory(self.graph, plan, self.batch, self.training)
        return MixedStages(plan, self.clusters, durations, stages, pipeline_seconds(plan, durations) + behind)


def share_by_speed(
    model: ModelShape | ModelGraph,
    plan: Plan,
    clusters: Sequence[Cluster],
    batch: int,
    training: Training = Training(),  # noqa: B008
) -> tuple[MixedStages, MixedStages]:
    """The plan with as many of the model's items in each chunk as make its step shortest where it fits, and the plan as
    it is: with its chunk_items, or in even shares. clusters: of each stage's kind; their number of devices is not read.

    Items go from the stage that computes longest, or has no room, to others as long as a step becomes shorter, or less
    of it does not fit: no such move makes the result better. Raises ConfigError for another number of clusters than
    stages, and as predict.

    >>> from polyreme.planner import ModelShape, cluster_of_kind
    >>> gpt = ModelShape(hidden=2048, layers=24, heads=16, seq=1024, vocab=50304, ffn=8192)
    >>> kinds = [cluster_of_kind(kind, 1) for kind in ("h100", "a100-80g")]
    >>> plan = Plan.from_degrees(pp=2, dp=4, num_microbatches=8)
    >>> best, even = share_by_speed(gpt, plan, kinds, 64, Training(cut="layers"))
    >>> best.plan.chunk_items[0] > even.plan.chunk_items[0], best.step_seconds < even.step_seconds
    (True, True)
    """
    if len(clusters) != plan.mesh.pp or plan.mesh.pp == 1:
        raise ConfigError(f"{len(clusters)} kinds for the {plan.mesh.pp} stages of mesh {plan.mesh}; give one a stage")
    graph = model.graph(training.attention) if isinstance(model, ModelShape) else model
    question = _Question(graph, plan, clusters, batch, training)
    count, total = len(plan.stage_of_chunk), graph.num_items(training.cut)
    if total < count:
        raise ConfigError(f"model {graph.name!r} has {total} layers to cut, which cannot fill {count} chunks; lower pp")
    size, left = divmod(total, count)
    before = question.priced(plan.chunk_items or [size + (chunk >= count - left) for chunk in range(count)])
    best = before
    while (better := min(_neighbours(question, best), key=_order, default=best)) and _order(better) < _order(best):
        best = better
    return best, before


def _neighbours(question: _Question, stages: MixedStages) -> list[MixedStages]:
    """Every way to move one item, or a quarter of a chunk's, away from the slowest stage, or those without room."""
    items, owners, result = stages.plan.chunk_items, stages.plan.stage_of_chunk, []
    givers = {max(range(len(stages.stages)), key=stages.work_of)}
    givers |= {stage for stage, memory in enumerate(stages.stages) if memory.total > stages.capacity_of(stage)}
    for giver, taker in itertools.permutations(range(len(items)), 2):
        if owners[giver] in givers and owners[giver] != owners[taker]:
            for moved in {1, max(1, items[giver] // 4)}:
                if items[giver] > moved:
                    changed = list(items)
                    changed[giver] -= moved
                    changed[taker] += moved
                    result.append(question.priced(changed))
    return result


def _order(stages: MixedStages) -> tuple[float, float]:
    """Less is better: first bytes that do not fit, then seconds."""
    return stages.overflow, stages.step_seconds
