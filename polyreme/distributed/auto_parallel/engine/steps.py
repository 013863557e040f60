"""One batch trained, evaluated or predicted by a placed model: as one captured program, or in a program for each stage.

Both kinds have the same methods; a batch is the Tensors of its inputs and of its labels, with global rows.
"""

from __future__ import annotations

import functools
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.engine.counts import with_shares
from polyreme.distributed.auto_parallel.engine.placement import Placed
from polyreme.distributed.auto_parallel.engine.strategy import Settled
from polyreme.distributed.communication import replicas
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.eager.host import put
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.hapi.data import samples_in
from polyreme.hapi.step import Parts, Steps, as_list
from polyreme.jit.structure import flatten, rebuild
from polyreme.nn.layer import Layer
from polyreme.ops.manipulation import concat
from polyreme.training import Microbatch, StepPolicy, cut

_log = logging.getLogger("polyreme.distributed.auto_parallel")
Shapes = tuple[tuple[tuple[int, ...], np.dtype], ...]


def bring_key(layout: Layout) -> None:
    """Put the generator's key on the layout's devices, if another model's program has left it elsewhere."""
    holder = rng.default_generator.key_state()
    if holder._array.sharding.device_set != set(layout.mesh.devices.flat):
        state.write(holder, put(holder._array, layout.replicated()))


class BatchSteps(ABC):
    """Base of the two kinds of steps: cuts a batch, runs it on the layout's devices and joins the results."""

    layout: Layout
    loss: Any

    def __init__(self, layout: Layout, loss: Any, settled: Settled) -> None:
        self.layout, self.loss = layout, loss
        self._stages = settled.stages

    def run(
        self, kind: str, inputs: Sequence[Tensor], labels: Sequence[Tensor], wants_outputs: bool
    ) -> tuple[Any, ...]:
        """kind: "train", "eval" or "predict". -> outputs (none unless wanted), losses (none without a loss), the mean
        over the batch of each."""
        batch = self._cut(inputs, labels)
        with layouts.using(self.layout):
            bring_key(self.layout)
            parts = self._run(kind, batch, wants_outputs)
            with no_grad():
                outputs = [_join(values, batch) for values in zip(*(out for _, out in parts), strict=True)]
        losses = [_mean(values, batch) for values in zip(*(values for values, _ in parts), strict=True)]
        return outputs, losses

    @abstractmethod
    def _cut(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Microbatch]:
        """A batch in microbatches, as this kind of steps takes them."""

    @abstractmethod
    def _run(self, kind: str, batch: list[Microbatch], wants_outputs: bool) -> Parts:
        """A batch run in the mode of a kind."""

    def _count(self, inputs: Sequence[Tensor]) -> int:
        """The number of microbatches of a batch, fewer where the last batch has too few rows."""
        rows, stages = samples_in(inputs), self._stages
        if stages is None or stages.num_microbatches is not None:
            count = min(rows, self.layout.plan.num_microbatches if stages is None else stages.num_microbatches)
        else:
            count = max(1, rows // ((stages.microbatch_rows or 1) * self.layout.plan.batch_ways))
        return -(-rows // -(-rows // count))


class WholeSteps(BatchSteps):
    """Steps of a model over all devices of a layout, each one captured program."""

    def __init__(self, network: Any, loss: Any, optimizer: Any, layout: Layout, settled: Settled) -> None:
        super().__init__(layout, loss, settled)
        self._steps = Steps(network, loss, optimizer, settled.precision)
        self._seen: dict[str, tuple] = {}
        self._is_told = False

    @property
    def scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return self._steps.scaler

    def run(
        self, kind: str, inputs: Sequence[Tensor], labels: Sequence[Tensor], wants_outputs: bool
    ) -> tuple[Any, ...]:
        """As BatchSteps.run."""
        self._seen[kind] = tuple(tuple((tuple(t.shape), t.dtype) for t in group) for group in (inputs, labels))
        outputs, losses = super().run(kind, inputs, labels, wants_outputs)
        return [self._readable(out) for out in outputs], losses

    def _cut(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Microbatch]:
        """Microbatches laid out over the devices; a batch in one piece stays there if it lies there."""
        count = self._count(inputs)
        if count == 1:
            return [Microbatch([self._place(t) for t in inputs], [self._place(t) for t in labels], samples_in(inputs))]
        batch = with_shares(self.loss, cut([tuple(inputs), tuple(labels)], count, None))
        wants = [not t.stop_gradient for t in inputs]
        return [
            Microbatch(
                list(map(self._spread, part.inputs, wants)),
                list(map(self._spread, part.labels)),
                part.rows,
                None if part.share is None else self._spread(np.asarray(part.share)),
            )
            for part in batch
        ]

    def _run(self, kind: str, batch: list[Microbatch], wants_outputs: bool) -> Parts:
        if kind == "train":
            return self._steps.train(batch, True, wants_outputs)
        if kind == "eval":
            return self._steps.evaluate(batch, wants_outputs)
        return self._steps.predict(batch)

    def _readable(self, out: Tensor) -> Tensor:
        """An output that lies in several processes, whole in each; others as they are."""
        return Tensor(replicas.whole(out._array, self.layout.replicated())) if isinstance(out, Tensor) else out

    def _place(self, tensor: Tensor) -> Tensor:
        """A batch's Tensor spread over the devices; one that lies on all of them stays as it is."""
        array = state.read(tensor)
        if len(array.sharding.device_set) > 1 and array.sharding.device_set == set(self.layout.mesh.devices.flat):
            return tensor
        return self._spread(array, not tensor.stop_gradient)

    def _spread(self, array: Any, wants_gradient: bool = False) -> Any:
        """A Tensor with its rows split over the devices, or whole on each where they do not divide."""
        where = self.layout.activation(("batch", *[None] * (array.ndim - 1))[: array.ndim], array.shape)
        self._tell_of_repeats(array.shape)
        return Tensor(put(array, where), stop_gradient=not wants_gradient)

    def _tell_of_repeats(self, shape: Sequence[int]) -> None:
        ways = self.layout.plan.batch_ways
        if self._is_told or not shape or ways == 1 or self.layout.ways("batch", shape[0]) == ways:
            return
        self._is_told = True
        _log.warning(
            "a batch of %d rows does not divide over %d devices, so that each computes all of it; the result is the "
            "same, the time is not: make the batch a multiple of %d",
            shape[0], ways, ways,
        )  # fmt: skip

    def compiled(self, kind: str, shapes: tuple[Shapes, Shapes] | None = None) -> jax.stages.Compiled:
        """The program of a step for a batch of these shapes, those of the last batch by default, compiled, not run."""
        shapes = shapes or self._seen.get(kind)
        if shapes is None:
            raise ConfigError(
                f"there is no {kind} program before the first batch; run one, or give its shapes to prepare"
            )
        name = {"eval": "evaluate"}.get(kind, kind)
        step = self._steps.captured(name)
        if step is None:
            raise ConfigError(f"the {kind} step runs eagerly, because it could not be captured; it has no program")
        batch = self._cut(*([Tensor(jnp.zeros(*each)) for each in group] for group in shapes))
        more = {"train": (True, False), "eval": (False,)}.get(kind, ())
        with layouts.using(self.layout):
            return step.compiled(batch, *more)


class StagedSteps(BatchSteps):
    """Steps of a model cut into pipeline stages, with a program for each task.

    The model's first part takes a batch's input, of several inputs a tuple. Training gives the loss alone, several of
    them added up.
    """

    def __init__(self, placed: Placed, loss: Any, optimizer: Any, settled: Settled) -> None:
        super().__init__(placed.layout, loss, settled)
        _check_loss(loss, placed)
        losses = [] if loss is None else [_total(loss, placed.output)]
        pipeline = Pipeline(placed.chunks, losses, placed.layout, placed.output)
        self.step = PipelineStep(pipeline, StepPolicy(settled.precision, accumulates=False), optimizer)

    @property
    def scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return self.step.scaler

    def _run(self, kind: str, batch: list[Microbatch], wants_outputs: bool) -> Parts:
        if kind == "train":
            return [([self.step(batch).loss], [])]  # the mean over the batch already
        wants_loss = kind == "eval"
        parts = self.step.evaluate(batch, losses=wants_loss, outputs=wants_outputs or not wants_loss)
        return [(losses, as_list(out)) for losses, out in parts]

    def _cut(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Microbatch]:
        whole = inputs[0] if len(inputs) == 1 else tuple(inputs)
        batch = cut([whole, tuple(labels)], self._count(inputs), None)
        return with_shares(self.loss, batch)

    def compiled(self, kind: str, shapes: Any = None) -> Any:
        """Raises ConfigError: a step is many programs."""
        raise ConfigError(
            f"the {kind} step of a pipeline is a program for each stage and task, not one; look at one stage's with "
            "pp_degree 1, or at `polyreme comm`"
        )


def _total(loss: Callable[..., Any], output: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """The loss of a last part's output and labels, several added up."""

    def total(out: Any, labels: Sequence[Any]) -> Any:
        return functools.reduce(operator.add, as_list(loss(*as_list(output(out)), *labels)))

    return total


def _check_loss(loss: Any, placed: Placed) -> None:
    """Raises ConfigError for parameters that no stage has."""
    held = {id(p) for chunk in placed.chunks if isinstance(chunk, Layer) for p in chunk.parameters()}
    if isinstance(loss, Layer) and any(not p.stop_gradient and id(p) not in held for p in loss.parameters()):
        raise ConfigError(
            f"the loss {type(loss).__name__} has parameters to train, which no stage of a pipeline holds; make them "
            "parameters of the model, or run without stages"
        )


def _mean(losses: Sequence[Tensor], batch: Sequence[Microbatch]) -> Tensor:
    """A loss of a batch, of those of its microbatches."""
    return losses[0] if len(losses) == 1 else Tensor(Pipeline.mean([loss._array for loss in losses], batch))


def _join(parts: Sequence[Any], batch: Sequence[Microbatch]) -> Any:
    """An output of the batch, of any structure, of those of its microbatches: rows together, a floating number the mean
    by rows, anything else the first's."""
    leaves: list[list[Any]] = [[] for _ in parts]
    specs = [flatten(part, found) for part, found in zip(parts, leaves, strict=True)]
    return rebuild(specs[0], iter([_joined_leaf(each, batch) for each in zip(*leaves, strict=True)]))


def _joined_leaf(parts: Sequence[Any], batch: Sequence[Microbatch]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim:
        return concat(list(parts))
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return first
    rows = sum(each.rows for each in batch)
    return functools.reduce(operator.add, [p * (each.rows / rows) for p, each in zip(parts, batch, strict=True)])
