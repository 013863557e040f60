"""Values that every process should hold alike: the first process's are taken, or all of them put together."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

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


def whole(array: jax.Array, where: Sharding) -> jax.Array:
    """An array that lies in pieces in several processes, whole in each; others as they are.

    where: the sharding of a whole array on the same devices. Every process with a piece calls it.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    return jax.jit(jnp.copy, out_shardings=where)(array)
