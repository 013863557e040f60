"""A training step to be compiled and not run: what it is of, and its programs under a plan, made without memory."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from polyreme.amp import auto_cast, decorate
from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.abstract import Abstract, abstractly
from polyreme.core.layout import Layout
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.placement import apply_plan, shard_batch
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn import Layer
from polyreme.nn.clip import global_norm
from polyreme.nn.lazy import LazyGuard
from polyreme.optimizer import Optimizer
from polyreme.optimizer.lr import LRScheduler
from polyreme.recipes.build import build_model
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.training import learning_rate_schedule, make_optimizer


class Input(NamedTuple):
    """One array of a batch: its shape, the batch first, and its dtype."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Job:
    """A training step of a model.

    model: makes it; under a pipeline it has pipeline_items() and pipeline_loss(output, labels). loss: (model, arrays of
    a microbatch) -> a 0-D mean. inputs: of a whole batch. optimizer: of a model. amp_level, amp_dtype: as in autocast.
    """

    model: Callable[[], Layer]
    loss: Callable[[Any, Sequence[Tensor]], Tensor]
    inputs: tuple[Input, ...]
    optimizer: Callable[[Layer], Optimizer]
    amp_level: str = "O0"
    amp_dtype: str = "bfloat16"

    def autocast(self) -> contextlib.AbstractContextManager:
        """What the forward runs in."""
        if self.amp_level == "O0":
            return contextlib.nullcontext()
        return auto_cast(level=self.amp_level, dtype=self.amp_dtype)


def job_of(config: PretrainConfig) -> Job:
    """The step of a pretraining run."""
    rows = Input((config.train.global_batch, config.model.seq_len), np.int64)

    def optimizer(model: Any) -> Optimizer:
        schedule: LRScheduler = learning_rate_schedule(config.train)
        return make_optimizer(config.train, model, schedule)

    return Job(
        model=lambda: build_model(config.model),
        loss=lambda model, arrays: model(*arrays),
        inputs=(rows, rows),
        optimizer=optimizer,
        amp_level=config.train.amp_level,
        amp_dtype=config.train.amp_dtype,
    )


class Made:
    """A Job's model and optimizer laid out over devices by a plan, all of it without memory."""

    def __init__(self, job: Job, plan: Plan, devices: Sequence[Any]) -> None:
        self.job, self.plan = job, plan
        self._outer = layouts.active.layout, rng.default_generator.key_state()._array
        with abstractly(), LazyGuard():
            self.model = job.model()
            self.layers = in_chunks(self.model, plan) if plan.mesh.pp > 1 else None
            chunks = self.layers and self.layers.get_model_chunks()
            self.layout: Layout = apply_plan(plan, self.model, devices, chunks)
            self.optimizer = job.optimizer(self.model)
            if job.amp_level == "O2":
                decorate(self.model, self.optimizer, level="O2", dtype=job.amp_dtype, master_grad=True)
            self.optimizer.create_state()
            self._halted = Tensor(put(np.zeros((), np.bool_), self.layout.replicated()))

    def close(self) -> None:
        """Put back the plan and the random key that were in force before."""
        layouts.active.layout = self._outer[0]
        state.write(rng.default_generator.key_state(), self._outer[1])

    def compiled(self) -> Any:
        """The one program of a step without a pipeline: a jax.stages.Compiled."""
        with abstractly():
            return to_static(self._train).compiled(*[self._cut(each) for each in self.job.inputs])

    def _cut(self, given: Input) -> Tensor:
        """[microbatch, row, ...], each microbatch spread over all devices."""
        parts = self.plan.num_microbatches
        shape = (parts, given.shape[0] // parts, *given.shape[1:])
        empty = Abstract.of(shape, given.dtype, None)
        return shard_batch(self.layout, empty, None, "batch", *[None] * (len(shape) - 2))

    def _train(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """As recipes.training.Trainer trains."""
        losses = []
        generator = rng.default_generator
        for i, start in enumerate(generator.branches(self.plan.num_microbatches)):
            with self.job.autocast(), generator.starting_at(start):
                loss = self.job.loss(self.model, [x[i] for x in inputs]) / self.plan.num_microbatches
            loss.backward()
            losses.append(loss.detach())
        loss = functools.reduce(operator.add, losses)
        norm = global_norm([p.grad.detach() for p in self.model.parameters() if p.grad is not None])
        is_bad = (loss + norm).isfinite().logical_not().logical_or(self._halted)
        self.optimizer.step(skip=is_bad)
        self.optimizer.clear_grad()
        state.write(self._halted, state.read(is_bad))
        return loss, norm


def local_bytes(array: Any) -> int:
    """Bytes of an array on one of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


def devices_for(count: int, topology: str = "") -> list[Any]:
    """Devices to compile for: this process's, or, with a topology such as "v5e:4x4", a TPU slice that need not exist.

    Raises PlacementError for fewer than count devices, ImportError if libtpu is not installed.
    """
    found = list(jax.devices()) if not topology else _topology(topology)
    return found[:count]


def _topology(name: str) -> list[Any]:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
