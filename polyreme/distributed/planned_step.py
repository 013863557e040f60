"""A model and its optimizer laid out by a plan, and the step that trains them.

Pretraining runs it, prove compares it with one device's, verify compiles it without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.core.devices.abstract import mode
from polyreme.core.engine.backend import Device
from polyreme.core.layout import Layout
from polyreme.distributed.communication import replicas
from polyreme.distributed.pipeline.blocks import BlockPipeline
from polyreme.distributed.pipeline.chunks import in_chunks, in_small_chunks
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.pipeline.streamed import StreamedPipeline
from polyreme.distributed.placement import apply_plan
from polyreme.distributed.recompute_calls import follows_plan
from polyreme.distributed.whole_step import WholeStep
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, PlacementError
from polyreme.jit import to_static
from polyreme.jit.device_branches import counting_branches
from polyreme.mesh import Plan
from polyreme.mesh.strategy import BRANCHES
from polyreme.nn.layer import Layer
from polyreme.optimizer import Optimizer
from polyreme.optimizer.on_disk import StateFiles
from polyreme.training import Microbatch, Objective, StepPolicy, StepResult, TrainingStep, cut, share_by_counts


class PlannedStep:
    """The training step of a model under a plan, which is put in force.

    model: a function of (inputs, labels) that returns its mean loss, or whatever `loss` (model, inputs, labels) takes,
    which returns that or a pair of it and a dict of 0-D Tensors, told of in the parts of a StepResult; under a pipeline
    it has pipeline_items() and pipeline_loss(output, labels), or is a PipelineLayer with a loss_fn, and `loss` is an
    Objective. count: labels ->
    how many terms that mean is over, where it is not the same in every microbatch; the batch's loss is then the mean
    over all of its terms, however it is cut. optimizer: makes the optimizer of a model. devices: those of the plan's
    mesh, all by default. `step` is a WholeStep, or over stages and in blocks a PipelineStep. Raises ConfigError for a
    model that cannot be cut, or that recomputes nothing where the plan says so, and what placing raises; under a plan
    with state on disk, for an optimizer that keeps none.
    """

    layout: Layout

    model: Layer
    plan: Plan
    policy: StepPolicy
    optimizer: Optimizer

    def __init__(
        self,
        model: Layer,
        plan: Plan,
        optimizer: Callable[[Layer], Optimizer],
        policy: StepPolicy,
        devices: Sequence[Device] | None = None,
        loss: Callable[[Any, Any, Any], Any] | None = None,
        count: Callable[[Any], float] | None = None,
    ) -> None:
        self.model, self.plan, self.policy, self.count, self.loss = model, plan, policy, count, loss
        streams = plan.streams
        check_offload(plan, policy, has_loss=loss is not None and not mode.is_on)
        _check_recompute(model, plan)
        self.layers: PipelineLayer | None = None
        is_parted = streams or plan.in_blocks
        if plan.mesh.pp > 1 or is_parted:
            self.layers = in_small_chunks(model, plan) if is_parted else in_chunks(model, plan)
        chunks = self.layers and self.layers.get_model_chunks()
        self.layout = apply_plan(plan, model, devices, None if is_parted else chunks, streams=streams)
        self.optimizer = optimizer(model)
        policy.precision.decorate(model, self.optimizer)
        self.optimizer.create_state()
        _check_state_goes(plan, self.optimizer)
        self.step: Any
        if chunks is not None:
            if streams:
                parts = (chunks, [pipeline_loss(model)], self.layout, getattr(model, "pipeline_output", None))
                pipeline: Pipeline = StreamedPipeline(*parts, model.parameters())
            else:
                pipeline = self._pipeline(loss)
            self.step = PipelineStep(pipeline, policy, self.optimizer)
        else:
            objective = loss or loss_of
            self.step = WholeStep(
                TrainingStep(
                    lambda inputs, labels: _loss_and_figures(_on_all_devices(plan, objective, model, inputs, labels)),
                    self.optimizer,
                    policy,
                    self.layout.replicated(),
                    output=model,
                ),
                self.layout,
            )

    def _pipeline(self, loss: Any) -> Pipeline:
        """The chunks with a loss at their end, the model's own or an Objective's."""
        assert self.layers is not None
        if loss is not None and not isinstance(loss, Objective):
            leave = "compile to 'step'" if self.plan.in_blocks else "pp to 1"
            raise ConfigError(
                f"mesh {self.plan.mesh} with a loss of the whole model, which is run in parts: the last computes it "
                f"from what it gives; make it a training.Objective, leave it out, or set {leave}"
            )
        end = pipeline_loss(self.model) if loss is None else partial(loss.of_stream, self.model)
        told = () if loss is None else loss.told
        output = getattr(self.model, "pipeline_output", None)
        kind = BlockPipeline if self.plan.in_blocks else Pipeline
        return kind(self.layers.get_model_chunks(), [end], self.layout, output, told)

    @property
    def is_staged(self) -> bool:
        """True if the step is a program for each task of pipeline stages, or of chunks, not one."""
        return self.layers is not None

    @property
    def files(self) -> list[StateFiles]:
        """The files on disk; str() of each tells its size, its place, and the measured speed of that disk."""
        pipeline = self.step.pipeline if self.is_staged else None
        streamed = pipeline.files if isinstance(pipeline, StreamedPipeline) else []
        return [*streamed, *([self.optimizer.files] if self.optimizer.files is not None else [])]

    def __call__(self, inputs: Any, labels: Any) -> StepResult:
        """One optimizer step on a global batch, cut into the plan's microbatches."""
        return self.step(self.cut(inputs, labels))

    @property
    def fusions(self) -> list[str]:
        """Names of the patterns that calls were fused by in the last step, over stages chunk after chunk."""
        return self.step.fusions

    def evaluate(self, inputs: Any, labels: Any) -> Tensor:
        """The mean loss of a global batch, cut as a step cuts it, of the forward alone; 0-D. Whether Layers are in
        training mode is the caller's to say."""
        batch = self.cut(inputs, labels)
        losses = [loss._array for ([loss], _) in self.step.evaluate(batch)]
        return Tensor(Pipeline.mean(losses, batch))

    def evaluator(self, objective: Objective) -> Callable[[Any, Any], dict[str, np.ndarray]]:
        """A function of a global batch on the host (inputs, labels) that gives what an Objective tells of it, values
        with the batch's rows in dim 0, by forwards alone; in a process that has all of the plan's devices."""
        if self.is_staged:
            step = PipelineStep(self._pipeline(objective), self.policy)

            def of_stages(inputs: Any, labels: Any) -> dict[str, np.ndarray]:
                parts = [told for _, told in step.evaluate(_by_stage(objective, self._microbatches(inputs, labels)))]
                return {name: np.concatenate([part[name].numpy() for part in parts]) for name in objective.told}

            return of_stages

        @to_static
        def tell(inputs: Any, labels: Any) -> dict[str, Tensor]:
            with no_grad(), self.policy.precision.autocast():
                return objective(self.model, inputs, labels)[1]

        def of_whole(inputs: Any, labels: Any) -> dict[str, np.ndarray]:
            (part,) = self.step.place(cut([inputs, labels], 1, None))
            told, everywhere = tell(part.inputs, part.labels), self.layout.replicated()
            return {name: np.asarray(replicas.whole(value._array, everywhere)) for name, value in told.items()}

        return of_whole

    def outputs(self, inputs: Any) -> np.ndarray:
        """The model's outputs for inputs without labels, taken as one piece, on the host of every process, each of
        which must call it."""
        [(_, out)] = self.step.evaluate(cut([inputs, None], 1, None), losses=False, outputs=True)
        if self.is_staged:
            return self.step.pipeline.in_every_process(out)
        return np.asarray(replicas.whole(out._array, self.layout.replicated()))

    def check_rows(self, rows: int) -> None:
        """Raises PlacementError where a batch of so many rows has microbatches that do not divide over the devices of
        one mesh, each of which would compute all of one."""
        if not self.is_staged:
            self.layout.sharding("act", ("batch",), (rows // self.plan.num_microbatches,))

    def cut(self, inputs: Any, labels: Any) -> list[Microbatch]:
        """A global batch on the host in the plan's number of microbatches."""
        batch = self._microbatches(inputs, labels)
        return _by_stage(self.loss, batch) if self.is_staged and isinstance(self.loss, Objective) else batch

    def _microbatches(self, inputs: Any, labels: Any) -> list[Microbatch]:
        batch = cut([inputs, labels], self.plan.num_microbatches, None)
        return batch if self.count is None else share_by_counts(batch, [self.count(part.labels) for part in batch])


def check_offload(plan: Plan, policy: StepPolicy, *, has_loss: bool) -> None:
    """Raises ConfigError for a policy, or a loss beside the model's own, that the plan's offload does not serve."""
    if not plan.streams:
        return
    if has_loss:
        raise ConfigError(
            f"plan: offload of {_streamed(plan)} with a loss of its own: chunks end with the model's "
            "pipeline_loss(output, labels); leave that loss out, or the offload"
        )
    if policy.precision.level == "O2":
        raise ConfigError(
            f"plan: offload of {_streamed(plan)} with amp level O2, whose 16-bit parameters and float32 master weights "
            "are not moved; use level O1, or leave param out and offload state"
        )
    if policy.spikes is not None and policy.spikes.action != "skip":
        raise ConfigError(
            f"plan: offload of {_streamed(plan)} with spikes={policy.spikes.action!r}, which would bring every "
            "gradient into memory at once; use 'skip'"
        )
    if policy.precision.is_on and policy.precision.scaler is not None:
        raise ConfigError(
            f"plan: offload of {_streamed(plan)} with a loss scaler, which would bring every gradient into memory at "
            "once; use bfloat16, which needs none"
        )


def _streamed(plan: Plan) -> str:
    """The parts of the model that a plan offloads, for messages."""
    return " and ".join(kind for kind in ("param", "expert") if kind in plan.offload)


def _check_recompute(model: Layer, plan: Plan) -> None:
    if plan.recompute != "none" and not follows_plan(model):
        name = type(model).__name__
        raise ConfigError(
            f"plan: recompute {plan.recompute!r}, and {name} does not say which of its parts to recompute in backward; "
            "call distributed.fleet.utils.recompute in its forward, or give a PipelineLayer recompute_interval, and "
            "leave recompute out of the plan"
        )


def _check_state_goes(plan: Plan, optimizer: Optimizer) -> None:
    in_files = plan.offload.get("state") == "disk" or "expert" in plan.offload
    is_alone = "state" in plan.offload and not plan.streams
    has_none = (in_files and not optimizer.is_streamed) or (is_alone and not optimizer.keeps_arrays)
    if has_none and not mode.is_on:
        raise ConfigError(
            f"plan: offload {plan.offload.plain()}, and {type(optimizer).__name__} keeps no arrays for each parameter "
            "that could go there; leave offload out, or use another optimizer, such as AdamW"
        )


def _by_stage(objective: Objective, batch: Sequence[Microbatch]) -> list[Microbatch]:
    """Microbatches whose inputs are what the first stage takes, and whose labels what the last does."""
    return [
        part._replace(inputs=objective.rows(part.inputs), labels=objective.targets(part.inputs, part.labels))
        for part in batch
    ]


def _loss_and_figures(result: Any) -> tuple[list[Tensor], dict[str, Tensor] | None]:
    """([the loss], what is told beside it) of what a loss returns."""
    loss, told = result if isinstance(result, tuple) else (result, None)
    return [loss], None if told is None else {name: value.detach() for name, value in told.items()}


def _on_all_devices(plan: Plan, objective: Callable[[Any, Any, Any], Any], *args: Any) -> Any:
    """The objective; PlacementError where the plan has devices for branches, and the model runs none on them."""
    axes = [a for a in plan.strategy.rule("act").get(BRANCHES, ()) if plan.mesh.degree(a) > 1]
    with counting_branches() as runs:
        loss = objective(*args)
    unused = next((axis for axis in axes if axis not in runs), None)
    if unused is not None and state.capturing():
        raise PlacementError(
            f"mesh axis {unused!r} has degree {plan.mesh.degree(unused)} for branches, and {type(args[0]).__name__} "
            f"runs none (distributed.branches), so that its devices would repeat the same work; set {unused} to 1, or "
            "leave branch_axis out"
        )
    return loss


def loss_of(model: Any, inputs: Any, labels: Any) -> Tensor:
    """A model's mean loss on one mesh: its own result, or a PipelineLayer's with its loss_fn."""
    if isinstance(model, PipelineLayer):
        return pipeline_loss(model)(model(inputs), labels)
    return model(inputs, labels)


def pipeline_loss(model: Any) -> Callable[[Any, Any], Any]:
    """The loss (output, labels) of a model in chunks. Raises ConfigError for a PipelineLayer without one loss_fn."""
    loss = model.loss_fn if isinstance(model, PipelineLayer) else model.pipeline_loss
    if not callable(loss):
        raise ConfigError(
            f"a training step needs one loss, the PipelineLayer's loss_fn is {loss!r}; give it a function"
        )
    return loss
