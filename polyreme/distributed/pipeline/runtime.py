"""The pipeline runtime: walks a schedule table over the chunks of a model, each on its stage's devices.

Floor: 5.  One process dispatches the tasks of all stages in the table's order of time; dispatch does not wait, so the
stages work at the same time. A value that the next stage needs is sent as soon as the task that makes it is dispatched.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core.layout import Layout
from polyreme.core.state import TensorState
from polyreme.distributed.pipeline.chunk import Chunk, Done
from polyreme.distributed.pipeline.transfer import join, place, send
from polyreme.eager.tensor import Tensor
from polyreme.errors import GradError
from polyreme.jit.split import Flow
from polyreme.mesh.schedule import Schedule, Task, make_schedule


class Microbatch(NamedTuple):
    """What the first chunk takes, what the loss takes besides the last chunk's output, and the rows it has."""

    inputs: Any
    labels: Any
    rows: int


class Pipeline:
    """Runs the chunks of a model over the stages of a layout.

    chunks: functions of a structure of Tensors, in the order that data flows. losses: functions (output of the last,
    labels) -> a loss with one element, a mean over its microbatch; `loss` chooses one by its place. output: what to
    make of the last chunk's output where no loss is asked for. The plan's schedule says what runs when; a batch may
    have any number of microbatches.
    """

    def __init__(
        self,
        chunks: Sequence[Callable[[Any], Any]],
        losses: Sequence[Callable[[Any, Any], Any]],
        layout: Layout,
        output: Callable[[Any], Any] | None = None,
    ) -> None:
        self.layout = layout
        self.plan = layout.plan
        stages = [layout.stages[s] for s in self.plan.stage_of_chunk]
        cut = self.schedule(self.plan.num_microbatches).split_backward
        self._first = [Chunk(fn, at, cut=cut) for fn, at in zip(chunks[:-1], stages[:-1], strict=True)]
        self._last = Chunk(chunks[-1] if output is None else _then(chunks[-1], output), stages[-1], cut=False)
        self._with_loss = [Chunk(_with_loss(chunks[-1], loss), stages[-1], cut=cut) for loss in losses]

    @property
    def last_stage(self) -> Layout:
        """The layout of the stage that computes the loss."""
        return self._last.stage

    def schedule(self, num_microbatches: int) -> Schedule:
        """The table for this many microbatches."""
        plan = self.plan
        return make_schedule(plan.schedule or "FThenB", plan.mesh.pp, num_microbatches, plan.virtual_stages)

    def train(
        self, batch: Sequence[Microbatch], keys: Sequence[Any], *, scale: Any = None, loss: int = 0
    ) -> list[jax.Array]:
        """Losses of the microbatches, on the last stage; the gradient of their mean, weighted by rows, is added to
        `.grad` of every parameter, on the parameter's own stage.

        keys: a random key for each microbatch. scale: a 0-D array to multiply the gradient by, for loss scaling.
        """
        chunks = [*self._first, self._with_loss[loss]]
        run = _Run(chunks, batch, keys, backward=True)
        run.weights = self._weights(batch, scale)
        for stage, task in _ordered(self.schedule(len(batch))):
            try:
                run.do(task)
            except Exception as error:
                error.add_note(f"in {task.kind} of microbatch {task.microbatch}, chunk {task.chunk} on stage {stage}")
                raise
        _store(chunks)
        return [run.losses[i] for i in range(len(batch))]

    def evaluate(self, batch: Sequence[Microbatch], keys: Sequence[Any], *, loss: int | None = 0) -> list[Any]:
        """The loss array of each microbatch; with loss=None, the structure of Tensors that the last chunk gives."""
        chunks = [*self._first, self._last if loss is None else self._with_loss[loss]]
        run = _Run(chunks, batch, keys, backward=False)
        run.has_loss = loss is not None
        for i in range(len(batch)):
            for k in range(len(chunks)):
                run.do(Task("F", i, k))
        return [run.losses[i] for i in range(len(batch))]

    @staticmethod
    def mean(losses: Sequence[jax.Array], batch: Sequence[Microbatch]) -> jax.Array:
        """The mean loss over the rows of a batch."""
        return _mean(_shares(batch), list(losses))

    def _weights(self, batch: Sequence[Microbatch], scale: Any) -> list[jax.Array]:
        """The cotangent of each microbatch's loss, on the last stage."""
        shares = _shares(batch)
        everywhere = self._last.stage.replicated()
        if scale is None:
            made = {share: jax.device_put(np.asarray(share, np.float32), everywhere) for share in set(shares)}
            return [made[share] for share in shares]
        return _scaled(shares, jax.device_put(scale, everywhere))


class _Run:
    """One batch on its way through the chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], batch: Sequence[Microbatch], keys: Sequence[Any], *, backward: bool
    ) -> None:
        self.chunks, self.batch, self.backward = chunks, batch, backward
        self.has_loss = True
        self.weights: list[jax.Array] = []
        self.losses: dict[int, Any] = {}
        self._keys: dict[int, Any] = dict(enumerate(keys))
        self._key_at: dict[int, Layout | None] = dict.fromkeys(range(len(batch)))
        # by (chunk, microbatch): what waits to be run forward, backward, and for the gradients of weights
        self._arrived: dict[tuple[int, int], Flow] = {}
        self._done: dict[tuple[int, int], Done] = {}
        self._cotangents: dict[tuple[int, int], list[Any]] = {}
        self._num_given: dict[tuple[int, int], int] = {}
        for chunk in chunks:
            chunk.begin()

    def do(self, task: Task) -> None:
        """Dispatch one task and send on what it gives."""
        {"F": self._run_forward, "B": self._run_backward, "W": self._run_weights}[task.kind](
            task.chunk, task.microbatch
        )

    def _run_forward(self, k: int, i: int) -> None:
        chunk, last = self.chunks[k], len(self.chunks) - 1
        flow = place(self.batch[i].inputs, chunk.stage) if k == 0 else self._arrived.pop((k, i))
        if k == last and self.has_loss:
            self._num_given[k, i] = len(flow.arrays)
            flow = join(flow, place(self.batch[i].labels, chunk.stage))
        if chunk.draws and self._key_at[i] is not chunk.stage:
            (self._keys[i],) = send([self._keys[i]], chunk.stage)
            self._key_at[i] = chunk.stage
        outs, self._keys[i], done = chunk.forward(flow, self._keys[i], backward=self.backward)
        if self.backward:
            self._done[k, i] = done
        if k < last:
            self._arrived[k + 1, i] = self._sent_on(outs, i, chunk.stage, self.chunks[k + 1])
        elif self.has_loss:
            self.losses[i] = self._loss(outs, i)
        else:
            self.losses[i] = outs.tensors()

    def _sent_on(self, outs: Flow, i: int, here: Layout, following: Chunk) -> Flow:
        """A chunk's outputs on the stage of the next, the random key with them if that draws from it."""
        stage = following.stage
        if stage is here:
            return outs
        if following.draws and self._key_at[i] is here:
            *arrays, self._keys[i] = send([*outs.arrays, self._keys[i]], stage)
            self._key_at[i] = stage
            return outs.with_arrays(arrays)
        return outs.with_arrays(send(outs.arrays, stage))

    def _loss(self, outs: Flow, i: int) -> jax.Array:
        if len(outs.arrays) != 1 or outs.arrays[0].size != 1:
            shapes = [list(a.shape) for a in outs.arrays]
            raise GradError(f"the pipeline's loss must be one Tensor with one element, got shapes {shapes}; reduce it")
        loss = outs.arrays[0]
        if self.backward:
            if not outs.wants[0]:
                raise GradError(
                    "the pipeline's loss has stop_gradient=True: nothing it was computed from wants a gradient; set "
                    "stop_gradient=False on a parameter, or use eval_batch"
                )
            self._cotangents[len(self.chunks) - 1, i] = [_shaped(self.weights[i], loss)]
        return loss

    def _run_backward(self, k: int, i: int) -> None:
        chunk = self.chunks[k]
        cotangents = self._cotangents.pop((k, i))
        gradients, done = chunk.backward(self._done.pop((k, i)), cotangents)
        if chunk.cut:
            self._done[k, i] = done
        if k > 0:
            before = self.chunks[k - 1]
            # the last chunk's inputs end with the labels, which no chunk gave
            ours = gradients[: self._num_given.pop((k, i), None)]
            self._cotangents[k - 1, i] = ours if before.stage is chunk.stage else send(ours, before.stage)

    def _run_weights(self, k: int, i: int) -> None:
        self.chunks[k].weights(self._done.pop((k, i)))


def _then(fn: Callable[[Any], Any], output: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def last(x: Any) -> Any:
        return output(fn(x))

    return last


def _with_loss(fn: Callable[[Any], Any], loss: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def last(pair: tuple[Any, Any]) -> Any:
        return loss(fn(pair[0]), pair[1])

    return last


@functools.lru_cache(maxsize=64)
def _ordered(schedule: Schedule) -> tuple[tuple[int, Task], ...]:
    """All stages' tasks in one order in time, each after those it needs."""
    return tuple((step.stage, step.task) for step in schedule.order())


def _shares(batch: Sequence[Microbatch]) -> tuple[float, ...]:
    """What part of the batch's rows each microbatch has."""
    total = sum(part.rows for part in batch)
    return tuple(part.rows / total for part in batch)


@functools.partial(jax.jit, static_argnums=0)
def _scaled(shares: tuple[float, ...], scale: jax.Array) -> list[jax.Array]:
    return [scale.astype(jnp.float32) * share for share in shares]


@functools.partial(jax.jit, static_argnums=0)
def _mean(shares: tuple[float, ...], losses: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, [loss * share for share, loss in zip(shares, losses, strict=True)])


@jax.jit
def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


def _shaped(weight: jax.Array, loss: jax.Array) -> jax.Array:
    if weight.shape == loss.shape and weight.dtype == loss.dtype:
        return weight
    return weight.reshape(loss.shape).astype(loss.dtype)


def _store(chunks: Sequence[Chunk]) -> None:
    """Add each chunk's gradients to `.grad`, on the stage where the parameter is at home."""
    totals: dict[int, tuple[Any, jax.Array]] = {}
    for chunk in chunks:
        for p, array in chunk.gradients():
            home = p.sharding_of("grad") if hasattr(p, "sharding_of") else None
            if home is not None and array.sharding != home:
                array = jax.device_put(array, home)
            known = totals.get(id(p))
            totals[id(p)] = (p, array if known is None else _sum(known[1], array))
    for p, array in totals.values():
        _accumulate(p, array)


def _accumulate(p: TensorState, array: jax.Array) -> None:
    p._grad = Tensor(array if p._grad is None else _sum(p._grad._array, array))
