"""A plan verified by compiling: the training step's programs, compiled for the plan's devices and never run, say how
many bytes each device needs and what it sends.

Nothing is allocated: parameters and optimizer state are shapes. The devices are virtual ones of the
processor, as many as wanted, or, with libtpu installed, those of a TPU slice that need not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from polyreme.distributed.comm_report import find_collectives
from polyreme.distributed.pipeline.dry_run import local_bytes, working_bytes
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Plan
from polyreme.recipes.config import PretrainConfig, RunConfig
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.planning.job import AbstractJob, TrainingJob, devices_for, job_of


@dataclass(frozen=True)
class Exchange:
    """All collectives of one kind along some mesh axes in a step: how many run, and the bytes one device sends."""

    kind: str
    axes: tuple[str, ...] | None
    count: int
    wire_bytes: float


@dataclass(frozen=True)
class VerifiedStage:
    """Bytes of one device of a pipeline stage, as its compiled programs say.

    gradients: those that outlive a program: sums over a pipeline's microbatches; others count within `rest`, which is
    activations, inputs and scratch. seconds: spent compiling.
    """

    parameters: int
    gradients: int
    optimizer: int
    rest: int
    exchanges: tuple[Exchange, ...]
    seconds: float

    @property
    def total(self) -> int:
        """Bytes of the device in all."""
        return self.parameters + self.gradients + self.optimizer + self.rest


@dataclass(frozen=True)
class Verified:
    """The findings of compiling a step under a plan; one entry for each pipeline stage. platform: "cpu" or "tpu"."""

    platform: str
    stages: tuple[VerifiedStage, ...]

    @property
    def total(self) -> int:
        """Bytes of the fullest device."""
        return max(stage.total for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Time the compiler took."""
        return sum(stage.seconds for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Verified:
        """The findings from the values of to_dict."""
        stages = []
        for stage in values["stages"]:
            exchanges = tuple(Exchange(**{**e, "axes": _axes(e["axes"])}) for e in stage["exchanges"])
            stages.append(VerifiedStage(**{**stage, "exchanges": exchanges}))
        return cls(values["platform"], tuple(stages))


def verify(job: TrainingJob | RunConfig, plan: Plan, *, topology: str = "") -> Verified:
    """Compile a step of a job, or of a pretraining configuration, under a plan (whose num_microbatches count, not the
    configuration's) for this process's devices.

    topology: a TPU slice to compile for instead, such as "v5e:4x4". Raises PlacementError if there are fewer devices
    than the plan's mesh has: verify_apart starts a process that has as many.
    """
    job = job_of(job) if isinstance(job, RunConfig) else job
    devices = devices_for(plan, topology)
    if len(devices) < plan.mesh.size:
        raise PlacementError(
            f"plan on mesh {plan.mesh} needs {plan.mesh.size} devices to be compiled for, this process has "
            f"{len(devices)}; set CPU_NUM={plan.mesh.size} before it starts, or call verify_apart"
        )
    if plan.offload.on_disk or plan.streams:
        raise ConfigError(
            f"plan: offload {plan.offload.plain()} cannot be verified: what is on disk, and parameters, are moved "
            "outside of the programs that are compiled; verify the plan without it"
        )
    abstract = AbstractJob(job, plan, devices)
    try:
        start = time.perf_counter()
        if plan.mesh.pp > 1:
            stages = _staged(abstract, start)
        else:
            program = abstract.compiled()
            stages = (_verify_whole(abstract, program, time.perf_counter() - start),)
        return Verified(devices[0].platform, stages)
    finally:
        abstract.close()


def verify_apart(config: RunConfig, plan: Plan, *, topology: str = "") -> Verified:
    """Run verify in a process of its own that has as many virtual devices as the plan needs.

    Raises PlacementError with what that process wrote if it fails.
    """
    told = {"config": config.model_dump(mode="json"), "plan": plan.to_dict(), "topology": topology}
    env = {**os.environ, "CPU_NUM": str(1 if topology else plan.mesh.size), "JAX_PLATFORMS": "cpu"}
    if not topology:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {_NEVER_RUN}".strip()
    run = subprocess.run(
        [sys.executable, "-m", "polyreme.recipes.planning.verify"],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if run.returncode:
        raise PlacementError(f"compiling the plan on mesh {plan.mesh} failed: {_last_lines(run.stderr)}")
    return Verified.from_dict(json.loads(run.stdout.splitlines()[-1]))


_NEVER_RUN = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Machine code need not be good: buffers are assigned before it is made. A quarter of the time less."""


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-5:])


def _axes(axes: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if axes is None else tuple(axes)


def _verify_whole(abstract: AbstractJob, program: Any, seconds: float) -> VerifiedStage:
    parameters, optimizer = _state_bytes(abstract, abstract.model.parameters())
    everything = program.memory_analysis().argument_size_in_bytes + working_bytes(program)
    exchanges = exchanges_of([(program.as_text(), 1)], abstract.plan)
    return VerifiedStage(parameters, 0, optimizer, everything - parameters - optimizer, exchanges, seconds)


def _staged(abstract: AbstractJob, start: float) -> tuple[VerifiedStage, ...]:
    staged = abstract.dry_run()
    seconds = (time.perf_counter() - start) / abstract.plan.mesh.pp
    result = []
    for index, stage in enumerate(abstract.layout.stages):
        devices = set(stage.mesh.devices.flat)
        own = [p for p in abstract.model.parameters() if set(p._array.sharding.device_set) == devices]
        parameters, optimizer = _state_bytes(abstract, own)
        programs = [(c.program.as_text(), c.calls) for c in staged.programs if c.stage == index]
        rest = staged.peak(index) + staged.copies(index)
        exchanges = exchanges_of(programs, abstract.plan)
        result.append(VerifiedStage(parameters, staged.gradients(index), optimizer, rest, exchanges, seconds))
    return tuple(result)


def _state_bytes(abstract: AbstractJob, parameters: Iterable[Any]) -> tuple[int, int]:
    """Bytes on a device of parameters, and of what the optimizer keeps for them."""
    listed = list(parameters)
    names = {id(p): str(at) for at, p in enumerate(abstract.model.parameters())}
    ours = {names[id(p)] for p in listed}
    kept = abstract.optimizer.state_arrays(names)
    slots = [a for name, a in kept.items() if "/" in name and name.split("/", 1)[1] in ours]
    return sum(local_bytes(p._array) for p in listed), sum(map(local_bytes, slots))


def exchanges_of(programs: Iterable[tuple[str, int]], plan: Plan) -> tuple[Exchange, ...]:
    """The collectives of programs (optimized HLO, calls in a step) by kind and axes, the largest first."""
    mesh = replace(plan.mesh, pp=1)
    totals: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
    for text, calls in programs:
        for each in find_collectives(text, mesh):
            entry = totals[each.kind, each.axes]
            entry[0] += each.times * calls
            entry[1] += each.total_wire * calls
    made = [Exchange(kind, axes, int(count), wire) for (kind, axes), (count, wire) in totals.items()]
    return tuple(sorted(made, key=lambda e: -e.wire_bytes))


def main() -> None:
    """Read a configuration, a plan and a topology as JSON, write what verify finds as JSON."""
    told = json.loads(sys.stdin.read())
    kind = FinetuneConfig if isinstance(told["config"]["model"], str) else PretrainConfig
    config = kind.model_validate(told["config"])
    found = verify(config, Plan.from_dict(told["plan"]), topology=told["topology"])
    sys.stdout.write(json.dumps(found.to_dict()) + "\n")


if __name__ == "__main__":
    main()
