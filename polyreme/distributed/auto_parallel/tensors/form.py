"""Form: how the value of a Tensor is stored on a mesh, as one jax array with a NamedSharding.

Where every split is even and nothing is partial, the stored array is the value itself. Otherwise a dim that its devices
do not divide is padded to ceil(n / k) rows on each (jax splits evenly only) and cut when it is read. The addends of a
Partial tensor are stacked along leading dims, one for each Partial mesh dim and split over it, so that every device
holds its own addend alone. A split_factor f makes two dims of one, [f, n / f].
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core import dtype as dtypes
from polyreme.distributed.auto_parallel.tensors.placements import Partial, Placement, ReduceType, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.errors import PlacementError

_LINEAR = frozenset({ReduceType.kRedSum, ReduceType.kRedAvg})


def _average(x: Any) -> Any:
    # narrow dtypes overflow before they are divided
    if dtypes.is_inexact(x.dtype):
        wide = np.float32 if x.dtype == jnp.float16 else x.dtype
        return (x.sum(0, dtype=wide) / x.shape[0]).astype(x.dtype)
    wide = np.int64 if x.dtype.itemsize < 8 else x.dtype
    return (x.sum(0, dtype=wide) // x.shape[0]).astype(x.dtype)


_JOIN: dict[ReduceType, Callable[[Any], Any]] = {
    ReduceType.kRedSum: lambda x: x.any(0) if x.dtype == jnp.bool_ else x.sum(0, dtype=x.dtype),
    ReduceType.kRedMax: lambda x: x.max(0),
    ReduceType.kRedMin: lambda x: x.min(0),
    ReduceType.kRedProd: lambda x: x.prod(0, dtype=x.dtype),
    ReduceType.kRedAvg: _average,
    ReduceType.kRedAny: lambda x: (x != 0).any(0).astype(x.dtype),
    ReduceType.kRedAll: lambda x: (x != 0).all(0).astype(x.dtype),
}
# what the devices other than the first hold when a whole value becomes addends; the others hold the value again
_FILLER = {ReduceType.kRedSum: jnp.zeros_like, ReduceType.kRedProd: jnp.ones_like}


@dataclass(frozen=True)
class Form:
    """A mesh, a placement per mesh dim, and the global shape; equal by value."""

    mesh: ProcessMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for dim in range(len(self.shape)):
            if self.factor(dim) > 1 and len(self.axes(dim)) > 1:
                raise PlacementError(
                    f"placements {list(self.placements)}: dim {dim} is split by {len(self.axes(dim))} mesh dims, and "
                    "a split_factor counts for one; leave it out, or split the dim once"
                )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Form, (self.mesh, self.placements, self.shape)  # without the devices that properties keep

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.placements, self.shape))

    # what is where

    def axes(self, dim: int) -> tuple[int, ...]:
        """The mesh dims that split a tensor dim, outermost first."""
        order = [
            (p.get_co_shard_order(), i)
            for i, p in enumerate(self.placements)
            if isinstance(p, Shard) and p.is_shard(dim)
        ]
        return tuple(i for _, i in sorted(order))

    def ways(self, dim: int) -> int:
        """Devices that a tensor dim is split over."""
        return math.prod(self.mesh.get_dim_size(i) for i in self.axes(dim))

    def factor(self, dim: int) -> int:
        """Equal parts of a dim each of which is split."""
        return math.prod(p.get_split_factor() for p in self.placements if isinstance(p, Shard) and p.is_shard(dim))

    @property
    def pieces(self) -> int:
        """Different pieces that the value is split in."""
        return math.prod(self.ways(d) for d in range(len(self.shape)))

    @functools.cached_property
    def partial(self) -> tuple[int, ...]:
        """The mesh dims along which it is Partial, in order."""
        return tuple(i for i, p in enumerate(self.placements) if isinstance(p, Partial))

    def reduce_type(self, axis: int) -> ReduceType:
        """The reduction of the addends along a Partial mesh dim."""
        placement = self.placements[axis]
        assert isinstance(placement, Partial)
        return placement.reduce_type()

    @functools.cached_property
    def plain(self) -> bool:
        """Whether the array kept is the value itself."""
        dims = range(len(self.shape))
        return not self.partial and all(self.shape[d] % self.ways(d) == 0 and self.factor(d) == 1 for d in dims)

    @functools.cached_property
    def cut_off(self) -> bool:
        """Whether some dim is in uneven pieces, kept padded."""
        return any(n != self.rows(d) * self.ways(d) * self.factor(d) for d, n in enumerate(self.shape))

    def rows(self, dim: int) -> int:
        """Rows of one part of a dim that a device has room for."""
        return -(-(self.shape[dim] // self.factor(dim)) // self.ways(dim))

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array that is kept."""
        sizes = [self.mesh.get_dim_size(i) for i in self.partial]
        for dim in range(len(self.shape)):
            factor = self.factor(dim)
            sizes += [factor] * (factor > 1) + [self.rows(dim) * self.ways(dim)]
        return tuple(sizes)

    @functools.cached_property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the stored array."""
        if 0 in self.shape:  # XLA splits nothing without elements
            return PartitionSpec()
        names = self.mesh.dim_names
        entries: list[Any] = [names[i] for i in self.partial]
        for dim in range(len(self.shape)):
            axes = tuple(names[i] for i in self.axes(dim))
            entries += [None] * (self.factor(dim) > 1) + [axes[0] if len(axes) == 1 else axes or None]
        return PartitionSpec(*entries)

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """The sharding of the stored array."""
        return NamedSharding(self.mesh.jax_mesh, self.spec)

    @functools.cached_property
    def everywhere(self) -> NamedSharding:
        """A whole copy on every device of the mesh."""
        return NamedSharding(self.mesh.jax_mesh, PartitionSpec())

    # other forms

    def having(self, placements: Sequence[Placement]) -> Form:
        """The same shape and mesh under other placements."""
        return Form(self.mesh, tuple(placements), self.shape)

    def joined(self) -> Form:
        """Whole where this is Partial."""
        return self.having([Replicate() if isinstance(p, Partial) else p for p in self.placements])

    def replicated(self) -> Form:
        """Whole everywhere."""
        return self.having([Replicate()] * self.mesh.ndim)

    # the value and what is kept

    def cut(self, stored: Any, lead: int) -> Any:
        """The dims of the value out of those kept, behind `lead` leading dims of addends. Traceable."""
        for dim, size in enumerate(self.shape, lead):
            factor = self.factor(dim - lead)
            if factor > 1:
                stored = jax.lax.slice_in_dim(stored, 0, size // factor, axis=dim + 1)
                stored = stored.reshape(*stored.shape[:dim], size, *stored.shape[dim + 2 :])
            elif stored.shape[dim] != size:
                stored = jax.lax.slice_in_dim(stored, 0, size, axis=dim)
        return stored

    def padded(self, value: Any, lead: int = 0) -> Any:
        """The dims kept out of those of the value, behind `lead` leading dims; padding is zero. Traceable."""
        axis_ = lead
        for dim, size in enumerate(self.shape):
            factor, room = self.factor(dim), self.rows(dim) * self.ways(dim)
            if factor > 1:
                value = value.reshape(*value.shape[:axis_], factor, size // factor, *value.shape[axis_ + 1 :])
                axis_ += 1
            if value.shape[axis_] != room:
                widths = [(0, room - value.shape[axis_]) if i == axis_ else (0, 0) for i in range(value.ndim)]
                value = jnp.pad(value, widths)
            axis_ += 1
        return value

    def decode(self, stored: Any) -> Any:
        """The value: addends joined, padding cut off. Traceable."""
        return self.cut(self.joining(stored, ()), 0)

    def joining(self, stored: Any, kept: Sequence[int]) -> Any:
        """The array with addends joined, but for those along the mesh dims in kept, which stay in front, in order."""
        at = len(self.partial) - 1
        for axis in reversed(self.partial):
            if axis not in kept:
                stored = _JOIN[self.reduce_type(axis)](jnp.moveaxis(stored, at, 0))
            at -= 1
        return stored

    def encode(self, value: Any) -> Any:
        """The stored array of a whole value. Addends are the value at coordinate 0 and the neutral element elsewhere
        (the value again where reducing equal values gives that value). Traceable."""
        return self.spread(self.padded(value), self.partial)

    def spread(self, array: Any, axes: Sequence[int]) -> Any:
        """The array as addends along these Partial mesh dims, in front."""
        for axis in reversed(axes):
            size, filler = self.mesh.get_dim_size(axis), _FILLER.get(self.reduce_type(axis))
            every = jnp.broadcast_to(array, (size, *array.shape))
            # chosen by position, which each device knows; pieces put together would be sent around
            first = jax.lax.broadcasted_iota(np.int32, every.shape, 0) == 0
            array = every if filler is None else jnp.where(first, every, filler(every))
        return array

    # one device's part

    def coordinates(self, process_id: int) -> tuple[int, ...]:
        """The coordinates of a process id on the mesh; PlacementError if it is not on it."""
        if not self.mesh.contains(process_id):
            raise PlacementError(f"process id {process_id} is not on the mesh {self.mesh}")
        return tuple(self.mesh.get_rank_by_dim_and_process_id(i, process_id) for i in range(self.mesh.ndim))

    def local_rows(self, dim: int, coordinates: Sequence[int]) -> tuple[int, int]:
        """(first row, number of rows) of each part of a dim that the device at these coordinates has."""
        at = 0
        for axis in self.axes(dim):
            at = at * self.mesh.get_dim_size(axis) + coordinates[axis]
        have, room = self.shape[dim] // self.factor(dim), self.rows(dim)
        return min(at * room, have), max(0, min(room, have - at * room))

    def local_shape(self, process_id: int) -> tuple[int, ...]:
        """Shape of the part that a device holds."""
        where = self.coordinates(process_id)
        return tuple(self.local_rows(d, where)[1] * self.factor(d) for d in range(len(self.shape)))

    def local_value(self, stored: jax.Array, process_id: int) -> jax.Array:
        """The part that a device holds, on that device. PlacementError if another process drives it."""
        where, device = self.coordinates(process_id), jax.devices()[process_id]
        held = next((s.data for s in stored.addressable_shards if s.device == device), None)
        if held is None:
            raise PlacementError(f"process id {process_id} is driven by another process, which holds its part")
        held = held.reshape(held.shape[len(self.partial) :])
        return self._trim(held, where)

    def _trim(self, piece: Any, where: Sequence[int]) -> Any:
        for dim in range(len(self.shape)):
            factor, count = self.factor(dim), self.local_rows(dim, where)[1]
            if factor > 1:
                piece = piece[(slice(None),) * (dim + 1) + (slice(0, count),)]
                piece = piece.reshape(*piece.shape[:dim], factor * count, *piece.shape[dim + 2 :])
            elif piece.shape[dim] != count:
                piece = piece[(slice(None),) * dim + (slice(0, count),)]
        return piece

    def from_local(self, part_of: Callable[[int], np.ndarray], dtype: Any) -> jax.Array:
        """The array that is kept, each device's part being part_of(process id)."""
        where, mesh = self.sharding, self.mesh
        ids = {jax.devices()[i]: i for i in mesh.process_ids}
        pieces = [
            jax.device_put(self._room(np.asarray(part_of(ids[device]), dtype), where), device)
            for device in where.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(self.stored_shape, where, pieces)

    def _room(self, part: np.ndarray, where: NamedSharding) -> np.ndarray:
        """A device's part in the room that is kept for it."""
        room = where.shard_shape(self.stored_shape)
        body, axis_ = room[len(self.partial) :], 0
        for dim in range(len(self.shape)):
            factor = self.factor(dim)
            if factor > 1:
                part = part.reshape(*part.shape[:axis_], factor, part.shape[axis_] // factor, *part.shape[axis_ + 1 :])
                axis_ += 1
            axis_ += 1
        full = np.zeros(body, part.dtype)
        full[tuple(slice(0, n) for n in part.shape)] = part
        return full.reshape(room)

    def __str__(self) -> str:
        return f"{list(self.shape)} as {list(self.placements)} on {self.mesh}"


def convert(array: Any, source: Form, target: Form) -> Any:
    """The stored array of target from that of source, on one mesh; addends stay where both have them. Traceable."""
    types = {source.reduce_type(i) for i in source.partial} | {target.reduce_type(i) for i in target.partial}
    commute = len(types) == 1 or types <= _LINEAR
    same = [i for i in source.partial if commute and source.placements[i] == target.placements[i]]
    value = source.cut(source.joining(array, same), len(same))
    result = target.padded(value, len(same))
    new = [i for i in target.partial if i not in same]
    for axis in reversed(new):
        result = target.spread(result, [axis])
    # addends made here stand in front of those that were there: back into the order of the mesh
    order = sorted(range(len(new) + len(same)), key=lambda at: [*new, *same][at])
    return jnp.transpose(result, [*order, *range(len(order), result.ndim)])


@functools.lru_cache(maxsize=4096)
def converter(source: Form, target: Form) -> Callable[[Any], Any]:
    """convert, compiled: the pieces move between devices as the partitioner sees fit."""

    def reshard(array: Any) -> Any:
        return convert(array, source, target)

    return jax.jit(reshard, out_shardings=target.sharding)


def of_sharding(mesh: ProcessMesh, sharding: NamedSharding, shape: Sequence[int]) -> Form:
    """The Form of an array that is its own value."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, entry in enumerate(sharding.spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        at = [mesh.dim_names.index(n) for n in names if isinstance(n, str)]
        ordered = all(a < b for a, b in itertools.pairwise(at))
        for order, axis in enumerate(at):
            placements[axis] = Shard(dim, shard_order=0 if ordered else order)
    return Form(mesh, tuple(placements), tuple(shape))
