"""Collectives on plain Python values: dicts, lists, tuples, numbers, strings, None, ndarrays, Tensors, dataclasses and
members of enumerations.

Values travel in the format that `save` writes, never pickled: what a peer sends can be read, not run. Any
other class is refused where it is sent (Paddle pickles it).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.distributed.communication import point_to_point, process_run
from polyreme.distributed.communication.group import Group, default_group, position, resolve
from polyreme.errors import CheckpointError, ConfigError, DTypeError, RankError
from polyreme.io import sent_objects

_REFUSED = -1  # the length a rank announces for a value that cannot be sent, so that all of them stop


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None) -> None:
    """Append every member's obj to object_list, in order of rank.

    Raises DTypeError for a value of a class that cannot be sent, on the others RankError naming the rank.
    """
    _check_list("all_gather_object", object_list)
    found = resolve(group, "all_gather_object")
    if found is None:
        return
    object_list.extend(_every("all_gather_object", obj, found))


def broadcast_object_list(object_list: list[Any], src: int, group: Group | None = None) -> None:
    """Replace the values in object_list by rank src's, as many on every member."""
    _check_list("broadcast_object_list", object_list)
    members = resolve(group, "broadcast_object_list")
    if members is None:
        return
    at = position(members, src, "broadcast_object_list", "src")
    given = object_list if _plays(members, at) else None
    theirs = _every("broadcast_object_list", given, members)[at]
    if len(theirs) != len(object_list):
        raise RankError(
            f"broadcast_object_list: rank {src} has {len(theirs)} objects, this list is {len(object_list)} long"
        )
    object_list[:] = theirs


def scatter_object_list(
    out_object_list: list[Any], in_object_list: list[Any] | None = None, src: int = 0, group: Group | None = None
) -> None:
    """Send each member the value at its position in rank src's in_object_list, as the one entry of out_object_list."""
    _check_list("scatter_object_list", out_object_list)
    members = resolve(group, "scatter_object_list")
    if members is None:
        return
    root = position(members, src, "scatter_object_list", "src")
    if _plays(members, root) and (in_object_list is None or len(in_object_list) != members.nranks):
        raise ConfigError(
            f"scatter_object_list: rank src={src} needs in_object_list with {members.nranks} objects, one for each "
            f"member; got {None if in_object_list is None else len(in_object_list)}"
        )
    theirs = _every("scatter_object_list", in_object_list if _plays(members, root) else None, members)[root]
    out_object_list[:] = [theirs[members.rank]]


def send_object_list(
    object_list: list[Any], dst: int | None = None, group: Group | None = None, dst_in_group: int | None = None
) -> None:
    """Send the values in object_list to one rank: dst, or the member at position dst_in_group."""
    _check_list("send_object_list", object_list)
    members = resolve(group, "send_object_list")
    if members is None:
        return
    peer = _peer("send_object_list", "dst", dst, dst_in_group, members)
    data = _encode("send_object_list", object_list)
    point_to_point.send_array(jnp.asarray([len(data)], jnp.int64), peer, members, "send_object_list")
    point_to_point.send_array(jnp.asarray(data), peer, members, "send_object_list")


def recv_object_list(
    object_list: list[Any], src: int | None = None, group: Group | None = None, src_in_group: int | None = None
) -> None:
    """Replace the values in object_list by those that one rank sends, as many as there are."""
    _check_list("recv_object_list", object_list)
    members = resolve(group, "recv_object_list")
    if members is None:
        return
    what, peer = "recv_object_list", _peer("recv_object_list", "src", src, src_in_group, members)
    (length,) = np.asarray(point_to_point.recv_array((1,), np.dtype("int64"), peer, members, what)())
    data = np.asarray(point_to_point.recv_array((int(length),), np.dtype("uint8"), peer, members, what)())
    theirs = _decode(what, data, members.ranks[peer])
    if len(theirs) != len(object_list):
        raise RankError(f"{what}: {len(theirs)} objects came, this list is {len(object_list)} long")
    object_list[:] = theirs


def _every(what: str, obj: Any, group: Group) -> list[Any]:
    """Every member's value. A group of mesh axes asks the processes that drive its devices."""
    if not group.axes:
        return _of_processes(what, obj, group)
    assert group.mesh is not None
    theirs = _of_processes(what, obj, default_group())
    return [theirs[group.mesh.devices.flat[i].process_index] for i in group.ranks]


def _of_processes(what: str, obj: Any, group: Group) -> list[Any]:
    refused = None
    try:
        data = _encode(what, obj)
    except DTypeError as error:
        refused, data = error, np.zeros(0, np.uint8)
    length = len(data) if refused is None else _REFUSED
    lengths = _gather(np.asarray([length], np.int64), group)[:, 0]
    if refused is not None:
        raise refused
    bad = [rank for rank, size in zip(group.ranks, lengths, strict=True) if size == _REFUSED]
    if bad:
        raise RankError(f"{what}: rank {bad[0]} has an object of a class that cannot be sent; its own error names it")
    # powers of two, so that changing lengths make few programs
    padded = np.zeros(1 << (int(lengths.max()) - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    every = _gather(padded, group)
    return [_decode(what, row[:size], rank) for row, size, rank in zip(every, lengths, group.ranks, strict=True)]


def _gather(array: np.ndarray, group: Group) -> np.ndarray:
    found = process_run.run("all_gather", [jnp.asarray(array)], group, join=True)[0]
    return np.asarray(found).reshape(group.nranks, -1)


def _encode(what: str, obj: Any) -> np.ndarray:
    try:
        return np.frombuffer(sent_objects.to_bytes(obj), np.uint8)
    except (DTypeError, CheckpointError) as error:
        reason = str(error).removeprefix("save: ").replace("are saved", "are sent")
        raise DTypeError(f"{what}: {reason}") from None


def _decode(what: str, data: np.ndarray, rank: int) -> Any:
    try:
        return sent_objects.from_bytes(data.tobytes(), "the message")
    except CheckpointError as error:
        raise RankError(f"{what}: what rank {rank} sent cannot be read: {error}") from error


def _plays(group: Group, position: int) -> bool:
    """True if this process is the member at a position, or drives it: of a group of mesh axes."""
    if not group.axes:
        return group.rank == position
    assert group.mesh is not None
    return group.mesh.devices.flat[group.ranks[position]].process_index == default_group().rank


def _check_list(what: str, value: Any) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{what}: needs a list to put objects into, got {type(value).__name__}")


def _peer(what: str, role: str, rank: int | None, rank_in_group: int | None, group: Group) -> int:
    if (rank is None) == (rank_in_group is None):
        raise ConfigError(f"{what}: give exactly one of {role} (a rank) and {role}_in_group (a position)")
    if rank_in_group is None:
        return position(group, rank, what, role)
    if not 0 <= rank_in_group < group.nranks:
        raise ConfigError(f"{what}: {role}_in_group={rank_in_group}, but group {group.name} has {group.nranks} members")
    return rank_in_group
