"""A training step to be compiled and not run: what it is of, and its programs under a plan, made without memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.devices.absent import slice_devices
from polyreme.core.devices.abstract import Abstract, abstractly
from polyreme.core.layout import Layout
from polyreme.distributed.pipeline.dry_run import DryRun
from polyreme.distributed.planned_step import PlannedStep, loss_of
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.kernels import select
from polyreme.mesh import Plan, nearest_divisor
from polyreme.nn import Layer
from polyreme.nn.lazy import LazyGuard
from polyreme.optimizer import Optimizer
from polyreme.optimizer.lr import LRScheduler
from polyreme.recipes.config import RunConfig
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.samples import Input, labels_of
from polyreme.recipes.training.alignment import place_teacher
from polyreme.recipes.training.trainer import learning_rate_schedule, loss_of_config, make_optimizer, step_policy
from polyreme.recipes.weights.base import load_base, make_model
from polyreme.training import Microbatch, Objective, StepPolicy


@dataclass(frozen=True)
class TrainingJob:
    """A training step of a model.

    model: makes it; under a pipeline it has pipeline_items() and pipeline_loss(output, labels). loss: (model, arrays of
    a microbatch) -> a 0-D mean. inputs: of a whole batch, under a pipeline inputs and labels. optimizer: of a model.
    policy: of the step. objective: under a pipeline, what is made small if not the model's own loss. beside: of a
    layout, puts there what the loss computes with besides the model.
    """

    model: Callable[[], Layer]
    loss: Callable[[Any, Sequence[Tensor]], Tensor]
    inputs: tuple[Input, ...]
    optimizer: Callable[[Layer], Optimizer]
    policy: StepPolicy = field(default_factory=StepPolicy)
    objective: Objective | None = None
    beside: Callable[[Layout], None] = lambda layout: None


def job_of(config: RunConfig) -> TrainingJob:
    """The step of a run."""
    loss = loss_of_config(config) or loss_of

    def teach(layout: Layout) -> None:
        if isinstance(config, FinetuneConfig) and config.teacher is not None:
            place_teacher(load_base(config.teacher), layout, loss)

    def optimizer(model: Any) -> Optimizer:
        schedule: LRScheduler = learning_rate_schedule(config.train)
        return make_optimizer(config.train, model, schedule)

    return TrainingJob(
        model=lambda: make_model(config),
        loss=lambda model, arrays: loss(model, arrays[0], labels_of(arrays[1:])),
        inputs=config.samples.arrays(config),
        optimizer=optimizer,
        policy=step_policy(config.train),
        objective=loss if isinstance(loss, Objective) else None,
        beside=teach,
    )


class AbstractJob:
    """A TrainingJob's training step laid out over devices by a plan, all of it without memory.

    A plan that compiles blocks is looked at as the one program that does the same.
    """

    layout: Layout

    job: TrainingJob
    plan: Plan
    model: Layer
    planned: PlannedStep
    optimizer: Optimizer

    def __init__(self, job: TrainingJob, plan: Plan, devices: Sequence[Any]) -> None:
        plan = replace(plan, compile="step")
        self.job, self.plan = job, plan
        self._absent = devices[0] if devices[0].platform != jax.default_backend() else None
        self._outer = layouts.active.layout, rng.default_generator.key_state()._array
        with self._abstractly(), LazyGuard():
            self.model = job.model()
            loss = self._loss if plan.mesh.pp == 1 else job.objective
            self.planned = PlannedStep(self.model, plan, job.optimizer, job.policy, devices, loss)
            job.beside(self.planned.layout)
        self.layout, self.optimizer = self.planned.layout, self.planned.optimizer

    def close(self) -> None:
        """Put back the plan and the random key that were in force before."""
        layouts.active.layout = self._outer[0]
        state.write(rng.default_generator.key_state(), self._outer[1])

    def compiled(self) -> Any:
        """The one program of a step without a pipeline: a jax.stages.Compiled."""
        with self._abstractly():
            return self.planned.step.compiled(self.batch())

    def dry_run(self) -> DryRun:
        """A step over pipeline stages, walked without memory."""
        with self._abstractly():
            batch = self.batch()
            return DryRun(self.planned.step, batch)

    def chunk_programs(self) -> dict[str, Any]:
        """The programs of a step, its update aside, under a plan that loads parameters chunk by chunk: the
        jax.stages.Compiled of each chunk's forward and backward, by name; one for chunks that are alike."""
        with self._abstractly():
            pipeline, batch = self.planned.step.pipeline, self.batch()
            pipeline.train(batch, [state.read(rng.default_generator.key_state())] * len(batch))
            return {name: call.compiled() for _, name, call in pipeline.programs()}

    def batch(self) -> list[Microbatch]:
        """A batch without memory, in microbatches; inside `abstractly`."""
        first, *rest = (Abstract.of(given.shape, given.dtype, None) for given in self.job.inputs)
        self.planned.check_rows(first.shape[0])
        return self.planned.cut(first, labels_of(rest) if self.planned.is_staged else tuple(rest))

    @contextmanager
    def _abstractly(self) -> Iterator[None]:
        """Without memory, and for the plan's devices where these are not here."""
        with abstractly(), select.compiling_for(self._absent), warnings.catch_warnings():
            # programs for devices that are not here are written to the compile cache, and cannot be read
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            yield

    def _loss(self, model: Any, first: Any, rest: Sequence[Any]) -> Tensor:
        return self.job.loss(model, [first, *rest])


def devices_for(plan: Plan, topology: str = "") -> list[Any]:
    """Devices to compile for, in the order of the plan's mesh: this process's, or, with a topology such as "v5e:4x4",
    those of a TPU slice that need not exist.

    Of a slice each pipeline stage has chips that follow each other: libtpu compiles nothing for others. Fewer than the
    mesh has where there are no more. Raises ConfigError for a topology that is no TPU slice, for stages whose number
    of chips does not divide the slice's, or if libtpu is not installed.
    """
    mesh = plan.mesh
    if not topology:
        return list(jax.devices())[: mesh.size]
    chips = slice_devices(topology)
    if len(chips) < mesh.size:
        return chips
    width = mesh.size // mesh.pp
    if len(chips) % width:
        raise ConfigError(
            f"plan on mesh {mesh}: {'a stage' if mesh.pp > 1 else 'it'} takes {width} chips, which do not divide the "
            f"{len(chips)} of {topology}; nearest is {nearest_divisor(len(chips), width)}, or a slice of another size"
        )
    if plan.stage_devices:  # the layout gives each stage the next chips by itself
        return chips[: mesh.size]
    stagewise = replace(mesh, order=("pp", *(axis for axis in mesh.order if axis != "pp")))
    return [chips[stagewise.device(**mesh.coordinates(index))] for index in range(mesh.size)]
