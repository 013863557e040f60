"""Where a model of an Engine or a DistModel lies: by its own marks, or data parallel over all devices.

Floor: 5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from polyreme.autograd.recompute import Keep
from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.backend import Device
from polyreme.core.layout import Layout
from polyreme.core.meshes import HOST
from polyreme.distributed.auto_parallel.process_mesh import ProcessMesh, get_mesh, mesh_of
from polyreme.distributed.auto_parallel.strategy import Settled
from polyreme.distributed.communication import replicas
from polyreme.distributed.fleet.model import again
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.placement import KINDS, apply_plan
from polyreme.eager.host import put
from polyreme.errors import ConfigError, PlacementError, did_you_mean
from polyreme.mesh import AXES, Plan
from polyreme.nn.layer import Layer

_log = logging.getLogger("polyreme.distributed.auto_parallel")
BATCH_NAMES = ("dp", "data", "batch", "fsdp", "sharding")
"""Names of mesh dims that split the batch, whatever else they split."""


@dataclass(frozen=True)
class Placed:
    """A model in its place: the layout, and under a pipeline its parts in the order that data flows, with what the
    model makes of the last one's output."""

    layout: Layout
    chunks: Sequence[Callable[[Any], Any]] = ()
    output: Callable[[Any], Any] = lambda out: out


def place(layer: Layer, settled: Settled) -> Placed:
    """Put the model on devices: as its parameters are marked, else by a plan for all devices of the global mesh, or of
    the machine. It is put in force by `using`, not for good.

    Raises PlacementError for parameters on meshes that do not go together, and for degrees that do not fit.
    """
    with layouts.using(None):
        mesh = marked_mesh(layer)
        if mesh is not None:
            placed = Placed(_keep_marks(layer, mesh, settled))
        else:
            devices = devices_of(get_mesh())
            placed = _by_plan(layer, settled.plan_for(len(devices)), devices)
    _recompute(layer, settled, placed.layout.plan)
    _log.info("%s lies by\n%s", type(layer).__name__, placed.layout.plan)
    return placed


def devices_of(mesh: ProcessMesh | None) -> list[Device]:
    """The devices of a mesh, all there are without one."""
    return jax.devices() if mesh is None else list(mesh.jax_mesh.devices.flat)


def place_by_plan(layer: Layer, plan: Plan, settled: Settled) -> Placed:
    """Put the model on devices as a plan says, by the logical dims of its parameters."""
    with layouts.using(None):
        placed = _by_plan(layer, plan, devices_of(get_mesh()))
    _recompute(layer, settled, plan)
    return placed


def _by_plan(layer: Layer, plan: Plan, devices: Sequence[Device]) -> Placed:
    if plan.mesh.pp == 1:
        return Placed(apply_plan(plan, layer, devices))
    chunks = in_chunks(layer, plan).get_model_chunks()
    output = getattr(layer, "logits", None) if hasattr(layer, "pipeline_items") else None
    layout = apply_plan(plan, layer, devices, chunks)
    return Placed(layout, chunks) if output is None else Placed(layout, chunks, output)


# what is marked


def marked_mesh(layer: Layer) -> ProcessMesh | None:
    """The mesh that the model's parameters and buffers were marked on; None for an unmarked model.

    Raises PlacementError for two meshes of other devices.
    """
    found: dict[ProcessMesh, str] = {}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        sharding = state.read(tensor).sharding
        mesh = mesh_of(sharding.mesh) if isinstance(sharding, NamedSharding) else None
        if mesh is not None:
            found.setdefault(mesh, name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise PlacementError(
            f"{first} is on the mesh {one}, {second} on {other}: layers on several meshes are stages of a pipeline; "
            "switch strategy.pipeline on, or mark all on one mesh"
        )
    return next(iter(found), None)


def _keep_marks(layer: Layer, mesh: ProcessMesh, settled: Settled) -> Layout:
    """The layout of a marked model's mesh; unmarked parameters and buffers get a copy on each of its devices."""
    plan = plan_of_marks(layer, mesh, settled)
    layout = Layout(plan, devices_of(mesh))
    whole = layout.replicated()
    spans = replicas.spans_processes(layout.mesh)
    loose = [t for t in (*layer.parameters(), *layer.buffers()) if not _is_on(t, layout)]
    holder = rng.default_generator.key_state()
    if spans:
        replicas.agree([*loose, holder])
    for tensor in (*loose, holder):
        state.write(tensor, put(state.read(tensor), whole))
    for p in layer.parameters():
        p.layouts = {**dict.fromkeys(KINDS[:1] + KINDS[2:], p._array.sharding), **p.layouts}
        if "state" in plan.offload:
            p.layouts["state"] = p.layouts["state"].with_memory_kind(HOST)
    return layout


def plan_of_marks(layer: Layer, mesh: ProcessMesh, settled: Settled) -> Plan:
    """The plan that a marked model's mesh stands for: dims by their names where those are axes of a plan; of the
    others, one that splits no parameter splits the batch (dp), one that does is mp.

    Raises PlacementError where two dims of the mesh would be the same axis.
    """
    splitting = _splitting_dims(layer)
    order, degrees = [], {}
    for name, degree in zip(mesh.dim_names, mesh.shape, strict=True):
        axis = name if name in AXES else "dp" if name in BATCH_NAMES or name not in splitting else "mp"
        if axis in degrees:
            raise PlacementError(
                f"mesh {mesh}: dim {name!r} would be the axis {axis}, as another one is; name the dims by what they "
                f"split: any of {', '.join(AXES)}"
            )
        degrees[axis] = degree
        order.append(axis)
    order += [axis for axis in AXES if axis not in order]
    return Plan.from_degrees(order=order, **degrees, **settled.how)


def _splitting_dims(layer: Layer) -> set[str]:
    """Names of the mesh dims that split a parameter."""
    found: set[str] = set()
    for p in layer.parameters():
        sharding = state.read(p).sharding
        for entry in sharding.spec if isinstance(sharding, NamedSharding) else ():
            found.update((entry,) if isinstance(entry, str) else entry or ())
    return found


def _is_on(tensor: Any, layout: Layout) -> bool:
    sharding = state.read(tensor).sharding
    return isinstance(sharding, NamedSharding) and sharding.device_set == set(layout.mesh.devices.flat)


# recompute


def _recompute(layer: Layer, settled: Settled, plan: Plan) -> None:
    """Wrap the sublayers that are named; without names, check that the model does what the plan says."""
    layers = dict(layer.named_sublayers())
    for name in settled.recompute_layers:
        if name not in layers:
            raise ConfigError(
                f"Strategy.recompute.checkpoints names {name!r}, which is no sublayer of "
                f"{type(layer).__name__}{did_you_mean(name, layers)}"
            )
    for name in settled.recompute_layers:
        layers[name].forward = again(layers[name].forward, Keep())
    follows = any(hasattr(s, "recompute") for s in layer.sublayers(include_self=True))
    if settled.recompute and not settled.recompute_layers and plan.recompute != "none" and not follows:
        raise ConfigError(
            f"Strategy.recompute: {type(layer).__name__} does not say what of it is run again in backward; name the "
            "sublayers in checkpoints, or call recompute in its forward"
        )
