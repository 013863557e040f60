"""Placement of the model of an Engine or a DistModel: by its own marks, or data parallel over all devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.engine.backend import Device
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.engine.choose import choose_plan
from polyreme.distributed.auto_parallel.engine.stages import (
    Placed,
    cuts_by_class,
    microbatch,
    on_stages,
    plan_of_marks,
    sharding_of_marks,
    stage_meshes,
)
from polyreme.distributed.auto_parallel.engine.strategy import Settled
from polyreme.distributed.auto_parallel.layers.shard_optimizer import shard_optimizer
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import form_of
from polyreme.distributed.auto_parallel.tensors.kept import place as place_tensor
from polyreme.distributed.auto_parallel.tensors.placements import Replicate
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, get_mesh
from polyreme.distributed.communication import replicas
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.placement import apply_plan
from polyreme.distributed.recompute_calls import follows_plan, recompute_sublayers
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.planner import Cluster


class TrainingBatch(NamedTuple):
    """A model's training data: Tensors or specs of a global batch, with the loss and the optimizer."""

    inputs: Sequence[Any]
    labels: Sequence[Any] = ()
    loss: Any = None
    optimizer: Any = None


_log = logging.getLogger("polyreme.distributed.auto_parallel")


def needs_batch(layer: Layer, settled: Settled) -> bool:
    """Whether the model's place depends on the shapes of a batch: it is cut into stages by itself, or planned."""
    stages = settled.stages is not None and settled.stages.degree > 1
    cut = (stages or len(stage_meshes(layer)) > 1) and not hasattr(layer, "pipeline_items")
    return settled.is_planned or (cut and not isinstance(layer, PipelineLayer))


def place(layer: Layer, settled: Settled, batch: TrainingBatch, cluster: Cluster | None = None) -> Placed:
    """Put the model on devices: as its parameters are marked, else by a plan for all devices of the global mesh, or of
    the machine: the planner's, if the strategy asks for it. It is put in force by `using`, not for good.

    batch: what the model trains on, where needs_batch says so. cluster: what the devices are like, for the planner.
    Raises PlacementError for parameters on meshes that do not go together, and for degrees that do not fit; ConfigError
    where marks and a planner would both say where parameters go.
    """
    _recompute(layer, settled)
    with layouts.using(None):
        meshes = stage_meshes(layer)
        if settled.is_planned and meshes:
            raise ConfigError(
                f"strategy 'auto': {type(layer).__name__} is marked on the mesh {meshes[0]}; take the marks away for "
                "the planner to choose, or give a Strategy without auto_mode='full'"
            )
        if len(meshes) > 1:
            placed = on_stages(layer, meshes, settled, batch.inputs)
        elif meshes:
            placed = Placed(_keep_marks(layer, meshes[0], settled, batch.optimizer))
        else:
            placed = _unmarked(layer, settled, batch, cluster)
    _log.info("%s lies by\n%s", type(layer).__name__, placed.layout.plan)
    return placed


def _unmarked(layer: Layer, settled: Settled, batch: TrainingBatch, cluster: Cluster | None) -> Placed:
    devices = devices_of(get_mesh())
    if not settled.is_planned:
        return by_plan(layer, settled.plan_for(len(devices)), devices, settled, batch.inputs)
    with settled.precision.autocast():
        chosen = choose_plan(layer, *batch, devices=devices, cluster=cluster)
    plan = chosen.prepare()
    _log.info("%s", chosen)
    return replace(by_plan(layer, plan, devices, settled, batch.inputs), chosen=chosen)


def plan_of(layer: Layer, settled: Settled) -> Plan:
    """The plan that place would put the model on devices by, where no batch decides it."""
    meshes = stage_meshes(layer)
    if meshes:
        return plan_of_marks(layer, meshes[0], settled, len(meshes))
    return settled.plan_for(len(devices_of(get_mesh())))


def devices_of(mesh: ProcessMesh | None) -> list[Device]:
    """The devices of a mesh, all there are without one."""
    return jax.devices() if mesh is None else list(mesh.jax_mesh.devices.flat)


def by_plan(layer: Layer, plan: Plan, devices: Sequence[Device], settled: Settled, inputs: Sequence[Tensor]) -> Placed:
    """The model on devices as a plan says, by the logical dims of its parameters."""
    if plan.mesh.pp == 1:
        return Placed(apply_plan(plan, layer, devices))
    if isinstance(layer, PipelineLayer) or hasattr(layer, "pipeline_items"):
        chunks: Sequence[Any] = in_chunks(layer, plan).get_model_chunks()
        output = getattr(layer, "pipeline_output", None) if hasattr(layer, "pipeline_items") else None
    else:
        with layouts.using(Layout(plan, devices).stages[0]):
            count = len(plan.stage_of_chunk)
            chunks = cut_into_stages(
                layer, microbatch(inputs, plan, settled), count, cuts_by_class(layer, count, settled)
            )
        output = None
    layout = apply_plan(plan, layer, devices, chunks)
    return Placed(layout, chunks) if output is None else Placed(layout, chunks, output)


def _keep_marks(layer: Layer, mesh: ProcessMesh, settled: Settled, optimizer: Any) -> Layout:
    """The layout of a marked model's mesh; unmarked parameters and buffers get a copy on each of its devices."""
    plan = plan_of_marks(layer, mesh, settled)
    layout = Layout(plan, devices_of(mesh))
    loose = [t for t in (*layer.parameters(), *layer.buffers()) if form_of(t) is None]
    holder = rng.default_generator.key_state()
    if replicas.spans_processes(layout.mesh):
        replicas.agree([*loose, holder])
    for tensor in loose:
        place_tensor(tensor, Form(mesh, (Replicate(),) * mesh.ndim, tuple(tensor.shape)))
    state.write(holder, put(state.read(holder), layout.replicated()))
    stage = sharding_of_marks(layer, mesh, settled)
    if stage is not None and optimizer is not None:
        shard_optimizer(optimizer, stage, optimizer.gradient_accumulation_steps)
    elif stage is not None:
        stage.place(layer.parameters())
    return layout


# recompute


def _recompute(layer: Layer, settled: Settled) -> None:
    """Wrap the sublayers that are named; without names, check that the model does what the plan says."""
    recompute_sublayers(layer, settled.recompute_layers, "Strategy.recompute.checkpoints")
    if settled.recompute and not settled.recompute_layers and not follows_plan(layer):
        raise ConfigError(
            f"Strategy.recompute: {type(layer).__name__} does not say which of its parts to recompute in backward; "
            "name the sublayers in checkpoints, or call recompute in its forward"
        )
