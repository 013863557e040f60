"""Collectives on Tensors: what every member of a group calls together.

They change Tensors in place and are not taped: as in Paddle, a gradient passes an all_reduce as if it were
not there. In a PyLayer, call them in forward and in backward.

On a group of processes a Tensor is each process's own. On a group of mesh axes a Tensor is global, and a collective
acts on the piece of it that each device holds: of a Tensor split over the group that is its part, of any other the
whole. So all_reduce with SUM of a whole Tensor multiplies it by the number of members. Results that differ between
members lie along dim 0, split over the group's axes: their shape is `nranks` times a member's along dim 0.

Every call dispatches and returns a Task, whatever sync_op says; whoever reads a Tensor's value waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.distributed.communication import axis_run, process_run
from polyreme.distributed.communication.group import (
    REDUCE_NAMES,
    Group,
    ReduceOp,
    default_group,
    num_ranks,
    position,
    resolve,
)
from polyreme.distributed.communication.task import CollectiveTask
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError


def all_reduce(
    tensor: Tensor, op: int = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> CollectiveTask | None:
    """Join every member's tensor, in place, so that all hold the result.

    op: one of ReduceOp. sync_op=False: the values may still be on their way; wait() on the task. Returns None, with a
    warning, where this process is not in the group; so do the other collectives.
    Raises TypeError for anything but a Tensor, ConfigError for an unknown op, DTypeError for one that its dtype lacks.
    """
    found = resolve(group, "all_reduce")
    _check_op("all_reduce", op, tensor)
    if found is None:
        return None
    return _into(tensor, _run("all_reduce", [tensor], found, op=op), "all_reduce")


def reduce(
    tensor: Tensor, dst: int, op: int = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> CollectiveTask | None:
    """Join every member's tensor into rank dst's; the others keep theirs."""
    members = resolve(group, "reduce")
    _check_op("reduce", op, tensor)
    if members is None:
        return None
    root = position(members, dst, "reduce", "dst")
    return _into(tensor, _run("reduce", [tensor], members, op=op, root=root), "reduce")


def broadcast(tensor: Tensor, src: int, group: Group | None = None, sync_op: bool = True) -> CollectiveTask | None:
    """Copy rank src's tensor to every member, in place, bit for bit."""
    members = resolve(group, "broadcast")
    _check_tensors("broadcast", [tensor])
    if members is None:
        return None
    root = position(members, src, "broadcast", "src")
    return _into(tensor, _run("broadcast", [tensor], members, root=root), "broadcast")


def all_gather(
    tensor_list: list[Tensor] | Tensor, tensor: Tensor, group: Group | None = None, sync_op: bool = True
) -> CollectiveTask | None:
    """Collect every member's tensor on every member, in order of rank.

    tensor_list: an empty list is filled; the Tensors in a list of nranks are written; a Tensor takes all along dim 0.
    """
    found = resolve(group, "all_gather")
    _check_tensors("all_gather", [tensor])
    if found is None:
        return None
    return _gather("all_gather", tensor_list, tensor, found)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> CollectiveTask | None:
    """all_gather of which only rank dst keeps the result, in gather_list; the others may leave it out."""
    members = resolve(group, "gather")
    _check_tensors("gather", [tensor])
    if members is None:
        return None
    at = position(members, dst, "gather", "dst")
    # one process drives all members of a group of mesh axes
    if members.axes or at == members.rank:
        if gather_list is None:
            raise ConfigError("gather: rank dst needs gather_list=[] for the result")
        return _gather("gather", gather_list, tensor, members)
    return CollectiveTask(_run("all_gather", [tensor], members))


def reduce_scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor] | Tensor,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> CollectiveTask | None:
    """Join the members' lists of nranks Tensors; each member's tensor takes the entry at its position.

    tensor_list: a list, or one Tensor that is the entries along dim 0.
    """
    members = resolve(group, "reduce_scatter")
    whole, entries = _entries("reduce_scatter", tensor_list, members)
    _check_tensors("reduce_scatter", [tensor])
    _check_op("reduce_scatter", op, entries[0])
    if members is None:
        return None
    _check_same("reduce_scatter", [tensor], entries[0], members, whole)
    return _into(tensor, _run("reduce_scatter", entries, members, split=whole, op=op), "reduce_scatter")


def scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor] | Tensor | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> CollectiveTask | None:
    """Send each member the entry at its position in rank src's list of nranks Tensors; other members' lists are not
    read."""
    members = resolve(group, "scatter")
    _check_tensors("scatter", [tensor])
    if members is None:
        return None
    root = position(members, src, "scatter", "src")
    if not members.axes and root != members.rank:
        blank = Tensor(jax.numpy.zeros_like(state.read(tensor)))
        return _into(tensor, _run("scatter", [blank] * members.nranks, members, root=root), "scatter")
    if tensor_list is None:
        raise ConfigError(f"scatter: rank src={src} needs tensor_list, the {members.nranks} Tensors to hand out")
    whole, given = _entries("scatter", tensor_list, members)
    _check_same("scatter", [tensor], given[0], members, whole)
    if whole and not members.axes:
        whole, given = False, [Tensor(a) for a in jax.numpy.split(state.read(given[0]), members.nranks)]
    return _into(tensor, _run("scatter", given, members, split=whole, root=root), "scatter")


def alltoall(
    out_tensor_list: list[Tensor] | Tensor,
    in_tensor_list: Sequence[Tensor] | Tensor,
    group: Group | None = None,
    sync_op: bool = True,
) -> CollectiveTask | None:
    """Send entry i of in_tensor_list to member i; entry i of the result is what member i sent here.

    out_tensor_list: an empty list is filled, the Tensors in a list of nranks are written. Both may be single Tensors,
    whose entries lie along dim 0.
    """
    members = resolve(group, "alltoall")
    whole, entries = _entries("alltoall", in_tensor_list, members)
    if members is None:
        return None
    if isinstance(out_tensor_list, Tensor):
        _check_dtype("alltoall", out_tensor_list, entries[0])
        return _into(out_tensor_list, _run("alltoall", entries, members, split=whole, join=True), "alltoall")
    slots = _slots("alltoall", out_tensor_list, members)
    return _fill("alltoall", out_tensor_list, slots, _run("alltoall", entries, members, split=whole))


def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
) -> CollectiveTask | None:
    """alltoall of pieces along dim 0 of one Tensor, into one Tensor.

    in_split_sizes: rows for each member, equal by default; out_split_sizes: rows from each. Uneven rows are for groups
    of processes: over mesh axes every device holds pieces of one size. Raises ShapeError for sizes that do not add up,
    RankError where a member sends other than is expected of it.
    """
    members = resolve(group, "alltoall_single")
    _check_tensors("alltoall_single", [out_tensor, in_tensor])
    _check_dtype("alltoall_single", out_tensor, in_tensor)
    if members is None:
        return None
    if in_split_sizes is None and out_split_sizes is None:
        _check_rows("in_tensor", in_tensor, members)
        return _into(out_tensor, _run("alltoall", [in_tensor], members, split=True, join=True), "alltoall_single")
    if members.axes:
        raise ConfigError(
            "alltoall_single over mesh axes: every device holds pieces of one size; leave the split sizes out"
        )
    sent = _sizes("in_split_sizes", in_split_sizes, in_tensor, members)
    wanted = _sizes("out_split_sizes", out_split_sizes, out_tensor, members)
    if in_tensor.shape[1:] != out_tensor.shape[1:]:
        raise ShapeError(
            f"alltoall_single: in_tensor {list(in_tensor.shape)} and out_tensor {list(out_tensor.shape)} differ after "
            "dim 0"
        )
    return _into(
        out_tensor, [process_run.exchange_uneven(state.read(in_tensor), sent, wanted, members)], "alltoall_single"
    )


def barrier(group: Group | None = None) -> None:
    """Wait until every member is here. A group of mesh axes waits for all processes."""
    found = resolve(group, "barrier")
    if found is not None and num_ranks() > 1:
        process_run.barrier(default_group() if found.axes else found)


def wait(tensor: Tensor, group: Group | None = None, use_calc_stream: bool = True) -> None:
    """Block until a Tensor that a collective writes has its value. There are no streams to choose from."""
    _check_tensors("wait", [tensor])
    if resolve(group, "wait") is not None:
        jax.block_until_ready(state.read(tensor))


def _run(kind: str, tensors: Sequence[Tensor], group: Group, **options: Any) -> list[Any]:
    runner = axis_run.run if group.axes else process_run.run
    return runner(kind, [state.read(t) for t in tensors], group, **options)


def _into(tensor: Tensor, results: list[Any], what: str) -> CollectiveTask:
    """Write the one result into a Tensor."""
    if tuple(results[0].shape) != tuple(tensor.shape):
        raise ShapeError(
            f"{what}: the result has shape {list(results[0].shape)}, the Tensor given for it {list(tensor.shape)}; "
            "give one of the result's shape (over mesh axes Tensors are global: members' results lie along dim 0)"
        )
    state.write(tensor, results[0])
    return CollectiveTask(results)


def _gather(what: str, out: list[Tensor] | Tensor, tensor: Tensor, group: Group) -> CollectiveTask:
    if isinstance(out, Tensor):
        _check_dtype(what, out, tensor)
        return _into(out, _run("all_gather", [tensor], group, join=True), what)
    slots = _slots(what, out, group)
    return _fill(what, out, slots, _run("all_gather", [tensor], group))


def _slots(what: str, out: Any, group: Group) -> list[Tensor]:
    """The Tensors to write, none if the list is to be filled."""
    if not isinstance(out, list):
        raise TypeError(f"{what}: the list for the results must be a list or a Tensor, got {type(out).__name__}")
    _check_tensors(what, out)
    if out and len(out) != group.nranks:
        raise ConfigError(
            f"{what}: the list for the results holds {len(out)} Tensors, group {group.name} has {group.nranks} "
            "members; give an empty list, or a Tensor for each"
        )
    return out


def _fill(what: str, out: list[Tensor], slots: list[Tensor], results: list[Any]) -> CollectiveTask:
    if not slots:
        out.extend(Tensor(a) for a in results)
        return CollectiveTask(results)
    for tensor, result in zip(slots, results, strict=True):
        _check_dtype(what, tensor, Tensor(result))
        _into(tensor, [result], what)
    return CollectiveTask(results)


def _entries(what: str, tensors: Any, group: Group | None) -> tuple[bool, list[Tensor]]:
    """(whether it is one Tensor with the entries along dim 0, the Tensors)."""
    if isinstance(tensors, Tensor):
        if group is not None:
            _check_rows("the Tensor of entries", tensors, group)
        return True, [tensors]
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what}: the entries must be a list of Tensors or a Tensor, got {type(tensors).__name__}")
    entries = list(tensors)
    _check_tensors(what, entries)
    if not entries or (group is not None and len(entries) != group.nranks):
        members = "" if group is None else f", group {group.name} has {group.nranks} members"
        raise ConfigError(f"{what}: got a list of {len(entries)} Tensors{members}; give one for each member")
    for i, entry in enumerate(entries):
        if (entry.shape, entry.dtype) != (entries[0].shape, entries[0].dtype):
            raise ShapeError(
                f"{what}: entry {i} is {entry.dtype.name}{list(entry.shape)}, entry 0 is {entries[0].dtype.name}"
                f"{list(entries[0].shape)}; all must be alike (alltoall_single takes uneven pieces)"
            )
    return False, entries


def _check_tensors(what: str, values: Sequence[Any]) -> None:
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(f"{what}: needs Tensors, got {type(value).__name__}")


def _check_op(what: str, op: Any, tensor: Any) -> None:
    _check_tensors(what, [tensor])
    if isinstance(op, bool) or op not in REDUCE_NAMES:
        raise ConfigError(f"{what}: op={op!r} is none of ReduceOp.{', ReduceOp.'.join(REDUCE_NAMES.values())}")
    if op == ReduceOp.AVG and not dtypes.is_inexact(tensor.dtype):
        raise DTypeError(
            f"{what}: the mean of {tensor.dtype.name} is not {tensor.dtype.name}; cast the tensor, or use SUM"
        )
    if op in (ReduceOp.MAX, ReduceOp.MIN) and dtypes.is_complex(tensor.dtype):
        raise DTypeError(
            f"{what}: {tensor.dtype.name} has no order, so no {REDUCE_NAMES[op]}; reduce its abs() instead"
        )


def _check_dtype(what: str, out: Tensor, given: Tensor) -> None:
    if out.dtype != given.dtype:
        raise DTypeError(f"{what}: the Tensor for the result is {out.dtype.name}, the input {given.dtype.name}")


def _check_same(what: str, out: Sequence[Tensor], entry: Tensor, group: Group, whole: bool) -> None:
    """Before anything is sent: with processes each result is as large as an entry."""
    for tensor in out:
        _check_dtype(what, tensor, entry)
        wanted = [entry.shape[0] // group.nranks, *entry.shape[1:]] if whole else entry.shape
        if not group.axes and tensor.shape != wanted:
            raise ShapeError(
                f"{what}: each entry has shape {list(wanted)}, the Tensor for the result {list(tensor.shape)}"
            )


def _check_rows(name: str, tensor: Tensor, group: Group) -> None:
    if not tensor.ndim or tensor.shape[0] % group.nranks:
        raise ShapeError(
            f"{name} of shape {list(tensor.shape)} cannot be cut along dim 0 into {group.nranks} equal pieces, one for "
            f"each member of group {group.name}"
        )


def _sizes(name: str, sizes: Sequence[int] | None, tensor: Tensor, group: Group) -> list[int]:
    if sizes is None:
        _check_rows(name.split("_")[0] + "_tensor", tensor, group)
        return [tensor.shape[0] // group.nranks] * group.nranks
    result = [int(s) for s in sizes]
    if len(result) != group.nranks or min(result) < 0 or not tensor.ndim or sum(result) != tensor.shape[0]:
        raise ShapeError(
            f"alltoall_single: {name}={result} must be {group.nranks} row counts that add up to dim 0 of "
            f"{list(tensor.shape)}"
        )
    return result
