"""`polyreme profile`: some steps of a configuration's run recorded, and what they tell of its plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from polyreme import flags
from polyreme.core.devices import place
from polyreme.core.engine.backend import Device
from polyreme.distributed.checkpoint.parts import everyone_says
from polyreme.distributed.pipeline.dry_run import local_bytes, working_bytes
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.pipeline.transfer import Sent, recorded
from polyreme.errors import ConfigError
from polyreme.io.epoch import waiting
from polyreme.kernels import select
from polyreme.profiler import RecordEvent, TraceResult
from polyreme.recipes.config import RunConfig
from polyreme.recipes.data.batches import Batch
from polyreme.recipes.data.loading import training_batches, training_loader
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.profiling.step_profile import DATA, Send, StepProfile, StepProgram, account
from polyreme.recipes.training.run import join_processes, load_data
from polyreme.recipes.training.traces import StepRecorder, device_name
from polyreme.recipes.training.trainer import Trainer
from polyreme.training import Microbatch

_TASKS = {"forward": "F", "backward": "B", "weights": "W"}
_WARM_UP = 2  # the first step compiles, the second may find other layouts than the first


@dataclass
class Recording:
    """Steps of a configuration that were recorded. trace: all events; profile: the account of them; sends: between
    stages in a step; reader_seconds: a step's, waited for batches; plain_seconds: of a step that was not recorded;
    memory: by device, bytes of each part of what it holds; measured_memory: the most in use, where devices tell."""

    config: RunConfig
    trace: TraceResult
    profile: StepProfile
    sends: list[Send]
    reader_seconds: float
    plain_seconds: float
    memory: dict[str, dict[str, int]]
    measured_memory: dict[str, int]


def record(config: RunConfig, folder: Path, steps: int, devices: Sequence[Device] | None = None) -> Recording | None:
    """Train some steps of a configuration as a run would, and record so many after the first.

    folder: where the data's relative paths are looked for. The host reads a step's result while the devices work on
    the next, as in a run. Nothing is saved. devices: those of the plan's mesh, all by default. In one of several
    processes it joins the others; the first gets the recording of all, the others None. Raises ConfigError for what a
    recording cannot show: pipeline stages over several processes, parameters that stream from the host, texts that a
    model writes for itself.
    """
    _check(config, steps)
    join_processes()
    if config.device is not None and config.device != "cpu":
        place.set_device(config.device)
    config.check_platform(config.device or select.backend())
    config = config.model_copy(
        update={
            "log": config.log.model_copy(update={"validation_interval": 0}),
            # as many as are read here, which what prepares the data looks at
            "train": config.train.model_copy(update={"steps": max(config.train.steps, _WARM_UP + 1 + 2 * steps)}),
        }
    )
    corpus = load_data(config, folder)
    trainer = Trainer(config, devices)
    if isinstance(config, FinetuneConfig) and config.record.prepare is not None:
        config.record.prepare.load()(config, trainer, corpus, Path(config.output))
    batches = training_batches(training_loader(config, corpus))
    batch = _train(trainer, batches, _WARM_UP)
    assert batch is not None
    programs, works = _programs(trainer, batch)
    with recorded() as sent:
        _train(trainer, batches, 1)
    begun = time.perf_counter()
    _train(trainer, batches, steps)
    plain_seconds = (time.perf_counter() - begun) / steps
    waited = waiting.seconds
    recorder = StepRecorder(steps)
    recorder.begin()
    _train(trainer, batches, steps, recorder)
    waited = waiting.seconds - waited
    trace = recorder.finish()
    measured = _measured_memory(trainer)
    if trace is None:
        return None
    places = [device_name(device) for device in trainer.layout.mesh.devices.flat]
    return Recording(
        config,
        trace,
        account(trace.events, programs, config.parallel_plan, places),
        _sends(trainer, sent),
        waited / steps,
        plain_seconds,
        _memory(trainer, works),
        measured,
    )


def _check(config: RunConfig, steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"profile: --steps {steps}; give at least 1")
    if flags.trainers_num() > 1 and config.plan.pp > 1:
        raise ConfigError(
            f"profile: plan.pp={config.plan.pp} over {flags.trainers_num()} processes: stages are recorded in one "
            "process alone; start it without a launcher, on the devices of one machine or virtual ones (device: cpu)"
        )
    if "param" in config.parallel_plan.offload:
        raise ConfigError("profile: plan.offload of param is not recorded, whose programs come and go; leave it out")
    if isinstance(config, FinetuneConfig) and config.record.roll_out is not None:
        raise ConfigError("profile: this stage writes its own texts before each step, which is not recorded; give sft")


def _train(
    trainer: Trainer, batches: Iterator[Batch], steps: int, recorder: StepRecorder | None = None
) -> Batch | None:
    """Run so many steps, reading the result of each while the next is under way; returns the last batch."""
    result = batch = None
    for number in range(steps):
        with RecordEvent(DATA):
            batch = next(batches)
        with RecordEvent("dispatch the step"):
            following = trainer.step(batch.inputs, batch.labels)
        if result is not None:
            _wait_for(result)
        result = following
        if number == steps - 1:
            _wait_for(result)
        if recorder is not None:
            recorder.end_step()
    return batch


def _wait_for(result: Any) -> None:
    with RecordEvent("wait for a result"):
        float(result.loss)
        jax.block_until_ready([p._array for p in (result.grad_norm,) if p is not None])


def _programs(trainer: Trainer, batch: Batch) -> tuple[list[StepProgram], list[tuple[tuple[str, ...], Any]]]:
    """The compiled programs of a step, and each as (devices, jax.stages.Compiled)."""
    planned, layout = trainer.planned, trainer.layout
    parts: list[Microbatch] = planned.cut(batch.inputs, batch.labels)
    if not planned.is_staged:
        compiled = planned.step.compiled(parts)
        devices = tuple(map(device_name, layout.mesh.devices.flat))
        return [StepProgram(0, "step", compiled.as_text(), devices)], [(devices, compiled)]
    step: PipelineStep = planned.step
    places = [tuple(map(device_name, stage.mesh.devices.flat)) for stage in layout.stages]
    programs, works = [], []
    for stage, name, call in step.pipeline.programs():
        compiled = call.compiled()
        chunk, _, what = name.removeprefix("chunk ").partition(", ")
        task = next((kind for word, kind in _TASKS.items() if what.endswith(word)), "")
        programs.append(StepProgram(stage, name, compiled.as_text(), places[stage], int(chunk), task))
        works.append((places[stage], compiled))
    for stage, name, compiled in _updates(step, parts, places):
        programs.append(StepProgram(stage, name, compiled.as_text(), places[stage]))
        works.append((places[stage], compiled))
    return programs, works


def _updates(
    step: PipelineStep, parts: Sequence[Microbatch], places: Sequence[tuple[str, ...]]
) -> Iterator[tuple[int, str, Any]]:
    """(stage, name, program) of the norms and updates of each stage, where the optimizer's are such programs."""
    updating = step.updating()
    if not hasattr(updating, "compiled"):
        return
    step.gradients(parts)
    for group, (norms, update) in updating.compiled(updating.squares(), step.halted if step.policy.guards else None):
        here = {device_name(device) for device in group.parameters[0]._array.sharding.device_set}
        stage = next(at for at, devices in enumerate(places) if set(devices) == here)
        yield stage, "norms", norms
        yield stage, "update", update
    step.optimizer.clear_grad(set_to_zero=False)


def _sends(trainer: Trainer, sent: Sequence[Sent]) -> list[Send]:
    stages = [set(stage.mesh.devices.flat) for stage in trainer.layout.stages]
    counted = Counter(
        (stages.index(set(each.source)), each.what, each.nbytes) for each in sent if set(each.source) in stages
    )
    return [Send(stage, what, times, nbytes) for (stage, what, nbytes), times in sorted(counted.items())]


def _memory(trainer: Trainer, works: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, dict[str, int]]:
    """By device: bytes of parameters and buffers, of optimizer state, and of what the largest program works in."""
    memory = {
        device_name(d): {"parameters": 0, "optimizer": 0, "workspace": 0} for d in trainer.layout.mesh.devices.flat
    }
    counted: set[int] = set()
    # a checkpoint leaves out what is frozen
    frozen = {f"model/{name}": tensor._array for name, tensor in trainer.model.state_dict().items()}
    for name, array in (frozen | trainer.arrays()).items():
        if not isinstance(array, jax.Array) or id(array) in counted:
            continue
        counted.add(id(array))
        part = "optimizer" if name.startswith("optimizer/") else "parameters"
        for device in array.sharding.device_set:
            if device_name(device) in memory:
                memory[device_name(device)][part] += local_bytes(array)
    for devices, compiled in works:
        for name in devices:
            memory[name]["workspace"] = max(memory[name]["workspace"], working_bytes(compiled))
    return memory


def _measured_memory(trainer: Trainer) -> dict[str, int]:
    """By device, of all processes."""
    here = [d for d in trainer.layout.mesh.devices.flat if d.process_index == jax.process_index()]
    told = {device_name(d): (d.memory_stats() or {}).get("peak_bytes_in_use") for d in here}
    return {name: int(most) for part in everyone_says(told) for name, most in part.items() if most is not None}
