"""Placing a model over a mesh: parameters, buffers and optimizer state by the plan's strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.devices.abstract import mode
from polyreme.core.engine.backend import Device
from polyreme.core.host_array import HostArray
from polyreme.core.layout import Layout
from polyreme.core.meshes import HOST
from polyreme.distributed.communication import replicas
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import PlacementError
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter, Unmade, is_made
from polyreme.optimizer.on_disk import FileTier, StateEntry, StateFiles, check_room

KINDS = ("param", "use", "grad", "state")


def apply_plan(
    plan: Plan,
    model: Layer,
    devices: Sequence[Device] | None = None,
    chunks: Sequence[Layer] | None = None,
    *,
    streams: bool = False,
) -> Layout:
    """Put plan in force: move model's parameters and buffers onto the mesh and tell them where gradients and optimizer
    state go. Call it before the optimizer's first step. -> the layout, which `shard_batch` takes.

    chunks: under a pipeline (plan.mesh.pp > 1), the parts of the model in the order that data flows through them; what
    several parts share is at home on the stage of the first. streams: the caller's step brings parameters that the plan
    offloads (distributed.pipeline.streamed); those without values (nn.LazyGuard) get them here, one after another.
    Under other plans parameters without values stay without, and know where theirs go. If the mesh spans processes,
    each calls this, and parameters, buffers and the random key start as rank 0 has them. Raises PlacementError for a
    mesh that does not fit the devices, a dim that does not divide, or a model that a pipeline is asked of and that has
    no such parts.
    """
    _check_offload(plan, streams)
    layout = Layout(plan, devices)
    _check_host_memory(plan, layout)
    home = _homes(layout, model, chunks)
    placed = []
    for name, p in model.named_parameters():
        try:
            placed.append((p, parameter_layouts(home[id(p)], p)))
        except ValueError as error:
            raise type(error)(f"parameter {name}: {error}") from None
    holder = rng.default_generator.key_state()
    if replicas.spans_processes(layout.mesh) and not mode.is_on:
        replicas.agree([*(p for p, _ in placed if is_made(p)), *model.buffers(), holder])
    for p, shardings in placed:
        set_layouts(p, plan, shardings)
        if mode.is_on or (is_made(p) and not plan.streams):
            state.write(p, put(p._array, shardings["param"]))
    if plan.streams and not mode.is_on:
        _move_values(plan, [p for p, _ in placed])
    _keep_near(plan, [p for p, _ in placed])
    for buffer in model.buffers():
        state.write(buffer, put(buffer._array, home[id(buffer)].replicated()))
    state.write(holder, put(holder._array, layout.stageless()))
    layouts.active.layout = layout
    return layout


def place_on(layout: Layout, model: Layer) -> None:
    """Put a model that no step trains on the devices of a layout, which may be a stage's, by its plan; the plan in
    force stays what it is."""
    for p in model.parameters():
        p.layouts = parameter_layouts(layout, p)
        state.write(p, put(p._array, p.layouts["param"]))
    for buffer in model.buffers():
        state.write(buffer, put(buffer._array, layout.replicated()))


def parameter_layouts(layout: Layout, p: Parameter) -> dict[str, NamedSharding]:
    """The shardings of a parameter, its gradient and its optimizer state on a layout's mesh, of the parameter where an
    op reads it ("use"; absent if it is read as it is stored), and of the gradient that the op leaves ("sum"; absent if
    that is as it is read). State that the plan offloads is in host memory between updates. A running statistic is whole
    on every device."""
    if p.is_statistic:
        return dict.fromkeys(("param", "grad", "state"), layout.replicated())
    layouts = {kind: layout.sharding(kind, p.dims, p.shape) for kind in KINDS}
    if layout.plan.offload.get("state") == "host" and not _moves_by_entry(layout.plan, p):
        layouts["state"] = layouts["state"].with_memory_kind(HOST)
    if layouts["use"] == layouts["param"]:
        del layouts["use"]  # nothing to gather
    if layout.plan.sums_in_ring(p.dims, p.shape):
        layouts["sum"] = layouts["grad"]
    return layouts


def set_layouts(p: Parameter, plan: Plan, shardings: dict[str, NamedSharding]) -> None:
    """Tell a parameter where it and what belongs to it go under a plan: these layouts, and the files of its state."""
    p.layouts = shardings
    by_entry = _moves_by_entry(plan, p)
    in_files = (plan.offload.get("state") == "disk" or by_entry) and not p.is_statistic
    p.state_tier = FileTier(plan.offload_path, plan.offload_buffers, by_entry) if in_files else None


def _moves_by_entry(plan: Plan, p: Parameter) -> bool:
    """Whether experts of a parameter move one by one."""
    return "expert" in plan.offload and p.dims[:1] == ("expert",) and not p.is_statistic


def _keep_near(plan: Plan, parameters: Sequence[Parameter]) -> None:
    """Keep the state of the first parameters on the devices where state is offloaded in part."""
    if plan.offload_ratio == 1:
        return
    trained = [p for p in parameters if not (p.stop_gradient or p.is_statistic)]
    room = (1 - plan.offload_ratio) * sum(p.size for p in trained)
    for p in trained:
        room -= p.size
        if room < 0:
            return
        p.layouts["state"] = p.layouts["state"].with_memory_kind("device")
        p.state_tier = None


def _move_values(plan: Plan, parameters: Sequence[Parameter]) -> None:
    """Initialize parameters in the order in which they were made, each moved to its tier before the next."""
    if "expert" in plan.offload and not any(_moves_by_entry(plan, p) for p in parameters):
        raise PlacementError(
            "plan: offload 'expert', and the model has no parameters of experts (logical dim 'expert' in front); leave "
            "'expert' out"
        )
    on_disk = plan.offload.get("param") == "disk"
    filed = [p for p in parameters if _moves_by_entry(plan, p) or (on_disk and not p.is_statistic)]
    files = _parameter_files(plan, filed) if filed else None
    in_host = plan.offload.get("param") == "host"
    for p in sorted(parameters, key=_order_made):
        p.initialize()
        if files is not None and files.has(p):
            stored = files.tensor(p, "param").stored
            stored.fill(state.read(p))
            stored.keeper = files
            p._array = stored
        elif in_host and not p.is_statistic:
            p._array = HostArray(state.read(p), p.layouts["param"])
        else:
            state.write(p, put(p._array, p.layouts["param"]))


def _parameter_files(plan: Plan, parameters: Sequence[Parameter]) -> StateFiles:
    """Room in files for these parameters, once there is some for their gradients too."""
    tier = FileTier(plan.offload_path, plan.offload_buffers)
    # before anything is written; the optimizer's state is asked for when there is an optimizer
    check_room(tier, "parameters and gradients", 2 * sum(p.size * p.dtype.itemsize for p in parameters))
    files = StateFiles(tier, "parameters")
    entries = []
    for p in parameters:
        like = jax.ShapeDtypeStruct(tuple(p.shape), p.dtype, sharding=p.layouts["param"])
        entries.append((p, {"param": StateEntry(p.name, like, None, _moves_by_entry(plan, p))}))
    files.add(entries)
    return files


def _order_made(p: Parameter) -> int:
    return p._array.number if isinstance(p._array, Unmade) else -1


def _check_host_memory(plan: Plan, layout: Layout) -> None:
    kinds = [kind for kind, tier in plan.offload.items() if tier == "host"]
    if not kinds or mode.is_on:
        return
    for device in layout.mesh.devices.flat:
        if device.process_index == jax.process_index() and HOST not in memories_of(device):
            raise PlacementError(
                f"plan: offload {kinds} to host, and {device.platform} device {device.id} copies from no host memory "
                f"({HOST}), it has {sorted(memories_of(device))}; set those to disk where they go there, or leave them "
                "out"
            )


def memories_of(device: Device) -> set[str]:
    """The kinds of memory that a device of this process computes from or copies with."""
    return {memory.kind for memory in device.addressable_memories()}


def _check_offload(plan: Plan, streams: bool) -> None:
    if not plan.streams:
        return
    if not streams:
        raise PlacementError(
            f"plan: offload {plan.offload.plain()} needs a step that brings the weights of one chunk of the model "
            "after another: polyreme pretrain, or PlannedStep; use one of those, or sharding stage 3 to hold fewer "
            "parameters on each device"
        )


def _homes(layout: Layout, model: Layer, chunks: Sequence[Layer] | None) -> dict[int, Layout]:
    """id of every parameter and buffer -> the layout of the stage it lives on."""
    plan, everything = layout.plan, [*model.parameters(), *model.buffers()]
    if plan.mesh.pp == 1:
        return {id(t): layout for t in everything}
    stages = plan.stage_of_chunk
    if chunks is None or len(chunks) != len(stages):
        raise PlacementError(
            f"mesh {plan.mesh} with {plan.virtual_stages} chunks a stage needs a model in {len(stages)} chunks, "
            f"{type(model).__name__} has {0 if chunks is None else len(chunks)}; give a PipelineLayer with as many "
            "stages, or set pp to 1"
        )
    home: dict[int, Layout] = {}
    for stage, chunk in zip(stages, chunks, strict=True):
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            home.setdefault(id(tensor), layout.stages[stage])
    lost = [name for name, p in model.named_parameters() if id(p) not in home]
    if lost:
        raise PlacementError(f"no chunk of the pipeline holds {lost[:10]}; every parameter must be in a chunk's layer")
    return {id(t): home.get(id(t), layout.stages[0]) for t in everything}


def clear_plan() -> None:
    """Back to one device for Tensors made from now on; those already placed stay where they are."""
    layouts.active.layout = None
    holder = rng.default_generator.key_state()
    state.write(holder, jax.numpy.asarray(np.asarray(holder._array)))


def shard_batch(layout: Layout, array: Any, *dims: str | None) -> Tensor:
    """A Tensor from a global batch on the host, laid out by its logical dims ("batch", "seq").

    If the mesh spans processes, each gives the same batch; its devices take their parts.
    """
    host = np.asarray(array)
    return Tensor(put(host, layout.sharding("act", dims, host.shape)))
