"""A model whose layers are marked on several meshes, cut into pipeline stages by those marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.stages.chunks import StageChunk, cut_into_stages
from polyreme.distributed.auto_parallel.stages.cut import ByStage
from polyreme.distributed.auto_parallel.stages.record import moved_to
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.kept import form_of, place
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.communication import replicas
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import PlacementError
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter
from polyreme.program.operation import Operation


def cut_by_marks(
    model: Layer, meshes: Sequence[ProcessMesh], plan: Plan, inputs: Any
) -> tuple[Layout, list[StageChunk]]:
    """The layout of a marked model's stages, and the chunks that they run: what Pipeline takes.

    meshes: of the stages, in the order that data flows, on which parameters lie. plan: with as many stages (pp), whose
    other axes above 1, in the plan's order, are the dims above 1 of each mesh. inputs: as cut_into_stages takes them.

    An operation goes where its parameters are, one without parameters where its inputs are, and one that reshards to a
    stage's mesh there. Parameters that are on no mesh, or on one that covers several stages, go to the first stage that
    reads them. The plan is not put in force. Raises PlacementError for meshes that are not what the plan says,
    ConfigError if data would have to go back to a stage before, and what cut_into_stages raises.
    """
    layout = Layout(plan, _devices(meshes, plan))
    marks = {id(t): form_of(t) for t in (*model.parameters(), *model.buffers())}
    stage_of = {key: meshes.index(form.mesh) for key, form in marks.items() if form is not None and form.mesh in meshes}

    def moves(op: Operation) -> int | None:
        target = moved_to(op)
        return meshes.index(target.mesh) if target is not None and target.mesh in meshes else None

    rule = ByStage(stage_of, plan.stage_of_chunk, moves)
    with layouts.using(layout.stages[0]):
        chunks = cut_into_stages(model, inputs, len(plan.stage_of_chunk), rule)
    _settle(model, chunks, layout, meshes, stage_of)
    return layout, chunks


def _devices(meshes: Sequence[ProcessMesh], plan: Plan) -> list[Any]:
    """All devices, in the order that the plan's mesh has them."""
    inner = [axis for axis in plan.mesh.order if axis != "pp"]
    sizes = [plan.mesh.degree(axis) for axis in inner]
    for mesh in meshes:
        if len(meshes) != plan.mesh.pp or [n for n in mesh.shape if n > 1] != [n for n in sizes if n > 1]:
            raise PlacementError(
                f"layers are marked on {len(meshes)} meshes, one of them {mesh}, and the plan's mesh is {plan.mesh}; "
                "give it a stage (pp) for each mesh, and the mesh's dims as its other axes"
            )
    grids = [np.asarray(mesh.jax_mesh.devices).reshape(sizes) for mesh in meshes]
    return list(np.stack(grids, plan.mesh.order.index("pp")).flat)


def _settle(
    model: Layer, chunks: Sequence[StageChunk], layout: Layout, meshes: Sequence[ProcessMesh], stage_of: dict[int, int]
) -> None:
    """Place every parameter and buffer on one stage, and register that with the runtime."""
    stages = layout.plan.stage_of_chunk
    home = dict(stage_of)
    for stage, chunk in zip(stages, chunks, strict=True):
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            home.setdefault(id(tensor), stage)
    holder = rng.default_generator.key_state()
    everything = [*model.parameters(), *model.buffers()]
    loose = [t for t in everything if id(t) not in stage_of]
    if replicas.spans_processes(layout.mesh):
        replicas.agree([*loose, holder])
    for tensor in loose:
        place(tensor, _form_on(meshes[home[id(tensor)]], tensor))
    for tensor in everything:
        if isinstance(tensor, Parameter):
            tensor.layouts = {k: _rename(s, layout.stages[home[id(tensor)]]) for k, s in tensor.layouts.items()}
    state.write(holder, put(holder._array, layout.replicated()))


def _form_on(mesh: ProcessMesh, tensor: Tensor) -> Form:
    """The placement along the dims of the same name of a mesh that contains this one; whole for a Tensor on no mesh."""
    have = form_of(tensor)
    along: dict[str, Placement] = {}
    if have is not None:
        along = dict(zip(have.mesh.dim_names, have.joined().placements, strict=True))
    return Form(mesh, tuple(along.get(name, Replicate()) for name in mesh.dim_names), tuple(tensor.shape))


def _rename(sharding: NamedSharding, stage: Layout) -> NamedSharding:
    """The same layout in the names of a stage's mesh."""
    theirs = [name for name, size in sharding.mesh.shape.items() if size > 1]
    ours = [name for name, size in stage.mesh.shape.items() if size > 1]
    names = dict(zip(theirs, ours, strict=True))

    def entry(found: Any) -> Any:
        axes = () if found is None else (found,) if isinstance(found, str) else tuple(found)
        return tuple(names[axis] for axis in axes if axis in names) or None

    return NamedSharding(stage.mesh, PartitionSpec(*map(entry, sharding.spec)), memory_kind=sharding.memory_kind)
