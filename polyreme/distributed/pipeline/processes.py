"""A pipeline whose stages lie on devices of several processes.

Every process walks the same table and runs the tasks of the stages it has devices of. What the others must
know of a task (the structure and layout of its outputs, which parameters of other stages it reads) is agreed on once
for each shape of microbatch, by all, at the same place in the table. Arrays go from device to device: the sender lays
its pieces out and goes on, the receiver waits for them, so stages overlap as the table says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from polyreme.core.layout import Layout
from polyreme.distributed.communication.group import default_group, this_rank
from polyreme.distributed.communication.objects import all_gather_object
from polyreme.distributed.communication.point_to_point import recv_array, send_array
from polyreme.errors import ConfigError
from polyreme.jit.split import Flow
from polyreme.jit.structure import Spec

_CONTAINERS: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}


class Piece(NamedTuple):
    """The description of an array that a receiver needs: its whole shape, its dtype, how a stage's mesh splits it."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...]

    @classmethod
    def of(cls, array: jax.Array) -> Piece:
        """The Piece of an array on a stage."""
        sharding = array.sharding
        spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        return cls(tuple(array.shape), array.dtype.name, spec)

    def plain(self) -> list[Any]:
        """Lists, strings and numbers, to be sent."""
        return [list(self.shape), self.dtype, [list(e) if isinstance(e, tuple) else e for e in self.spec]]

    @classmethod
    def read(cls, value: Any) -> Piece:
        """The Piece from the values of `plain`."""
        shape, dtype, spec = value
        return cls(tuple(shape), dtype, tuple(tuple(e) if isinstance(e, list) else e for e in spec))


def spans_processes(layout: Layout) -> bool:
    """True if the layout's devices belong to several processes."""
    return len({device.process_index for device in layout.mesh.devices.flat}) > 1


def is_here(stage: Layout) -> bool:
    """True if this process has devices of the stage."""
    return any(device.process_index == this_rank() for device in stage.mesh.devices.flat)


def leader(stage: Layout) -> int:
    """The rank that speaks for a stage: that of its first device."""
    return int(stage.mesh.devices.flat[0].process_index)


def from_all(value: Any) -> list[Any]:
    """Every rank's plain value, by rank; all ranks must call it."""
    found: list[Any] = []
    all_gather_object(found, value)
    return found


def hop(arrays: Sequence[Any] | None, pieces: Sequence[Piece | None], here: Layout, there: Layout) -> list[Any] | None:
    """Arrays (or None) of one stage on another, split there as they were; None on processes that have no device there.

    arrays: those of this process if it has devices `here`. pieces: what they are, None for each that is None. Both
    meshes have the same axes: what a device has goes to the device at the same place. Processes of neither stage return
    at once.
    """
    if not (is_here(here) or is_here(there)):
        return None
    found = [
        None if piece is None else _transfer(None if arrays is None else arrays[i], piece, here, there)
        for i, piece in enumerate(pieces)
    ]
    return found if is_here(there) else None


def _transfer(array: Any, piece: Piece, here: Layout, there: Layout) -> Any:
    group, rank = default_group(), this_rank()
    where = NamedSharding(there.mesh, PartitionSpec(*piece.spec))
    shape = where.shard_shape(piece.shape)
    data = {} if array is None else {s.device: s.data for s in array.addressable_shards}
    coming: list[tuple[Any, Any]] = []
    for source, target in zip(here.mesh.devices.flat, there.mesh.devices.flat, strict=True):
        if source.process_index == rank and target.process_index == rank:
            coming.append((target, data[source]))
        elif source.process_index == rank:
            send_array(data[source], group.get_group_rank(target.process_index), group, "pipeline send")
        elif target.process_index == rank:
            peer = group.get_group_rank(source.process_index)
            coming.append((target, recv_array(shape, np.dtype(piece.dtype), peer, group, "pipeline receive")))
    parts = [jax.device_put(part() if callable(part) else part, device) for device, part in coming]
    if not parts:
        return None
    return jax.make_array_from_single_device_arrays(piece.shape, where, parts)


def encode(flow: Flow) -> list[Any]:
    """A Flow's structure and pieces as plain values."""
    leaves = [
        Piece.of(leaf).plain() if want is not None else leaf for leaf, want in zip(flow.leaves, flow.wants, strict=True)
    ]
    return [_encode(flow.spec), leaves, list(flow.wants)]


def decode(value: Any) -> tuple[Flow, list[Piece]]:
    """A Flow without arrays, and their pieces, from what encode gave."""
    spec, leaves, wants = value
    pieces = [Piece.read(leaf) for leaf, want in zip(leaves, wants, strict=True) if want is not None]
    plain = [None if want is not None else leaf for leaf, want in zip(leaves, wants, strict=True)]
    return Flow(_decode(spec), plain, tuple(wants)), pieces


def _encode(spec: Spec) -> Any:
    if spec is None:
        return None
    cls, keys, children = spec
    if _CONTAINERS.get(cls.__name__) is not cls:
        raise ConfigError(
            f"a chunk of a pipeline over several processes gave a {cls.__name__}; give a Tensor, or tuples, lists and "
            "dicts of Tensors"
        )
    return [cls.__name__, None if keys is None else list(keys), [_encode(child) for child in children]]


def _decode(value: Any) -> Spec:
    if value is None:
        return None
    name, keys, children = value
    return (_CONTAINERS[name], None if keys is None else tuple(keys), tuple(_decode(child) for child in children))
