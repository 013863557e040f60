"""Groups: who takes part in a collective. Of processes, or of the devices along axes of a mesh.

A rank is a process. A group of processes works on Tensors that each process holds for itself; a group of
mesh axes works on the pieces of one global Tensor, and one process may drive all of its members.
"""

from __future__ import annotations

import datetime
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from polyreme import flags
from polyreme.distributed.communication.local_body import running
from polyreme.distributed.job.progress import WORLD
from polyreme.errors import ConfigError, PlacementError, did_you_mean

PROCESS_AXIS = "ranks"
"""The one axis of a process group's mesh."""

_TIMEOUT = datetime.timedelta(minutes=30)


class ReduceOp:
    """The operation of a reduction: sum, largest, smallest, product, or mean (AVG, of floating-point values)."""

    SUM, MAX, MIN, PROD, AVG = range(5)


REDUCE_NAMES = {getattr(ReduceOp, name): name for name in ("SUM", "MAX", "MIN", "PROD", "AVG")}


@dataclass(frozen=True, eq=False)
class Group:
    """Members of a collective and this process's place among them.

    rank: position in the group, -1 outside it. ranks: the members: ranks of processes, or, with axes, indexes of
    devices in the mesh. axes: mesh axes the group runs along; () for a group of processes. `new_group` and
    `axis_group` make it.
    """

    rank: int
    id: int
    ranks: list[int]
    name: str
    axes: tuple[str, ...] = ()
    mesh: Mesh | None = None
    seen: set[Any] = field(default_factory=set, repr=False)

    @property
    def nranks(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        """Number of members; -1 outside the group."""
        return self.nranks if self.is_member() else -1

    @property
    def label(self) -> str:
        """The name of the group in reports of the watchdog."""
        return WORLD if self.id == 0 else self.name

    @property
    def backend(self) -> str:
        """The backend that carries the data: GLOO between processors, NCCL between GPUs, XLA elsewhere."""
        return get_backend(self)

    def is_member(self) -> bool:
        """True if this process takes part."""
        return self.rank >= 0

    def get_group_rank(self, rank: int) -> int:
        """Position of a rank in the group, -1 if it is not in it."""
        return self.ranks.index(rank) if rank in self.ranks else -1

    def get_global_rank(self, rank: int) -> int:
        """The rank at a position of the group, -1 if there is no such position."""
        return self.ranks[rank] if 0 <= rank < self.nranks else -1

    def __str__(self) -> str:
        along = f", axes: {', '.join(self.axes)}" if self.axes else ""
        return f"rank: {self.rank}, nranks: {self.nranks}, id: {self.id}, ranks: {self.ranks}{along}; name: {self.name}"


class _Groups:
    """Every group by id; 0 is the group of all processes, there once init_parallel_env was called."""

    def __init__(self) -> None:
        self.by_id: dict[int, Group] = {}
        self.ids = itertools.count(1)
        self.alone = Group(0, 0, [0], "_default_pg")
        # joins the processes that a launcher started: distributed.parallel, which stands above
        self.join: Callable[[str], Group] | None = None

    def add(self, group: Group) -> Group:
        self.by_id[group.id] = group
        return group


groups: _Groups = _Groups()


def this_rank() -> int:
    """Rank of this process: jax's once the processes are joined, until then what the launcher said."""
    return jax.process_index() if jax.distributed.is_initialized() else flags.trainer_id()


def num_ranks() -> int:
    """Number of processes, in the same way."""
    return jax.process_count() if jax.distributed.is_initialized() else flags.trainers_num()


def is_initialized() -> bool:
    """True after init_parallel_env, until destroy_process_group."""
    return 0 in groups.by_id


def is_available() -> bool:
    """True: every build can run in parallel."""
    return True


def join_world() -> Group:
    """Make the group of all processes."""
    return groups.add(Group(this_rank(), 0, list(range(num_ranks())), "_default_pg"))


def default_group(what: str = "a group of all processes") -> Group:
    """The group of all processes. One process needs no init_parallel_env, and several that a launcher started join by
    themselves when something, named by what, first needs them; ConfigError after destroy_process_group, or where it is
    too late for that.
    """
    if is_initialized():
        return groups.by_id[0]
    if num_ranks() == 1:
        return groups.alone
    if jax.distributed.is_initialized() or groups.join is None:
        raise ConfigError(
            f"{what}: this is rank {this_rank()} of {num_ranks()} processes, whose group was destroyed or never made; "
            "call polyreme.distributed.init_parallel_env()"
        )
    return groups.join(what)


def resolve(group: Group | None, what: str) -> Group | None:
    """The group meant (all processes for None), or None with a warning where this process is not in it."""
    if group is None:
        return default_group(what) if running.body is None else running.body.group
    if not isinstance(group, Group):
        raise ConfigError(f"{what}: group must come from new_group() or axis_group(), got {type(group).__name__}")
    if not group.axes and group is not groups.alone and groups.by_id.get(group.id) is not group:
        raise ConfigError(f"{what}: group {group.name} (id {group.id}) was destroyed; make another with new_group()")
    if not group.is_member():
        warnings.warn(f"{what}: rank {this_rank()} is not in group {group.name} {group.ranks}", stacklevel=3)
        return None
    return group


def position(group: Group, rank: Any, what: str, role: str) -> int:
    """The position in the group of a rank in a role (src, dst); ConfigError if it is no member."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ConfigError(f"{what}: {role} must be a rank, a whole number, got {rank!r}")
    at = group.get_group_rank(rank)
    if at < 0:
        raise ConfigError(f"{what}: {role}={rank} is not in group {group.name}, whose ranks are {group.ranks}")
    return at


def new_group(
    ranks: Iterable[int] | None = None,
    backend: str | None = None,
    timeout: datetime.timedelta = _TIMEOUT,
    nccl_comm_init_option: int = 0,
    nccl_config: Any = None,
) -> Group:
    """A group of the processes with these ranks (all of them by default), in ascending order.

    Every process may call it; one that is not listed gets a group it is not a member of. timeout is there for the
    signature: how long a rank may hang is the watchdog's setting, for all groups alike. Raises ConfigError for ranks
    that do not exist or come twice, and for another backend or tuning than XLA gives.
    """
    if not isinstance(timeout, datetime.timedelta):
        raise ConfigError(f"new_group: timeout must be a datetime.timedelta, got {timeout!r}")
    if nccl_comm_init_option != 0 or nccl_config is not None:
        raise ConfigError("new_group: XLA sets NCCL up by itself; leave nccl_comm_init_option and nccl_config out")
    world = default_group("new_group")
    chosen = world.ranks if ranks is None else sorted(ranks)
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(world.ranks):
        raise ConfigError(
            f"new_group: ranks={chosen} must be different ranks out of 0..{world.nranks - 1}, at least one"
        )
    number = next(groups.ids)
    at = chosen.index(world.rank) if world.rank in chosen else -1
    made = Group(at, number, list(chosen), f"_default_pg{number}")
    if backend is not None and backend.upper() != get_backend(made):
        raise ConfigError(f"new_group: backend={backend!r}, but these devices talk through {get_backend(made)!r}")
    return groups.add(made)


def axis_group(mesh: Mesh, axes: Sequence[str] | str, name: str | None = None) -> Group:
    """The group of devices that differ from this process's first device along these axes of a mesh only.

    A collective on it works on every such group of the mesh at once. Raises PlacementError for an axis that the mesh
    has not, or a mesh without a device of this process.
    """
    wanted = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in wanted:
        if axis not in mesh.axis_names:
            raise PlacementError(f"axis_group: no mesh axis {axis!r}{did_you_mean(axis, mesh.axis_names)}")
    if not wanted or len(set(wanted)) != len(wanted):
        raise PlacementError(f"axis_group: axes={wanted} must name at least one mesh axis, each once")
    inside = tuple(str(a) for a in mesh.axis_names if a in wanted)
    mine = next((i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()), None)
    if mine is None:
        raise PlacementError(f"axis_group: none of the mesh's {mesh.devices.size} devices belongs to this process")
    index = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    at = np.unravel_index(mine, mesh.devices.shape)
    along = tuple(slice(None) if n in inside else at[i] for i, n in enumerate(mesh.axis_names))
    members = [int(i) for i in index[along].reshape(-1)]
    number = next(groups.ids)
    label = name or f"{'_'.join(inside)}_group{number}"
    return groups.add(Group(members.index(mine), number, members, label, inside, mesh))


def get_group(id: int = 0) -> Group | None:
    """The group with this id, 0 being all processes; None with a warning if there is none."""
    found = groups.by_id.get(id)
    if found is None:
        warnings.warn(f"Group {id} is not initialized.", stacklevel=2)
    return found


def get_rank(group: Group | None = None) -> int:
    """Rank of this process among all, or in a group (-1 outside it). 0 with one process, however many its devices.

    In a function that local_map runs: of the device that runs it, a Tensor.
    """
    if running.body is not None and (group is None or group.axes):
        return running.body.rank(() if group is None else group.axes)  # type: ignore[return-value]
    return this_rank() if group is None else group.rank


def get_world_size(group: Group | None = None) -> int:
    """Number of processes, or of members of a group (-1 outside it)."""
    return num_ranks() if group is None else group.world_size


def get_backend(group: Group | None = None) -> str:
    """The backend that carries the data of a group: "GLOO" between processors, "NCCL" between GPUs, "XLA" elsewhere."""
    if group is not None and not group.is_member():
        raise ConfigError(f"get_backend: rank {this_rank()} is not in group {group.name} {group.ranks}")
    platform = jax.default_backend()
    return {"cpu": "GLOO", "gpu": "NCCL", "cuda": "NCCL", "rocm": "NCCL"}.get(platform, "XLA")


def destroy_process_group(group: Group | None = None) -> None:
    """Forget a group, or all of them. The processes stay connected until they end, as XLA's devices span them."""
    if group is None or group.id == 0:
        groups.by_id.clear()
    elif groups.by_id.pop(group.id, None) is None:
        raise ConfigError(f"destroy_process_group: there is no group {group.name} (id {group.id})")


def process_mesh(group: Group) -> Mesh:
    """The mesh of a process group: each member's first device."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda d: d.id):
        first.setdefault(device.process_index, device)
    return Mesh(np.asarray([first[r] for r in group.ranks]), (PROCESS_AXIS,))
