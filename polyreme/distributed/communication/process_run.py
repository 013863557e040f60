"""Collectives of processes: each member's own array becomes its part of one array over all of them.

One program a kind and number of values, compiled by jax for each shape; only the members call it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme import flags
from polyreme.core.state import Tracer
from polyreme.distributed.communication import bodies
from polyreme.distributed.communication.group import PROCESS_AXIS, REDUCE_NAMES, Group, ReduceOp, process_mesh
from polyreme.distributed.job import watchdog
from polyreme.eager.host import put
from polyreme.errors import CaptureError, PlacementError, RankError

_AXES = (PROCESS_AXIS,)
_SPEC = PartitionSpec(PROCESS_AXIS)
_CARD = 256  # bytes in which a rank says what it calls


def run(
    kind: str, arrays: Sequence[Any], group: Group, split: bool = False, join: bool = False, **static: int
) -> list[Any]:
    """The collective of this kind on this process's arrays, all of one shape and dtype; results lie where they lay.

    Raises RankError if the members call different things (see flags.check_collectives), or one is gone; CaptureError
    inside a captured function.
    """
    first = arrays[0]
    if group.nranks == 1:
        # a group of one: what goes in comes out
        return [a[None] if join and not a.ndim else a for a in arrays]
    for array in arrays:
        _check_local(kind, array)
    with watchdog.phase(
        kind, group=group.label, ranks=tuple(group.ranks), detail=f"{first.dtype.name}{list(first.shape)}"
    ):
        agree(kind, arrays, group, split=split, join=join, **static)
        scalar = not first.ndim
        out = _call(_mesh(group), kind, arrays, split, join, tuple(sorted(static.items())))
    return [laid_out_as(a.reshape(()) if scalar and not join else a, first) for a in out]


def agree(kind: str, arrays: Sequence[Any], group: Group, **static: int) -> None:
    """Compare what the members are about to call, as often as flags.check_collectives says, once the devices rest.

    Raises RankError if they call different things.
    """
    _drain(arrays[0])
    called = (kind, tuple(static.items()), tuple((a.shape, a.dtype) for a in arrays))
    if called not in group.seen or _checks_always():
        _check_agreement(kind, arrays, group, static)
        group.seen.add(called)


def _drain(array: Any) -> None:
    """Wait, on CPU, until no program runs any longer.

    Gloo pairs the messages of two processes by their order alone. XLA keeps that order among programs with several
    devices here; the programs of this file have one, and would overtake a step that still runs.
    """
    if next(iter(array.sharding.device_set)).platform == "cpu":
        for other in jax.live_arrays("cpu"):
            if not other.is_deleted():
                other.block_until_ready()


def _check_local(kind: str, array: Any) -> None:
    if isinstance(array, Tracer):
        raise CaptureError(
            f"{kind} among processes inside a captured function: each process compiles its own program there, which "
            "cannot reach the others; call it outside to_static, or use a group of mesh axes and global Tensors"
        )
    if not array.is_fully_addressable:
        raise PlacementError(
            f"{kind}: this Tensor of shape {list(array.shape)} is spread over several processes already; a group of "
            "processes works on Tensors that each holds for itself: use a group of mesh axes (axis_group)"
        )


def _call(mesh: Mesh, kind: str, arrays: Sequence[Any], split: bool, join: bool, static: tuple) -> list[Any]:
    parts = [_as_part(mesh, a) for a in arrays]
    program = _program(mesh, kind, not arrays[0].ndim, split, join, static)
    try:
        return [a.addressable_shards[0].data for a in program(*parts)]
    # jax raises Gloo's failures as ValueError
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        if isinstance(error, ValueError) and "Gloo" not in text:
            raise
        raise RankError(f"{kind} over {mesh.size} processes failed, most likely because one is gone: {text}") from error


@functools.lru_cache(maxsize=4096)
def _program(mesh: Mesh, kind: str, scalar: bool, split: bool, join: bool, static: tuple) -> Any:
    def body(*blocks: Any) -> list[Any]:
        xs = [b.reshape(()) for b in blocks] if scalar else list(blocks)
        out = bodies.run(kind, xs, _AXES, mesh.size, split, join, dict(static))
        return [y if y.ndim else y[None] for y in out]

    body.__name__ = kind
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC, check_vma=False))


@functools.lru_cache(maxsize=1024)
def _mesh(group: Group) -> Mesh:
    return process_mesh(group)


def _as_part(mesh: Mesh, array: Any) -> Any:
    """This process's part of a global array that has every member's array along dim 0."""
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    local = _on_device(array, device)
    local = local if local.ndim else local[None]
    shape = (mesh.size * local.shape[0], *local.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, _SPEC), [local])


def on_first_device(array: Any) -> Any:
    """array on this process's first device, where collectives of processes run."""
    return _on_device(array, min(jax.local_devices(), key=lambda d: d.id))


def _on_device(array: Any, device: Any) -> Any:
    if isinstance(array, np.ndarray):
        return jax.device_put(array, device)
    if array.sharding.device_set == {device}:
        return array
    if array.is_fully_replicated:
        for shard in array.addressable_shards:
            if shard.device == device:
                return shard.data
    return jax.device_put(array, device)


def laid_out_as(array: Any, reference: Any) -> Any:
    """array laid out over this process's devices as reference is."""
    return array if array.sharding.device_set == reference.sharding.device_set else put(array, reference.sharding)


def _checks_always() -> bool:
    wanted = flags.check_collectives()
    return jax.default_backend() == "cpu" if wanted is None else wanted


def _check_agreement(kind: str, arrays: Sequence[Any], group: Group, static: dict[str, int]) -> None:
    """One small collective if all is well: the largest of each rank's number for its call, and of minus that number."""
    mesh, text = _mesh(group), _card(kind, arrays, static)
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    largest = _call(mesh, "all_reduce", [np.asarray([number, -number])], False, False, (("op", ReduceOp.MAX),))[0]
    if tuple(np.asarray(largest)) == (number, -number):
        return
    card = np.zeros(_CARD, np.uint8)
    card[: len(text)] = np.frombuffer(text, np.uint8)
    cards = _call(mesh, "all_gather", [card], False, True, ())[0]
    said = [bytes(card).rstrip(b"\0").decode(errors="replace") for card in np.asarray(cards).reshape(-1, _CARD)]
    each = "; ".join(f"rank {rank} calls {text}" for rank, text in zip(group.ranks, said, strict=True))
    raise RankError(f"{kind}: the ranks of group {group.name} disagree: {each}; every member must call the same")


def _card(kind: str, arrays: Sequence[Any], static: dict[str, int]) -> bytes:
    """The collective call of this rank, in words."""
    options = {"op": lambda v: REDUCE_NAMES[v], "root": lambda v: f"position {v}"}
    told = sorted((name, value) for name, value in static.items() if name in options)
    given = "".join(f", {name} {options[name](value)}" for name, value in told)
    shape = f"{len(arrays)} x " if len(arrays) > 1 else ""
    return f"{kind} of {shape}{arrays[0].dtype.name}{list(arrays[0].shape)}{given}".encode()[:_CARD]


def barrier(group: Group) -> None:
    """Return once every member has called it."""
    jax.block_until_ready(run("all_reduce", [jnp.zeros((), jnp.int32)], group, op=0))


def exchange_uneven(array: Any, sent: Sequence[int], wanted: Sequence[int], group: Group) -> Any:
    """Rows of array to each member, sent[i] of them to member i; the rows from each, in order. Padded to equal pieces.

    Raises RankError if some member sends another number of rows than is wanted of it.
    """
    table = np.asarray(run("all_gather", [jnp.asarray(sent, jnp.int64)], group, join=True)[0]).reshape(group.nranks, -1)
    for i, (comes, expected) in enumerate(zip(table[:, group.rank], wanted, strict=True)):
        if comes != expected:
            raise RankError(
                f"alltoall_single: rank {group.ranks[i]} sends {comes} rows to rank {group.ranks[group.rank]}, whose "
                f"out_split_sizes={list(wanted)} expect {expected}"
            )
    # powers of two, so that changing sizes make few programs
    rows = _power_of_two(int(table.max()))
    at = np.concatenate([[0], np.cumsum(sent)])
    pieces = []
    for i, size in enumerate(sent):
        pad = [(0, rows - size), *[(0, 0)] * (array.ndim - 1)]
        pieces.append(jnp.pad(array[at[i] : at[i + 1]], pad))
    received = run("alltoall", pieces, group)
    return jnp.concatenate([r[:size] for r, size in zip(received, wanted, strict=True)])


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 1
