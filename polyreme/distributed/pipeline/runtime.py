"""The pipeline runtime: walks a schedule table over the chunks of a model, each on its stage's devices.

One process dispatches the tasks of all stages in the table's order of time; dispatch does not wait, so the
stages work at the same time. A value that the next stage needs is sent as soon as the task that makes it is dispatched.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core.devices.abstract import mode
from polyreme.core.layout import Layout
from polyreme.distributed.communication import replicas
from polyreme.distributed.job import watchdog
from polyreme.distributed.pipeline.chunk import Chunk
from polyreme.distributed.pipeline.processes import from_all, is_here, leader, spans_processes
from polyreme.distributed.pipeline.run import Run
from polyreme.distributed.pipeline.run_across import Agreed, RunAcross
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, GradError
from polyreme.jit.called import Called
from polyreme.mesh.schedule import Schedule, Task
from polyreme.nn.layer import Layer
from polyreme.training.microbatches import Microbatch, shares

Observer = Callable[[int, Task, Run], None]
"""Called after each task of a batch that is trained: with the stage, the task and the run."""


class Pipeline:
    """Runs the chunks of a model over the stages of a layout.

    chunks: functions of a structure of Tensors, in the order that data flows. losses: functions (output of the last,
    labels) -> a loss with one element, a mean over its microbatch; all are computed, and `loss` chooses by its place
    the one to differentiate. output: what to make of the last chunk's output where no loss is asked for. told: names of
    what losses give beside themselves, as pairs of a loss and a dict of Tensors, which then come after the losses. The
    plan's schedule says what runs when; a batch may have any number of microbatches.
    """

    stage_of_chunk: tuple[int, ...]

    def __init__(
        self,
        chunks: Sequence[Callable[[Any], Any]],
        losses: Sequence[Callable[[Any, Any], Any]],
        layout: Layout,
        output: Callable[[Any], Any] | None = None,
        told: Sequence[str] = (),
    ) -> None:
        self.layout = layout
        self.told = tuple(told)
        self.plan = layout.plan
        self._agreed = self._agreement(chunks)
        self._observer: Observer | None = None
        # of each microbatch of the last batch, the random key that follows
        self.following: Sequence[Any] = ()
        self.stage_of_chunk = self._stages_of(len(chunks))
        stages = [layout.stages[s] for s in self.stage_of_chunk]
        cut = self.schedule(self.plan.num_microbatches).split_backward
        self._first = [Chunk(fn, at, cut=cut) for fn, at in zip(chunks[:-1], stages[:-1], strict=True)]
        self._last = Chunk(chunks[-1] if output is None else _then(chunks[-1], output), stages[-1], cut=False)
        self._with_loss = [
            Chunk(_with_losses(chunks[-1], losses, at, self.told), stages[-1], cut=cut) for at in range(len(losses))
        ]
        self._with_both = Chunk(
            _with_losses(chunks[-1], losses, 0, self.told, output or _unchanged), stages[-1], cut=False
        )

    def _stages_of(self, num_chunks: int) -> tuple[int, ...]:
        """The stage of each chunk, in the order that data flows."""
        return self.plan.stage_of_chunk

    def _agreement(self, chunks: Sequence[Any]) -> Agreed | None:
        """The agreement of processes that run different stages; None where every process runs all."""
        return _agreed(chunks, self.layout) if spans_processes(self.layout) and not mode.is_on else None

    @property
    def last_stage(self) -> Layout:
        """The layout of the stage that computes the loss."""
        return self._last.stage

    @property
    def where_losses_are(self) -> Any:
        """The sharding of the losses that train and evaluate return: on the last stage, or, when stages lie in several
        processes, on a device of each."""
        if self._agreed is None:
            return self.last_stage.replicated()
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def schedule(self, num_microbatches: int) -> Schedule:
        """The table for this many microbatches."""
        return self.plan.make_schedule(num_microbatches)

    def train(
        self, batch: Sequence[Microbatch], keys: Sequence[Any], *, scale: Any = None, loss: int = 0, every: bool = False
    ) -> list[Any]:
        """Losses of the microbatches, on the last stage; the gradient of their mean, weighted by rows, is added to
        `.grad` of every parameter, on the parameter's own stage.

        keys: a random key for each microbatch. scale: a 0-D array to multiply the gradient by, for loss scaling.
        every: a microbatch's losses from all the loss functions, and what is told, instead of the chosen one's.
        """
        run = self._run(self._chunks(loss), batch, keys, backward=True, loss=loss)
        run.weights = self._weights(batch, scale)
        for stage, task in _order(self.schedule(len(batch))):
            try:
                with watchdog.stage(stage, f"{task.kind} of microbatch {task.microbatch}"):
                    run.do(task)
                    if self._observer is not None:
                        self._observer(stage, task, run)
            except Exception as error:
                error.add_note(f"in {task.kind} of microbatch {task.microbatch}, chunk {task.chunk} on stage {stage}")
                raise
        run.store()
        return [losses if every else losses[loss] for losses, _ in self._results(run)]

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Inside the block an observer is called after each task."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def evaluate(
        self, batch: Sequence[Microbatch], keys: Sequence[Any], *, losses: bool = True, outputs: bool = False
    ) -> list[tuple[list[jax.Array], Any]]:
        """Forward alone -> of each microbatch, the losses from all the loss functions with what is told, and the
        structure of Tensors that the last chunk gives, where its devices are; none and None where they are not asked
        for."""
        loss = 0 if losses else None
        run = self._run(self._chunks(loss, outputs), batch, keys, backward=False, loss=loss, outputs=outputs)
        for i, k in self._forwards(len(batch)):
            with watchdog.stage(self.stage_of_chunk[k], f"forward of microbatch {i}"):
                run.do(Task("F", i, k))
        return self._results(run)

    def _forwards(self, num_microbatches: int) -> list[tuple[int, int]]:
        """(microbatch, chunk) of an evaluation, in order."""
        return [(i, k) for i in range(num_microbatches) for k in range(len(self.stage_of_chunk))]

    def programs(self, loss: int | None = 0) -> list[tuple[int, str, Called]]:
        """The calls for the last batch that was run with this loss: (stage, "chunk 0, forward", call)."""
        placed = zip(self.stage_of_chunk, self._chunks(loss), strict=True)
        return [(at, f"chunk {k}, {name}", c) for k, (at, chunk) in enumerate(placed) for name, c in chunk.programs]

    def fusions(self, loss: int | None = 0) -> list[str]:
        """Names of the patterns that calls of the chunks were fused by, in the order that data flows, for the last
        batch that was run with this loss."""
        return [name for chunk in self._chunks(loss) for name in chunk.fusions]

    def drew(self, *, losses: bool, outputs: bool) -> bool:
        """Whether the last batch that was evaluated for these drew random numbers, in whatever process; all of them
        must ask."""
        chunks = self._chunks(0 if losses else None, outputs)
        if self._agreed is None:
            return any(chunk.draws for chunk in chunks)
        return any(from_all(any(chunk.draws for chunk in chunks if is_here(chunk.stage))))

    def _chunks(self, loss: int | None, outputs: bool = False) -> list[Chunk]:
        last = self._last if loss is None else self._with_both if outputs else self._with_loss[loss]
        return [*self._first, last]

    def _run(self, chunks: Sequence[Chunk], batch: Sequence[Microbatch], keys: Sequence[Any], **how: Any) -> Run:
        if self._agreed is None:
            return Run(chunks, batch, keys, **how)
        return RunAcross(chunks, batch, keys, **how, agreed=self._agreed)

    def _results(self, run: Run) -> list[tuple[list[jax.Array], Any]]:
        run.end()
        results = run.results()
        self.following = run.keys
        return results

    def in_every_process(self, out: Any) -> np.ndarray:
        """On the host, the value of a Tensor that evaluate gave without a loss; None where it is in another process."""
        if self._agreed is None:
            return np.asarray(replicas.whole(out._array, self.last_stage.replicated()))
        # split over the batch of the last stage's devices, which may be in several processes
        ours = None if out is None else np.asarray(replicas.whole(out._array, self.last_stage.replicated()))
        return from_all(ours)[leader(self.last_stage)]

    @staticmethod
    def mean(losses: Sequence[jax.Array], batch: Sequence[Microbatch]) -> jax.Array:
        """A batch's loss, given those of its microbatches."""
        if mode.is_on:  # it is like any of them, and programs of devices that are not here do not run
            return losses[0]
        return _mean([share._array if isinstance(share, Tensor) else share for share in shares(batch)], list(losses))

    def _weights(self, batch: Sequence[Microbatch], scale: Any) -> Callable[[Any], list[jax.Array]]:
        """By the loss's dtype, the cotangent of each microbatch's loss, on the last stage."""
        parts = shares(batch)
        everywhere = self._last.stage.replicated()

        @functools.cache
        def weights(dtype: Any) -> list[jax.Array]:
            if scale is None:
                made = {share: put(np.asarray(share, dtype), everywhere) for share in set(parts)}
                return [made[share] for share in parts]
            return _scale(list(parts), dtype, put(scale, everywhere))

        return weights


def _then(fn: Callable[[Any], Any], output: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def last(x: Any) -> Any:
        return output(fn(x))

    return last


def _unchanged(out: Any) -> Any:
    return out


def _with_losses(
    fn: Callable[[Any], Any],
    losses: Sequence[Callable[[Any, Any], Any]],
    chosen: int,
    told: Sequence[str],
    output: Callable[[Any], Any] | None = None,
) -> Callable[[Any], Any]:
    """fn and every loss of its output, through the chosen one of which alone gradients flow, with what they tell; with
    output, a pair of those and what it makes of fn's output."""

    def last(pair: tuple[Any, Any]) -> Any:
        out, more, means = fn(pair[0]), {}, []
        for i, loss in enumerate(losses):
            result = loss(out, pair[1])
            mean, beside = result if told else (result, {})
            means.append(_check_loss(mean) if i == chosen else _check_loss(mean).detach())
            more |= beside
        means += [more[name].detach() for name in told]
        return means if output is None else (means, output(out))

    return last


def _check_loss(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.size == 1:
        return loss
    got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise GradError(f"a pipeline's loss must be one Tensor with one element, got {got}; reduce it")


@functools.lru_cache(maxsize=64)
def _order(schedule: Schedule) -> tuple[tuple[int, Task], ...]:
    """The tasks of all stages in one order, each after those it depends on."""
    return tuple((step.stage, step.task) for step in schedule.order())


@functools.partial(jax.jit, static_argnums=1)
def _scale(shares: list[Any], dtype: Any, scale: jax.Array) -> list[jax.Array]:
    wide = jnp.promote_types(dtype, jnp.float32)
    return [(scale.astype(wide) * jnp.astype(share, wide)).astype(dtype) for share in shares]


@jax.jit
def _mean(shares: list[Any], losses: list[jax.Array]) -> jax.Array:
    terms = [loss * jnp.astype(share, loss.dtype) for share, loss in zip(shares, losses, strict=True)]
    return functools.reduce(operator.add, terms)


def _agreed(chunks: Sequence[Any], layout: Layout) -> Agreed:
    if not all(isinstance(chunk, Layer) for chunk in chunks):
        raise ConfigError("a pipeline over several processes needs its chunks to be Layers; give a PipelineLayer's")
    stages = [layout.stages[stage] for stage in layout.plan.stage_of_chunk]
    return Agreed(list(zip(chunks, stages, strict=True)))
