"""ProcessMesh: devices in a grid whose dims have names, and the mesh that is in force.

Process id i is jax.devices()[i]: one process drives all its devices, and tensors lie in pieces on them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from polyreme.distributed.communication.group import Group, axis_group, default_group
from polyreme.distributed.parallel import is_waited_for, join_early
from polyreme.errors import ConfigError, PlacementError, did_you_mean

_unique_ids: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
_meshes: dict[Mesh, ProcessMesh] = {}


class ProcessMesh:
    """An n-dimensional grid of devices.

    mesh: nested lists or an ndarray of distinct process ids (process id i is jax.devices()[i]); or give shape and
    process_ids. dim_names: one name per dim; "d0", "d1", ... by default. Two meshes are equal if shape and process ids
    are; names do not count, as placements go by position. Raises ConfigError for a mesh of anything else, ids that are
    no whole numbers, negative or repeated, and names that are repeated or too few or many. Devices are looked up when a
    tensor is first put on the mesh, so that a mesh of devices that are not here can be described. A rank that a
    launcher started joins the others here, if it has used no device yet.

    >>> mesh = ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
    >>> mesh.shape, mesh["y"].process_ids, mesh[:, 1].process_ids
    ([2, 3], [2, 4, 5], [4, 1])
    """

    def __init__(
        self,
        mesh: Any = None,
        dim_names: Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        process_ids: Iterable[int] | None = None,
    ) -> None:
        self._mesh = _grid(mesh, shape, process_ids)
        self._names = _names(dim_names, self._mesh.ndim)
        self._value = (tuple(self._mesh.shape), tuple(int(i) for i in self._mesh.reshape(-1)))
        self._jax_mesh: Mesh | None = None
        self._groups: dict[str, Group] = {}
        join_early("ProcessMesh")

    @property
    def mesh(self) -> np.ndarray:
        """The process ids as an ndarray, a copy."""
        return self._mesh.copy()

    @property
    def shape(self) -> list[int]:
        """Number of devices along each dim."""
        return list(self._mesh.shape)

    @property
    def ndim(self) -> int:
        return self._mesh.ndim

    @property
    def size(self) -> int:
        """Number of devices."""
        return self._mesh.size

    @property
    def dim_names(self) -> list[str]:
        return list(self._names)

    @property
    def process_ids(self) -> list[int]:
        """Every id, the last dim varying fastest."""
        return list(self._value[1])

    @property
    def unique_id(self) -> int:
        """A number that meshes of the same shape and process ids share."""
        return _unique_ids.setdefault(self._value, len(_unique_ids))

    @property
    def here(self) -> int:
        """The first process id whose device this process drives; the first of all if it drives none."""
        devices, here = jax.devices(), jax.process_index()
        mine = (i for i in self._value[1] if i < len(devices) and devices[i].process_index == here)
        return next(mine, self._value[1][0])

    @property
    def jax_mesh(self) -> Mesh:
        """The jax Mesh of these devices, with these names. PlacementError if a device is not there."""
        if self._jax_mesh is None:
            if is_waited_for():
                default_group(str(self))
            devices = jax.devices()
            missing = [i for i in self._value[1] if i >= len(devices)]
            if missing:
                raise PlacementError(
                    f"{self} needs process ids {missing}, but there are {len(devices)} devices "
                    f"(0..{len(devices) - 1}); set CPU_NUM for more virtual ones, or use a smaller mesh"
                )
            grid = np.asarray(devices, dtype=object)[self._mesh]
            self._jax_mesh = Mesh(grid, tuple(self._names))
            _meshes.setdefault(self._jax_mesh, self)
        return self._jax_mesh

    def contains(self, process_id: int) -> bool:
        """True if the process id is on the mesh."""
        return process_id in self._value[1]

    def empty(self) -> bool:
        """False: a mesh has at least one device."""
        return False

    def get_dim_size(self, dim: str | int) -> int:
        """Number of devices along a dim, given by name or index."""
        return int(self._mesh.shape[self._dim(dim)])

    dim_size = get_dim_size

    def get_rank_by_dim_and_process_id(self, dim: str | int, process_id: int) -> int:
        """The process id's coordinate along a dim; -1 if it is not on the mesh."""
        at = np.argwhere(self._mesh == process_id)
        return int(at[0][self._dim(dim)]) if len(at) else -1

    def get_mesh_with_dim(self, dim_name: str, index: Any = None) -> ProcessMesh:
        """The mesh with one dim moved first; with an index, that dim cut down to it (and gone if it is a number)."""
        at = self._dim(dim_name)
        order = [at, *(i for i in range(self.ndim) if i != at)]
        moved = ProcessMesh(self._mesh.transpose(order), [self._names[i] for i in order])
        return moved if index is None else moved[index]

    def get_submesh_with_dim(self, dim_name: str) -> ProcessMesh:
        """The 1-D mesh along a dim that holds this process's first device on the mesh."""
        at = self._dim(dim_name)
        here = np.argwhere(self._mesh == self.here)[0]
        along = tuple(slice(None) if i == at else int(here[i]) for i in range(self.ndim))
        return ProcessMesh(self._mesh[along], [self._names[at]])

    def get_group(self, dim_name: str | None = None) -> Group:
        """The group of devices along a dim, for collectives; dim_name may be left out of a 1-D mesh."""
        if dim_name is None and self.ndim > 1:
            raise ConfigError(f"get_group: {self} has {self.ndim} dims; name one of {', '.join(self._names)}")
        name = self._names[0 if dim_name is None else self._dim(dim_name)]
        if name not in self._groups:
            self._groups[name] = axis_group(self.jax_mesh, name)
        return self._groups[name]

    def __getitem__(self, index: Any) -> ProcessMesh:
        if isinstance(index, str):
            return self.get_submesh_with_dim(index)
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > self.ndim or not all(
            isinstance(p, (int, np.integer, slice)) and not isinstance(p, bool) for p in parts
        ):
            raise ConfigError(
                f"{self} cannot be indexed with {index!r}; give a dim's name, a whole number or slice per dim, or a "
                "tuple of them"
            )
        kept = [n for i, n in enumerate(self._names) if i >= len(parts) or isinstance(parts[i], slice)]
        found = self._mesh[tuple(parts)]
        if not np.size(found):
            raise ConfigError(f"{self} indexed with {index!r} has no devices")
        return ProcessMesh(np.atleast_1d(found), kept or None)

    def _dim(self, dim: str | int) -> int:
        """Index of a dim given by name or index; ConfigError if there is none."""
        if isinstance(dim, str) and dim in self._names:
            return self._names.index(dim)
        if isinstance(dim, (int, np.integer)) and not isinstance(dim, bool) and -self.ndim <= dim < self.ndim:
            return int(dim) % self.ndim
        raise ConfigError(
            f"a ProcessMesh of shape {self.shape} with dims {list(self._names)} has no dim {dim!r}"
            f"{did_you_mean(dim, self._names)}"
        )

    def __enter__(self) -> ProcessMesh:
        _current.inside.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.inside.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessMesh) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __copy__(self) -> ProcessMesh:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> ProcessMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh, (self._mesh, list(self._names))

    def __repr__(self) -> str:
        return f"ProcessMesh(shape={self.shape}, process_ids={self.process_ids}, dim_names={self.dim_names})"

    def __str__(self) -> str:
        return f"shape {self.shape}, process_ids {self.process_ids}, dim_names {self.dim_names}"


def _grid(mesh: Any, shape: Sequence[int] | None, process_ids: Iterable[int] | None) -> np.ndarray:
    if mesh is None:
        if shape is None or process_ids is None:
            raise ConfigError("ProcessMesh needs mesh, or both shape and process_ids")
        if not all(isinstance(n, (int, np.integer)) and n > 0 for n in shape):
            raise ConfigError(f"ProcessMesh: shape={list(shape)} must be whole numbers of at least 1")
        mesh = np.asarray(list(process_ids))
        if mesh.size != math.prod(shape):
            raise ConfigError(f"ProcessMesh: shape={list(shape)} does not hold the {mesh.size} process_ids given")
        mesh = mesh.reshape(list(shape))
    if not isinstance(mesh, (list, np.ndarray)):
        raise ConfigError(f"ProcessMesh: mesh must be a list or an ndarray, got {type(mesh).__name__}")
    try:
        grid = np.asarray(mesh)
    except ValueError:
        raise ConfigError(
            f"ProcessMesh: {mesh!r} is not a grid; nested lists of one level must be equally long"
        ) from None
    if grid.dtype.kind not in "iu" or not grid.size or not grid.ndim:
        raise ConfigError(f"ProcessMesh: {mesh!r} must hold process ids, whole numbers, at least one")
    if grid.min() < 0 or len(np.unique(grid)) != grid.size:
        raise ConfigError(f"ProcessMesh: process ids {grid.tolist()} must be distinct and not negative")
    return grid.astype(np.int64)


def _names(given: Sequence[str] | None, ndim: int) -> tuple[str, ...]:
    if given is None:
        return tuple(f"d{i}" for i in range(ndim))
    names = tuple(given)
    if isinstance(given, str) or len(names) != ndim or len(set(names)) != ndim:
        raise ConfigError(f"ProcessMesh: dim_names={given!r} must be {ndim} different names, one per dim")
    if not all(isinstance(n, str) for n in names):
        raise ConfigError(f"ProcessMesh: dim_names={given!r} must be strings")
    return names


class _MeshesOfThread(threading.local):
    """The mesh that set_mesh set, and those whose `with` block this thread is in, innermost last."""

    def __init__(self) -> None:
        self.inside: list[ProcessMesh] = []


_current = _MeshesOfThread()
_chosen: dict[str, ProcessMesh] = {}


def set_mesh(mesh: ProcessMesh) -> None:
    """Make mesh the one that get_mesh returns, everywhere."""
    if not isinstance(mesh, ProcessMesh):
        raise ConfigError(f"set_mesh takes a ProcessMesh, got {type(mesh).__name__}")
    _chosen["mesh"] = mesh


def get_mesh() -> ProcessMesh | None:
    """The mesh of the innermost `with mesh:` block, else the one set_mesh set; None if there is neither."""
    return _current.inside[-1] if _current.inside else _chosen.get("mesh")


def clear_mesh() -> None:
    """Forget what set_mesh set."""
    _chosen.pop("mesh", None)


def create_mesh(mesh_dims: Sequence[tuple[str, int]]) -> ProcessMesh:
    """A mesh with these (name, size) dims over process ids 0, 1, ..., set as the global one.

    Raises ConfigError for a size below 1.

    >>> create_mesh([("dp", 2), ("mp", 4)]).shape
    [2, 4]
    """
    names, sizes = [n for n, _ in mesh_dims], [s for _, s in mesh_dims]
    if not sizes or any(not isinstance(s, int) or s < 1 for s in sizes):
        raise ConfigError(f"create_mesh takes (name, size) pairs with sizes of at least 1, got {mesh_dims!r}")
    mesh = ProcessMesh(np.arange(math.prod(sizes)).reshape(sizes), names)
    set_mesh(mesh)
    return mesh


def mesh_of(jax_mesh: Any) -> ProcessMesh | None:
    """The ProcessMesh that a jax Mesh was made for, None if it was made elsewhere."""
    return _meshes.get(jax_mesh)
