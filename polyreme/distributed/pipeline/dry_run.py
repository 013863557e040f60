"""A pipeline's training step walked without memory: what it would run, and what its stages would hold meanwhile.

The table, chunks and values on their way are those of a real step, whose arrays are Abstract: nothing computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyreme.core.devices.abstract import Abstract, abstractly
from polyreme.distributed.pipeline.run import Run
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.pipeline.transfer import recorded
from polyreme.eager.tensor import Tensor
from polyreme.jit.called import Called
from polyreme.mesh.schedule import Task
from polyreme.training import Microbatch

_NAMES = {"F": "forward", "B": "backward", "W": "weights"}


class StageProgram(NamedTuple):
    """One program: its stage, what it is, how often a step calls it, and the jax.stages.Compiled."""

    stage: int
    name: str
    calls: int
    program: Any


class DryRun:
    """One step of a PipelineStep that was made inside `abstractly`, on a batch of Abstract arrays.

    programs: all that it would run, updates included. sent: what its stages would send each other, each with the stage
    that sends it. Raises what compiling the programs for the stages' devices raises.
    """

    sent: list[tuple[int, Any]]

    def __init__(self, step: PipelineStep, batch: Sequence[Microbatch]) -> None:
        self.programs: list[StageProgram] = []
        self._pipeline = step.pipeline
        # by (chunk, microbatch): bytes that wait there for a backward or for the gradients of weights
        self._waiting: dict[tuple[int, int], int] = {}
        # by chunk: bytes of gradients that are added up there, and of parameters copied from their own stage
        self._sums: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        # by stage: bytes that wait there now, and at most with what a task works in; by program, what it works in
        self._waiting_bytes: dict[int, int] = {}
        self._peaks: dict[int, int] = {}
        self._works: dict[int, int] = {}
        with abstractly():
            step.gradients(batch)  # on its first batch a chunk does not know yet whether it draws random numbers
            step.optimizer.clear_grad(set_to_zero=False)
            before = {id(call): call.calls for _, _, call in self._pipeline.programs()}
            with self._pipeline.observed(self._observe), recorded() as sent:
                step.gradients(batch)
            self.sent = [(self._stage_of(each.source), each) for each in sent]
            self.programs += [
                StageProgram(stage, name, call.calls - before[id(call)], call.compiled())
                for stage, name, call in self._pipeline.programs()
            ]
            self._compile_updates(step)
            step.optimizer.clear_grad(set_to_zero=False)

    def peak(self, stage: int) -> int:
        """Bytes of a device beside parameters, gradients and optimizer state at the stage's worst time."""
        updates = [working_bytes(c.program) for c in self.programs if c.stage == stage and c.name in _UPDATES]
        return max(self._peaks.get(stage, 0), *updates)

    def gradients(self, stage: int) -> int:
        """Bytes of gradients that are added up on a stage's device, those of other stages' parameters included."""
        return sum(self._sums[k] for k in self._chunks(stage))

    def copies(self, stage: int) -> int:
        """Bytes of other stages' parameters that are copied to a stage's device."""
        return sum(self._copies[k] for k in self._chunks(stage))

    def _chunks(self, stage: int) -> list[int]:
        return [k for k, at in enumerate(self._pipeline.stage_of_chunk) if at == stage]

    def _observe(self, stage: int, task: Task, run: Run) -> None:
        """Take down what a stage works in and holds, after each task."""
        chunk, place = run.chunks[task.chunk], (task.chunk, task.microbatch)
        works = max(self._working(call) for name, call in chunk.programs if name.endswith(_NAMES[task.kind]))
        waiting = self._waiting_bytes.get(stage, 0)
        self._peaks[stage] = max(self._peaks.get(stage, 0), waiting + works)
        done = run.waiting.get(place)
        kept = () if done is None else (*done.saved.inputs, *done.saved.residuals, *done.saved.stash)
        before, self._waiting[place] = self._waiting.get(place, 0), _total(kept)
        self._waiting_bytes[stage] = waiting + self._waiting[place] - before
        self._sums[task.chunk] = max(self._sums.get(task.chunk, 0), _total(chunk.sums))
        self._copies[task.chunk] = _total(chunk.copies)

    def _stage_of(self, devices: Collection[Any]) -> int:
        stages = self._pipeline.layout.stages
        return next(s for s, at in enumerate(stages) if set(at.mesh.devices.flat) == set(devices))

    def _working(self, call: Called) -> int:
        program = call.compiled()
        if id(program) not in self._works:
            self._works[id(program)] = working_bytes(program)
        return self._works[id(program)]

    def _compile_updates(self, step: PipelineStep) -> None:
        """Compile each stage's norms and update, for gradients laid out as the backward returns them."""
        stages = self._pipeline.layout.stages
        everywhere = stages[-1].replicated()
        count = len(step.optimizer._parameters)
        squares = [Tensor(Abstract.of((count,), jnp.float32, everywhere)) for _ in stages]
        for group, programs in step.updating().compiled(squares, step.halted):
            stage = self._stage_of(group.parameters[0]._array.sharding.device_set)
            self.programs += [StageProgram(stage, n, 1, c) for n, c in zip(_UPDATES, programs, strict=True)]


_UPDATES = ("norms", "update")


def working_bytes(program: Any) -> int:
    """Bytes a program needs beside its arguments: scratch, and results that take no argument's place."""
    found = program.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def local_bytes(array: Any) -> int:
    """Bytes of an array on one of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


def _total(arrays: Iterable[Any]) -> int:
    """Bytes of the distinct arrays on one of their devices."""
    return sum(map(local_bytes, {id(a): a for a in arrays}.values()))
