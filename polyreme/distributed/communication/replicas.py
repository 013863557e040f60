"""Values that every process should hold alike: the first process's are taken."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax.sharding import Mesh

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.distributed.communication import process_run
from polyreme.distributed.communication.group import Group, default_group


def spans_processes(mesh: Mesh) -> bool:
    """True if some device of the mesh belongs to another process."""
    return any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def agree(tensors: Iterable[TensorState], group: Group | None = None) -> None:
    """Give every process of a group (all by default) the first one's values of Tensors that each holds for itself.

    Those that span the processes already are left alone. Every process of the group calls it with as many Tensors.
    """
    found = default_group() if group is None else group
    for tensor in tensors:
        if tensor._array.is_fully_addressable:
            state.write(tensor, process_run.run("broadcast", [tensor._array], found, root=0)[0])
