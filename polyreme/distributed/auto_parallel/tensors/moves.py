"""Moving Tensors along one dim of a mesh, alone or inside the inputs and outputs of a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import state
from polyreme.distributed.auto_parallel.tensors.kept import place
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.reshard import brought, form_for, reshard
from polyreme.eager.tensor import Tensor

Change = Callable[[Tensor], Tensor]


def placements_on(tensor: Tensor, mesh: ProcessMesh) -> list[Placement]:
    """A Tensor's placements if it lies on the mesh, else a whole copy everywhere."""
    lies = tensor.placements
    return list(lies) if lies is not None and tensor.process_mesh == mesh else [Replicate()] * mesh.ndim


def moved(tensor: Tensor, mesh: ProcessMesh, name: str, placement: Placement) -> Tensor:
    """The Tensor with this placement along the mesh dim of that name, as it is along the others; gradients flow."""
    placements = placements_on(tensor, mesh)
    placements[mesh.dim_names.index(name)] = placement
    return put_on(tensor, mesh, placements)


def put_on(tensor: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> Tensor:
    """The Tensor, dense or on any mesh, on this mesh with these placements; gradients flow."""
    if state.capturing() or state.recording():
        return reshard(tensor, mesh, placements)
    return brought(tensor, form_for("parallelize", mesh, placements, tensor.shape))


def place_tensor(tensor: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> None:
    """Put a parameter or buffer on a mesh in place: an optimizer that has it keeps it."""
    place(tensor, form_for("parallelize", mesh, placements, tensor.shape))


def first_tensor(values: Any, change: Change) -> Any:
    """values with change applied to the first Tensor in them: values itself, or an entry of a tuple or list."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (tuple, list)):
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                return _like(values, [*values[:i], change(value), *values[i + 1 :]])
    return values


def each_tensor(values: Any, change: Change) -> Any:
    """values with change applied to every Tensor in it, inside tuples, lists and dicts too."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (tuple, list)):
        return _like(values, [each_tensor(v, change) for v in values])
    if isinstance(values, dict):
        changed = copy.copy(values)  # a subclass stays one
        changed.update({k: each_tensor(v, change) for k, v in values.items()})
        return changed
    return values


def _like(values: Any, items: list[Any]) -> Any:
    """items as a list or tuple of the class of values, a named one too."""
    return values._make(items) if hasattr(values, "_make") else type(values)(items)
