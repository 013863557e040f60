"""One batch trained, evaluated or predicted by a placed model: as one captured program, or in a program for each stage.

Both kinds have the same methods; a batch is the Tensors of its inputs and of its labels, with global rows.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.engine.counts import is_counted, with_factors
from polyreme.distributed.auto_parallel.engine.placement import Placed
from polyreme.distributed.auto_parallel.engine.strategy import Settled
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.eager.host import put
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.hapi.step import Steps, as_list
from polyreme.jit.structure import flatten, rebuild
from polyreme.nn.layer import Layer
from polyreme.ops.manipulation import concat
from polyreme.training import Microbatch, MixedPrecision, StepPolicy, cut

_log = logging.getLogger("polyreme.distributed.auto_parallel")
Shapes = tuple[tuple[tuple[int, ...], np.dtype], ...]


def bring_key(layout: Layout) -> None:
    """Put the generator's key on the layout's devices, if another model's program has left it elsewhere."""
    holder = rng.default_generator.key_state()
    if holder._array.sharding.device_set != set(layout.mesh.devices.flat):
        state.write(holder, put(holder._array, layout.replicated()))


class WholeSteps:
    """Each step of a model, over all devices of a layout, as one captured program."""

    def __init__(self, network: Any, loss: Any, optimizer: Any, precision: MixedPrecision, layout: Layout) -> None:
        self.layout = layout
        self._steps = Steps(network, loss, optimizer, precision)
        self._seen: dict[str, tuple] = {}
        self._is_told = False

    @property
    def scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return self._steps.scaler

    def run(self, kind: str, inputs: Sequence[Tensor], labels: Sequence[Tensor], wants_outputs: bool) -> tuple:
        """kind: "train", "eval" or "predict". -> outputs (none unless wanted), losses (none without a loss)."""
        given, wanted = ([self.place(t) for t in tensors] for tensors in (inputs, labels))
        self._seen[kind] = tuple(tuple((tuple(t.shape), t.dtype) for t in group) for group in (given, wanted))
        with layouts.using(self.layout):
            bring_key(self.layout)
            outputs, losses = self._run(kind, given, wanted, wants_outputs)
        return [self._readable(out) for out in outputs], losses

    def _run(self, kind: str, inputs: list[Tensor], labels: list[Tensor], wants_outputs: bool) -> tuple[list, list]:
        if kind == "train":
            return self._steps.train(inputs, labels, True, wants_outputs)
        if kind == "eval":
            return self._steps.evaluate(inputs, labels, wants_outputs)
        return self._steps.predict(inputs), []

    def _readable(self, out: Tensor) -> Tensor:
        """An output that lies in several processes, whole in each; others as they are."""
        if not isinstance(out, Tensor) or out._array.is_fully_addressable or out._array.is_fully_replicated:
            return out
        return Tensor(jax.jit(jnp.copy, out_shardings=self.layout.replicated())(out._array))

    def place(self, tensor: Tensor) -> Tensor:
        """A batch's Tensor, its rows split over the devices, or whole on each where they do not divide; one that lies
        on the layout's devices stays as it is."""
        array = state.read(tensor)
        if len(array.sharding.device_set) > 1 and array.sharding.device_set == set(self.layout.mesh.devices.flat):
            return tensor
        where = self.layout.activation(("batch", *[None] * (array.ndim - 1))[: array.ndim], array.shape)
        self._tell_of_repeats(array.shape)
        made = Tensor(put(array, where))
        made.stop_gradient = tensor.stop_gradient
        return made

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
        given, wanted = ([self.place(Tensor(jnp.zeros(*each))) for each in group] for group in shapes)
        more = {"train": (True, False), "eval": (False,)}.get(kind)
        with layouts.using(self.layout):
            return step.compiled(given) if more is None else step.compiled(given, wanted, *more)


class StagedSteps:
    """Each step of a model cut into the stages of a pipeline, a program for each task.

    The model's first part takes a batch's input, of several inputs a tuple. Training gives the loss alone, several of
    them added up.
    """

    def __init__(self, placed: Placed, loss: Any, optimizer: Any, settled: Settled) -> None:
        self.layout, self._settled = placed.layout, settled
        _check_loss(loss, placed)
        self._loss, self._is_counted = loss, is_counted(loss)
        losses = [] if loss is None else [lambda out, labels: self._total(as_list(placed.output(out)), labels)]
        self._pipeline = Pipeline(placed.chunks, losses, placed.layout, placed.output)
        self.step = PipelineStep(self._pipeline, StepPolicy(settled.precision), optimizer)

    @property
    def scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return self.step.scaler

    def run(self, kind: str, inputs: Sequence[Tensor], labels: Sequence[Tensor], wants_outputs: bool) -> tuple:
        """As WholeSteps.run; training gives no outputs."""
        batch = self._cut(inputs, labels)
        with layouts.using(self.layout):
            bring_key(self.layout)
            if kind == "train":
                return [], [self.step(batch).loss]
            return self._evaluate(kind, batch, wants_outputs)

    def _evaluate(self, kind: str, batch: list[Microbatch], wants_outputs: bool) -> tuple:
        with no_grad():
            if kind == "eval" and not wants_outputs and self._loss is not None:
                losses = [loss for (loss,) in self.step.evaluate(batch)]
                return [], [Tensor(self._pipeline.mean(losses, batch))]
            parts = [as_list(out) for out in self.step.evaluate(batch, loss=None)]
            outputs = [_join(part, batch) for part in zip(*parts, strict=True)]
            if kind == "predict" or self._loss is None:
                return outputs, []
            return outputs, self._losses(parts, batch)

    def _losses(self, parts: list[list[Tensor]], batch: list[Microbatch]) -> list[Tensor]:
        """The loss of the microbatches' outputs, in the mean over rows."""
        whole = self._pipeline.last_stage.replicated()
        rows = sum(each.rows for each in batch)
        found = []
        for outputs, each in zip(parts, batch, strict=True):
            labels = [Tensor(put(v, whole)) for v in each.labels]
            with self._settled.precision.autocast():
                total = self._total(outputs, labels)
            found.append(total * (each.rows / rows))
        return [functools.reduce(operator.add, found)]

    def _total(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """The loss, several added up, by the factor behind the labels if there is one."""
        if not self._is_counted:
            return functools.reduce(operator.add, as_list(self._loss(*outputs, *labels)))
        *labels, factor = labels
        return functools.reduce(operator.add, as_list(self._loss(*outputs, *labels))) * factor

    def _cut(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Microbatch]:
        """Microbatches, fewer of them where a last batch has not rows enough."""
        rows = inputs[0].shape[0]
        count = self._count(rows)
        each = -(-rows // count)
        given = inputs[0] if len(inputs) == 1 else tuple(inputs)
        batch = cut([given, tuple(labels)], -(-rows // each), None)
        return with_factors(self._loss, batch) if self._is_counted else batch

    def _count(self, rows: int) -> int:
        stages = self._settled.stages
        if stages is None:
            return min(rows, self.layout.plan.num_microbatches)
        if stages.num_microbatches is not None:
            return min(rows, stages.num_microbatches)
        return max(1, rows // ((stages.microbatch_rows or 1) * self.layout.plan.batch_ways))

    def compiled(self, kind: str, shapes: Any = None) -> Any:
        """Raises ConfigError: a step is many programs."""
        raise ConfigError(
            f"the {kind} step of a pipeline is a program for each stage and task, not one; look at one stage's with "
            "pp_degree 1, or at `polyreme comm`"
        )


def _check_loss(loss: Any, placed: Placed) -> None:
    """Raises ConfigError for parameters that no stage has."""
    held = {id(p) for chunk in placed.chunks if isinstance(chunk, Layer) for p in chunk.parameters()}
    if isinstance(loss, Layer) and any(not p.stop_gradient and id(p) not in held for p in loss.parameters()):
        raise ConfigError(
            f"the loss {type(loss).__name__} has parameters to train, which no stage of a pipeline holds; make them "
            "parameters of the model, or run without stages"
        )


def _join(parts: Sequence[Any], batch: Sequence[Microbatch]) -> Any:
    """An output of the batch, of any structure, of those of its microbatches: rows together, a floating number the mean
    by rows, anything else the first's."""
    leaves: list[list[Any]] = [[] for _ in parts]
    specs = [flatten(part, found) for part, found in zip(parts, leaves, strict=True)]
    return rebuild(specs[0], iter([_joined_leaf(each, batch) for each in zip(*leaves, strict=True)]))


def _joined_leaf(parts: Sequence[Any], batch: Sequence[Microbatch]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.ndim:
        return concat(list(parts))
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return first
    rows = sum(each.rows for each in batch)
    return functools.reduce(operator.add, [p * (each.rows / rows) for p, each in zip(parts, batch, strict=True)])
