"""Values that every process should hold alike: the first process's are taken, or all of them put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.distributed.communication import process_run
from polyreme.distributed.communication.group import Group, default_group
from polyreme.distributed.job import watchdog
from polyreme.errors import PlacementError


def spans_processes(mesh: Mesh) -> bool:
    """True if some device of the mesh belongs to another process."""
    return any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def agree(tensors: Iterable[TensorState], group: Group | None = None) -> None:
    """Copy the first process's values of Tensors that every process holds for itself to all processes of a group (all
    by default).

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


def gathered(array: Any, what: str) -> np.ndarray:
    """The value of an array that lies in pieces over processes; every process with a piece calls it.

    The watchdog watches the wait for them as that of any collective. Raises RankError where all processes have a piece
    and one of them calls something else, PlacementError for an array over no mesh.
    """
    if not isinstance(array.sharding, NamedSharding):
        raise PlacementError(f"{what}: this Tensor is spread over processes by {array.sharding}, which is over no mesh")
    ranks = sorted({device.process_index for device in array.sharding.device_set})
    world, name = default_group(), what.removesuffix("()")
    group = world.label if ranks == world.ranks else f"processes {ranks}"
    with watchdog.phase(name, group=group, ranks=tuple(ranks), detail=f"{array.dtype.name}{list(array.shape)}"):
        if ranks == world.ranks:
            process_run.agree(name, [array], world)
        return np.asarray(whole(array, NamedSharding(array.sharding.mesh, PartitionSpec())))


state.gathering.gather = gathered
