"""A model's marks as a plan, and a model over several meshes, or cut by itself, as the stages of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.engine.choose import Chosen
from polyreme.distributed.auto_parallel.engine.strategy import Settled
from polyreme.distributed.auto_parallel.layers.shard_optimizer import STAGES, ShardingStage
from polyreme.distributed.auto_parallel.stages.marks import cut_by_marks
from polyreme.distributed.auto_parallel.tensors.kept import form_of
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import AXES, Plan
from polyreme.nn.layer import Layer

BATCH_NAMES = ("dp", "data", "batch", "fsdp", "sharding")
"""Names of mesh dims that split the batch, whatever else they split."""


@dataclass(frozen=True)
class Placed:
    """A model in its place: the layout, and under a pipeline its parts in the order that data flows, with what the
    model makes of the last one's output. chosen: how the planner came to the plan, if it did."""

    layout: Layout
    chunks: Sequence[Callable[[Any], Any]] = ()
    output: Callable[[Any], Any] = lambda out: out
    chosen: Chosen | None = None


def stage_meshes(layer: Layer) -> list[ProcessMesh]:
    """The meshes that the model's parameters and buffers were marked on, by their first device; none for an unmarked
    model. One that covers others is no stage of its own: what lies there is on every stage.

    Raises PlacementError for meshes that overlap otherwise, or are not alike.
    """
    names: dict[ProcessMesh, str] = {}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        form = form_of(tensor)
        if form is not None:
            names.setdefault(form.mesh, name)
    meshes = [m for m in names if not any(_covers(m, other) for other in names)]
    meshes.sort(key=lambda mesh: min(mesh.process_ids))
    for one, other in itertools.pairwise(meshes):
        if one.shape != other.shape or set(one.process_ids) & set(other.process_ids):
            raise PlacementError(
                f"{names[one]} is on the mesh {one}, {names[other]} on {other}: meshes of one model are stages of a "
                "pipeline, and must have the same shape and no device in common"
            )
    return meshes


def _covers(mesh: ProcessMesh, other: ProcessMesh) -> bool:
    return mesh != other and set(mesh.process_ids) > set(other.process_ids)


def plan_of_marks(layer: Layer, mesh: ProcessMesh, settled: Settled, num_stages: int = 1) -> Plan:
    """The plan that a marked model's mesh stands for: dims by their names where those are axes of a plan; of the
    others, one that splits no parameter splits the batch (dp), one that does is mp.

    Raises PlacementError where two dims of the mesh would be the same axis.
    """
    order: list[str] = ["pp"] if num_stages > 1 else []
    degrees = {"pp": num_stages} if num_stages > 1 else {}
    for (name, axis), degree in zip(_axes_of_dims(layer, mesh).items(), mesh.shape, strict=True):
        if axis in degrees:
            raise PlacementError(
                f"mesh {mesh}: dim {name!r} would be the axis {axis}, as another one is; name the dims by what they "
                f"split: any of {', '.join(AXES)}"
            )
        degrees[axis] = degree
        order.append(axis)
    if order == [axis for axis in AXES if axis in order]:
        order = list(AXES)
    order += [axis for axis in AXES if axis not in order]
    return Plan.from_degrees(order=order, **degrees, **settled.how)


def sharding_of_marks(layer: Layer, mesh: ProcessMesh, settled: Settled) -> ShardingStage | None:
    """The sharding that the strategy asks for over the batch's dim of a marked model's mesh; None for none.

    That dim is the one named "sharding", else the first that plan_of_marks takes for the batch's.

    Raises ConfigError for a mesh without such a dim, and for another degree than its size.
    """
    if not settled.sharding_stage:
        return None
    axes = _axes_of_dims(layer, mesh)
    names = [name for axis in ("sharding", "dp") for name in axes if axes[name] == axis]
    if not names:
        raise ConfigError(
            f"Strategy.sharding: the model is marked on the mesh {mesh}, each of whose dims splits parameters, and "
            f"none is named {' or '.join(map(repr, BATCH_NAMES))}; name the one to split over, or use a ShardingStage"
        )
    size = mesh.get_dim_size(names[0])
    if settled.sharding_degree not in (None, size):
        raise ConfigError(
            f"Strategy.sharding.degree={settled.sharding_degree}, and dim {names[0]!r} of the mesh that the model is "
            f"marked on has {size} devices; leave it out"
        )
    return STAGES[settled.sharding_stage](names[0], mesh)


def _axes_of_dims(layer: Layer, mesh: ProcessMesh) -> dict[str, str]:
    """The axis that each dim of a marked model's mesh stands for."""
    splitting = _splitting_dims(layer)
    return {
        name: name if name in AXES else "dp" if name in BATCH_NAMES or name not in splitting else "mp"
        for name in mesh.dim_names
    }


def _splitting_dims(layer: Layer) -> set[str]:
    """Names of the mesh dims that split a parameter."""
    names: set[str] = set()
    for p in layer.parameters():
        form = form_of(p)
        if form is not None:
            names |= {name for name, at in zip(form.mesh.dim_names, form.placements, strict=True) if at.is_shard()}
    return names


def on_stages(layer: Layer, meshes: Sequence[ProcessMesh], settled: Settled, inputs: Sequence[Tensor]) -> Placed:
    """A model whose parameters are marked on several meshes: each is a stage, and operations go where their parameters
    are. What lies on no stage of its own goes to the first that uses it.

    Raises ConfigError where data would have to go back, and for another pp_degree than there are meshes.
    """
    given = settled.stages
    if given is not None and given.degree not in (1, len(meshes)):
        raise ConfigError(
            f"Strategy.pipeline.pp_degree={given.degree}, and the model is marked on {len(meshes)} meshes; leave it out"
        )
    plan = plan_of_marks(layer, meshes[0], settled, len(meshes))
    sharding = sharding_of_marks(layer, meshes[0], settled)
    if sharding is not None:
        sharding.place(p for p in layer.parameters() if (form := form_of(p)) is not None and form.mesh in meshes)
    layout, chunks = cut_by_marks(layer, meshes, plan, microbatch(inputs, plan, settled))
    return Placed(layout, chunks)


def cuts_by_class(layer: Layer, chunks: int, settled: Settled) -> list[str] | None:
    """Names of the sublayers that end a chunk, where those of one class are to be dealt out evenly, earlier chunks
    getting one more; None where nothing says so. Raises ConfigError for a class of which there are too few."""
    wanted = "" if settled.stages is None else settled.stages.segment
    if not wanted:
        return None
    names = [name for name, each in layer.named_sublayers() if type(each).__name__ == wanted]
    if len(names) < chunks:
        raise ConfigError(
            f"Strategy.pipeline.vpp_seg_method={wanted!r}: {type(layer).__name__} has {len(names)} layers of that "
            f"class, for {chunks} chunks; name a class with more, or leave it out"
        )
    size, more = divmod(len(names), chunks)
    return [names[k * size + min(k, more) - 1] for k in range(1, chunks)]


def microbatch(inputs: Sequence[Tensor], plan: Plan, settled: Settled) -> Any:
    """The input of one microbatch, of several inputs a tuple."""
    parts = plan.num_microbatches
    if settled.stages is not None and settled.stages.microbatch_rows is not None:
        parts = max(1, inputs[0].shape[0] // (settled.stages.microbatch_rows * plan.batch_ways))
    cut = tuple(t[: -(-t.shape[0] // parts)] for t in inputs)
    return cut[0] if len(cut) == 1 else cut
