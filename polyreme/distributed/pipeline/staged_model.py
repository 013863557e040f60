"""StagedModel: a PipelineLayer that trains and evaluates whole batches over the stages of a plan.

Which schedule runs is the plan's affair; there is one runtime for all of them (runtime.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from polyreme.amp import GradScaler
from polyreme.core.layout import Layout
from polyreme.distributed.data_parallel import split_batch
from polyreme.distributed.gradient_merge import MergingOptimizer
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.placement import apply_plan
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.mesh import SCHEDULES, Plan, default_schedule
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.layer import Layer
from polyreme.optimizer import Optimizer
from polyreme.training import FULL_PRECISION, Microbatch, MixedPrecision, StepPolicy, cut


class StagedModel(Layer):
    """A PipelineLayer over the stages of a plan.

    layers: the model; its parameters are moved to their stages. train_batch takes the global batch, which is cut into
    the plan's microbatches, and returns its mean loss, the same on every plan. microbatch_rows: rows that a microbatch
    must have; None takes what there is. A plan of one stage runs the microbatches one after another on all devices of
    its mesh, and the model may be called as a PlannedModel is.
    """

    layout: Layout

    plan: Plan

    def __init__(
        self,
        layers: PipelineLayer,
        plan: Plan,
        precision: MixedPrecision = FULL_PRECISION,
        microbatch_rows: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layers, PipelineLayer):
            raise TypeError(
                f"a pipeline needs a PipelineLayer, got {type(layers).__name__}; describe the model as a sequence of "
                "layers, or set pp_degree to 1"
            )
        self._layers, self._precision, self._microbatch_rows = layers, precision, microbatch_rows
        self.plan = _plan_for(layers, plan)
        self.layout = apply_plan(self.plan, layers, chunks=layers.get_model_chunks())
        given = layers.loss_fn
        self._losses = list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []
        self._pipeline = Pipeline(layers.get_model_chunks(), self._losses, self.layout)
        self.training_step = PipelineStep(self._pipeline, StepPolicy(precision))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.plan.mesh.pp > 1:
            raise TypeError("a pipeline runs whole batches: call train_batch or eval_batch")
        inputs, kwargs = split_batch((inputs, kwargs), self.layout)
        with self._precision.autocast():
            return self._layers(*inputs, **kwargs)

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        scaler: GradScaler | None = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,
    ) -> Any:
        """Forward, backward and an optimizer step on a global batch; -> the mean loss over it.

        data: [inputs, labels], each a Tensor or array, or a tuple or dict of them, None and numbers; in their place a
        list with one entry a microbatch, whose last may have fewer rows; or an iterator that yields [inputs, labels]
        for each microbatch. scaler: one with the precision's settings unless given. loss_fn_idx: which of several
        loss functions is trained; the losses of all of them are returned, as a list. return_micro_batch_loss: -> the
        loss of every microbatch instead, [num_microbatches].
        """
        scaler = self.training_step.scaler if scaler is None else scaler
        _check_trainers(optimizer, scaler, lr_scheduler)
        self._layers.train()
        batch, loss = self._cut(data), self._resolve_loss(loss_fn_idx)
        result = self.training_step(batch, optimizer=optimizer, scaler=scaler, loss=loss)
        if lr_scheduler is not None:
            lr_scheduler.step()
        if return_micro_batch_loss:
            return self._one_or_all(_arrays(result.parts), _stack)
        return self._mean_or_all(result.loss, result.parts, batch)

    def forward_backward_pipeline(
        self, data: Any, scaler: GradScaler | None = None, static_scheduler: bool = False
    ) -> Any:
        """Forward and backward of a global batch without the optimizer; -> the mean loss over it.

        Gradients are added to `.grad`. static_scheduler: -> the schedule of the first stage as text instead; data is
        not looked at.
        """
        if static_scheduler:
            return self.plan.make_schedule().stage_text(0)
        self._layers.train()
        batch = self._cut(data)
        # the gradients are the caller's, and so is the scaler
        scaler = GradScaler(enable=False) if scaler is None else scaler
        mean, parts = self.training_step.gradients(batch, scaler=scaler, loss=self._resolve_loss(0))
        return self._mean_or_all(mean, parts, batch)

    def eval_batch(self, data: Any, compute_loss: bool = False, loss_fn_idx: int = 0) -> Any:
        """Forward alone, with dropout off; -> the mean loss, of several loss functions a list of each one's, or the
        list of each microbatch's outputs."""
        batch = self._cut(data)
        if compute_loss:
            self._resolve_loss(loss_fn_idx)
        with eval_mode(self._layers):
            parts = self.training_step.evaluate(batch, losses=compute_loss, outputs=not compute_loss)
        return self._means(_arrays(parts), batch) if compute_loss else [out for _, out in parts]

    def _mean_or_all(self, mean: Tensor, parts: list[tuple[list[Tensor], Any]], batch: list[Microbatch]) -> Any:
        """The mean loss, or where there are several loss functions a list of each one's."""
        return mean if len(self._losses) == 1 else self._means(_arrays(parts), batch)

    def _means(self, losses: list[list[jax.Array]], batch: list[Microbatch]) -> Any:
        return self._one_or_all(losses, lambda each: self._pipeline.mean(each, batch))

    @staticmethod
    def _one_or_all(losses: list[list[jax.Array]], join: Callable[[list[jax.Array]], jax.Array]) -> Any:
        """The microbatches' losses joined, for the one loss function or a list for several."""
        joined = [Tensor(join(list(each))) for each in zip(*losses, strict=True)]
        return joined[0] if len(joined) == 1 else joined

    def _cut(self, data: Any) -> list[Microbatch]:
        return cut(data, self.plan.num_microbatches, self._microbatch_rows)

    def _resolve_loss(self, index: int) -> int:
        if not self._losses:
            raise ConfigError("this PipelineLayer has no loss_fn; give it one, or use eval_batch without compute_loss")
        if not isinstance(index, int) or not 0 <= index < len(self._losses):
            raise ConfigError(f"loss_fn_idx={index!r}, the PipelineLayer has {len(self._losses)} loss functions")
        return index

    # the model itself

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The PipelineLayer's."""
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """The PipelineLayer's."""
        return self._layers.set_state_dict(state_dict, *args, **kwargs)


def _arrays(parts: list[tuple[list[Tensor], Any]]) -> list[list[jax.Array]]:
    return [[loss._array for loss in losses] for losses, _ in parts]


def _stack(losses: list[jax.Array]) -> jax.Array:
    return jax.numpy.stack([loss.reshape(()) for loss in losses])


def _check_trainers(optimizer: Any, scaler: Any, lr_scheduler: Any) -> None:
    if not isinstance(optimizer, (Optimizer, MergingOptimizer)):
        raise TypeError(
            f"train_batch takes the optimizer that distributed_optimizer gave, got {type(optimizer).__name__}; to "
            "train without one, call forward_backward_pipeline"
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"train_batch takes an amp.GradScaler as its scaler, got {type(scaler).__name__}")
    if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(
            f"train_batch takes an optimizer.lr scheduler as its lr_scheduler, got {type(lr_scheduler).__name__}; give "
            "a learning rate to the optimizer"
        )


def _plan_for(layers: PipelineLayer, plan: Plan) -> Plan:
    """The plan with as many chunks a stage as the model has: a schedule of one chunk gives way to its alternative where
    there are several (1F1B to VPP), and one that is no V to the default of those where the model is laid out as a V.

    Raises ConfigError where model and plan contradict each other.
    """
    if layers.num_stages != plan.mesh.pp:
        raise ConfigError(
            f"the PipelineLayer has {layers.num_stages} stages, pp_degree is {plan.mesh.pp}; make them equal"
        )
    virtual = layers.get_num_virtual_stages()
    is_v = layers.stage_of_chunk != tuple(range(layers.num_stages)) * virtual
    return replace(plan, schedule=_schedule_for(plan, virtual, is_v), virtual_stages=virtual)


def _schedule_for(plan: Plan, virtual: int, is_v: bool) -> str | None:
    """The name of a plan's schedule for a model with this many chunks on each stage."""
    kind = plan.schedule_kind
    if plan.schedule is None:
        return None
    if kind.is_v and not is_v:
        raise ConfigError(f"schedule {kind.name} needs a model laid out as a V; give PipelineLayer use_dualpipev=True")
    if is_v:
        return kind.name if kind.is_v else default_schedule(is_v=True)
    other = SCHEDULES.get(kind.alternative)
    gives_way = virtual > kind.most_virtual and other is not None and other.takes(virtual) and not other.is_v
    return kind.alternative if gives_way else kind.name
