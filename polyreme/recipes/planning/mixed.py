"""A configuration's plan over stages of several kinds of devices: blocks dealt out by speed, as a table and a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from polyreme.errors import ConfigError
from polyreme.planner import cluster_of_kind
from polyreme.planner.mixed import MixedStages, share_by_speed
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.estimate import shape_of
from polyreme.recipes.planning.plan import plan_words, to_yaml, training_of, with_plan
from polyreme.units import bytes_text


@dataclass(frozen=True)
class MixedAnswer:
    """A configuration whose stages get blocks by the speed of their devices, best, and in even shares."""

    config: PretrainConfig
    best: MixedStages
    even: MixedStages


def answer(config: PretrainConfig, kinds: Sequence[str]) -> MixedAnswer:
    """kinds: of devices.yaml, one for each stage of the configuration's plan. Raises ConfigError for a plan without a
    pipeline, another number of kinds than stages, and kinds that are not known."""
    plan = config.parallel_plan
    if plan.mesh.pp != len(kinds) or plan.mesh.pp == 1:
        raise ConfigError(
            f"--stages {','.join(kinds)}: {len(kinds)} kinds, and plan.pp is {plan.mesh.pp}; give a kind for each "
            "stage of a pipeline"
        )
    clusters = [cluster_of_kind(kind, plan.mesh.size // plan.mesh.pp) for kind in kinds]
    slowest = min(clusters, key=lambda cluster: min(cluster.device.flops.values()))
    training = training_of(config, slowest)
    best, even = share_by_speed(shape_of(config.dimensions), plan, clusters, config.train.global_batch, training)
    return MixedAnswer(config, best, even)


def report(shares: MixedAnswer) -> Iterator[RenderableType]:
    """The stages of the best shares, and what even shares take."""
    best, even = shares.best, shares.even
    plan = best.plan
    yield Text(f"{plan_words(plan)}, {plan.mesh.size // plan.mesh.pp} devices a stage", style="bold")
    table = Table(title="\nStages", title_justify="left", box=None)
    for name in ("stage", "devices", "items", "computes s", "GiB/device", "of"):
        table.add_column(name, justify="left" if name == "devices" else "right")
    for row in _rows(best):
        numbers = [f"{row[name]:.3g}" for name in ("computes_seconds", "memory_gib", "capacity_gib")]
        table.add_row(str(row["stage"]), row["devices"], "+".join(map(str, row["items"])), *numbers)
    yield table
    yield Text(f"\nA step takes {best.step_seconds:.3g} s, in even shares {_even(even)}.")


def to_json(shares: MixedAnswer) -> dict[str, Any]:
    """The figures of report, and the plan, as JSON values."""
    return {
        "plan": shares.best.plan.to_dict(),
        "step_seconds": shares.best.step_seconds,
        "fits": shares.best.fits,
        "stages": list(_rows(shares.best)),
        "even": {"step_seconds": shares.even.step_seconds, "fits": shares.even.fits},
    }


def run_file(shares: MixedAnswer, name: str) -> str:
    """The configuration with the best shares, for `polyreme pretrain`."""
    kinds = ", ".join(cluster.device.name for cluster in shares.best.clusters)
    heading = (
        f"{name} with blocks dealt out by `polyreme plan --stages` for stages on {kinds}\n"
        f"predicted: {shares.best.step_seconds:.3g} s a step, in even shares {_even(shares.even)}"
    )
    return to_yaml(with_plan(shares.config, shares.best.plan), heading)


def check_fits(shares: MixedAnswer) -> None:
    """Raises ConfigError where no way to deal the model out fits."""
    best = shares.best
    if not best.fits:
        stage = max(range(len(best.stages)), key=lambda at: best.stages[at].total / best.capacity_of(at))
        recompute = "" if best.plan.recompute == "full" else ", or set plan.recompute=full"
        raise ConfigError(
            f"no shares fit: stage {stage} needs {bytes_text(best.stages[stage].total)} of the "
            f"{bytes_text(best.capacity_of(stage))} that {best.clusters[stage].device.name} has for a job; raise "
            f"plan.pp, plan.mp or plan.sharding{recompute}"
        )


def _even(even: MixedStages) -> str:
    return f"{even.step_seconds:.3g} s" + ("" if even.fits else ", and does not fit")


def _rows(stages: MixedStages) -> Iterator[dict[str, Any]]:
    for stage, memory in enumerate(stages.stages):
        owned = zip(stages.plan.chunk_items, stages.plan.stage_of_chunk, strict=True)
        yield {
            "stage": stage,
            "devices": stages.clusters[stage].device.name,
            "items": [items for items, owner in owned if owner == stage],
            "computes_seconds": stages.work_of(stage),
            "memory_gib": memory.total / 2**30,
            "capacity_gib": stages.capacity_of(stage) / 2**30,
        }
