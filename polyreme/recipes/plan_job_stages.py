"""A pipeline's programs, compiled and not run: each chunk's forward and backward, each stage's update; and what a stage
holds while its schedule's table is worked through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyreme.core.abstract import Abstract, abstractly
from polyreme.core.layout import Layout
from polyreme.distributed.pipeline.transfer import join, place
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.distributed.placement import parameter_layouts
from polyreme.eager.tensor import Tensor
from polyreme.jit.split import Flow, Kept, SplitProgram
from polyreme.mesh.schedule import Schedule
from polyreme.recipes.plan_job import Made, local_bytes


class Compiled(NamedTuple):
    """One program: its stage, what it is, how often a step calls it, and the jax.stages.Compiled."""

    stage: int
    name: str
    calls: int
    program: Any


class Task(NamedTuple):
    """One task of a chunk: bytes that it works in beside its arguments (what it leaves included), bytes that are held
    from when it ran ("F": what backward needs, "B": what is left for the weights), per microbatch."""

    works_in: int
    leaves: int


class StagedPrograms:
    """Every program of a step over pipeline stages."""

    def __init__(self, made: Made) -> None:
        self.made, self.plan = made, made.plan
        self.schedule: Schedule = made.plan.make_schedule()
        self.programs: list[Compiled] = []
        self.tasks: dict[tuple[str, int], Task] = {}
        # by chunk: bytes of gradients that are added up there, and of parameters copied from their own stage
        self.sums: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self._gradients: dict[int, tuple[Any, Any]] = {}
        with abstractly():
            self._walk()
            self._updates()

    def _walk(self) -> None:
        """One microbatch through all chunks and back."""
        chunks = self._chunks()
        stages = [self.made.layout.stages[s] for s in self.plan.stage_of_chunk]
        inputs, labels = (self._rows(each) for each in self.made.job.inputs)
        flow, went = place(inputs, stages[0]), []
        for k, (run, stage) in enumerate(zip(chunks, stages, strict=True)):
            given = len(flow.arrays)
            if k == len(chunks) - 1:
                flow = join(flow, place(labels, stage))
            program, read, outs, kept = self._forward(k, run, flow, stage)
            went.append((program, read, kept, given))
            flow = outs
            if k < len(chunks) - 1:
                flow = outs.with_arrays([_moved(a, stages[k + 1]) for a in outs.arrays])
        cotangents: list[Any] = [Abstract.of(a.shape, a.dtype, stages[-1].replicated()) for a in flow.arrays]
        for k in reversed(range(len(chunks))):
            program, read, kept, given = went[k]
            found = self._backward(k, program, read, kept, cotangents)[:given]
            cotangents = [None if a is None else _moved(a, stages[k - 1]) for a in found]

    def _chunks(self) -> list[Any]:
        layers: Any = self.made.planned.layers
        *first, last = layers.get_model_chunks()
        loss: Any = self.made.model

        def with_loss(pair: tuple[Any, Any]) -> Any:
            return [loss.pipeline_loss(last(pair[0]), pair[1])]

        return [*first, with_loss]

    def _rows(self, given: Any) -> Abstract:
        shape = (given.shape[0] // self.plan.num_microbatches, *given.shape[1:])
        return Abstract.of(shape, given.dtype, None)

    def _forward(self, k: int, run: Any, flow: Flow, stage: Layout) -> tuple[SplitProgram, list[Any], Flow, Kept]:
        with self.made.job.policy.precision.autocast():
            program = SplitProgram(run, flow, stage, backward=True, cut=self.schedule.split_backward)
        foreign: list[Any] = [t for t in program.read if _is_foreign(t, stage)]
        program.moved = [(p, parameter_layouts(stage, p)) for p in foreign]
        read = [_here(t, stage) for t in program.read]
        self.copies[k] = sum(local_bytes(_here(t, stage)) for t in foreign)
        key = Abstract.of((2,), np.uint32, stage.replicated())
        outs, _, kept = program.forward(read, key, flow.arrays)
        held = sum(map(local_bytes, _distinct([*kept.inputs, *kept.residuals])))
        self._note("F", k, "forward", program, held)
        return program, read, outs, kept

    def _backward(self, k: int, program: SplitProgram, read: list[Any], kept: Kept, cotangents: list[Any]) -> list[Any]:
        sums = [] if self.schedule.split_backward else program.zeros(read, kept, cotangents)
        found, sums, kept = program.backward(read, kept, cotangents, sums)
        stash = sum(map(local_bytes, _distinct(kept.stash)))
        self._note("B", k, "backward", program, stash)
        if self.schedule.split_backward:
            sums = program.weights(read, kept, program.zeros(read, kept, None))
            self._note("W", k, "weights", program, 0)
        self.sums[k] = sum(map(local_bytes, sums))
        for p, array in zip(program.leaves, sums, strict=True):
            self._gradients.setdefault(id(p), (p, array))
        return found

    def _note(self, kind: str, k: int, name: str, program: SplitProgram, leaves: int) -> None:
        found = next(call for what, call in program.programs if what == name).compiled()
        stage = self.plan.stage_of_chunk[k]
        self.programs.append(Compiled(stage, f"chunk {k}, {name}", self.plan.num_microbatches, found))
        self.tasks[kind, k] = Task(works_in(found), leaves)

    def _updates(self) -> None:
        """Each stage's norms and update, for gradients laid out as the backward gives them."""
        for p, array in self._gradients.values():
            home = p.layouts["grad"]
            p._grad = Tensor(Abstract.of(array.shape, array.dtype, home))
        update = StagedUpdate(self.made.optimizer)
        everywhere = self.made.layout.stages[-1].replicated()
        count = len(list(self.made.model.parameters()))
        squares = [Tensor(Abstract.of((count,), jnp.float32, everywhere)) for _ in self.made.layout.stages]
        skip = Tensor(Abstract.of((), np.bool_, everywhere))
        for group, found in update.compiled(squares, skip):
            stage = self._stage_of(group.parameters[0]._array.sharding)
            names = ("norms", "update")
            self.programs += [Compiled(stage, n, 1, c) for n, c in zip(names, found, strict=True)]
        for p, _ in self._gradients.values():
            p._grad = None

    def _stage_of(self, sharding: Any) -> int:
        stages = self.made.layout.stages
        return next(s for s, at in enumerate(stages) if set(at.mesh.devices.flat) == set(sharding.device_set))

    def peak(self, stage: int) -> int:
        """Bytes beside parameters, gradients and optimizer state at the stage's worst time."""
        held = peak = 0
        for task in self.schedule.tables[stage]:
            work = self.tasks[task.kind, task.chunk]
            peak = max(peak, held + work.works_in)
            held += self._change(task)
        updates = [c for c in self.programs if c.stage == stage and c.calls == 1]
        return max(peak, *[works_in(c.program) for c in updates])

    def _change(self, task: Any) -> int:
        """Bytes more that are held after a task than before."""
        held, stash = self.tasks["F", task.chunk].leaves, self.tasks["B", task.chunk].leaves
        if task.kind == "F":
            return held
        if not self.schedule.split_backward:
            return -held
        return stash if task.kind == "B" else -held - stash

    def extra(self, stage: int) -> tuple[int, int]:
        """(bytes of gradients that are added up on a stage, bytes of other stages' parameters copied there)."""
        chunks = [k for k, s in enumerate(self.plan.stage_of_chunk) if s == stage]
        return sum(self.sums[k] for k in chunks), sum(self.copies[k] for k in chunks)


def works_in(program: Any) -> int:
    """Bytes a program needs beside its arguments: scratch, and results that take no argument's place."""
    found = program.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def _moved(array: Any, stage: Layout) -> Abstract:
    sharding = type(array.sharding)(stage.mesh, array.sharding.spec)
    return Abstract.of(array.shape, array.dtype, sharding)


def _is_foreign(tensor: Any, stage: Layout) -> bool:
    found = getattr(tensor, "layouts", None)
    return bool(found) and found["param"].mesh != stage.mesh


def _here(tensor: Any, stage: Layout) -> Any:
    array = tensor._array
    if array.sharding.device_set == stage.replicated().device_set:
        return array
    dims = getattr(tensor, "dims", None)
    where = stage.replicated() if dims is None else stage.sharding("param", dims, array.shape)
    return Abstract.of(array.shape, array.dtype, where)


def _distinct(arrays: Iterable[Any]) -> Sequence[Any]:
    return list({id(a): a for a in arrays}.values())
