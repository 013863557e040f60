"""The collectives under `communication.stream`: the same, with use_calc_stream in the signature.

XLA orders communication and compute by what depends on what, so there is no stream to choose:
use_calc_stream changes nothing. Paddle refuses it together with sync_op=False, and so is it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyreme.distributed.communication import collectives, point_to_point
from polyreme.distributed.communication.group import Group, ReduceOp
from polyreme.distributed.communication.task import CollectiveTask
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError


def _check(what: str, sync_op: bool, use_calc_stream: bool) -> None:
    if use_calc_stream and not sync_op:
        raise ConfigError(f"stream.{what}: use_calc_stream=True goes with sync_op=True only")


def all_gather(
    tensor_or_tensor_list: list[Tensor] | Tensor,
    tensor: Tensor,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.all_gather."""
    _check("all_gather", sync_op, use_calc_stream)
    return collectives.all_gather(tensor_or_tensor_list, tensor, group, sync_op)


def all_reduce(
    tensor: Tensor,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.all_reduce."""
    _check("all_reduce", sync_op, use_calc_stream)
    return collectives.all_reduce(tensor, op, group, sync_op)


def alltoall(
    out_tensor_or_tensor_list: list[Tensor] | Tensor,
    in_tensor_or_tensor_list: Sequence[Tensor] | Tensor,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.alltoall."""
    _check("alltoall", sync_op, use_calc_stream)
    return collectives.alltoall(out_tensor_or_tensor_list, in_tensor_or_tensor_list, group, sync_op)


def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    out_split_sizes: Sequence[int] | None = None,
    in_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.alltoall_single; the split sizes stand in the other order."""
    _check("alltoall_single", sync_op, use_calc_stream)
    return collectives.alltoall_single(out_tensor, in_tensor, in_split_sizes, out_split_sizes, group, sync_op)


def broadcast(
    tensor: Tensor, src: int, group: Group | None = None, sync_op: bool = True, use_calc_stream: bool = False
) -> CollectiveTask | None:
    """distributed.broadcast."""
    _check("broadcast", sync_op, use_calc_stream)
    return collectives.broadcast(tensor, src, group, sync_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.gather."""
    _check("gather", sync_op, use_calc_stream)
    return collectives.gather(tensor, gather_list, dst, group, sync_op)


def recv(
    tensor: Tensor, src: int = 0, group: Group | None = None, sync_op: bool = True, use_calc_stream: bool = False
) -> CollectiveTask | None:
    """distributed.recv."""
    _check("recv", sync_op, use_calc_stream)
    return point_to_point.recv(tensor, src, group, sync_op)


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.reduce."""
    _check("reduce", sync_op, use_calc_stream)
    return collectives.reduce(tensor, dst, op, group, sync_op)


def reduce_scatter(
    tensor: Tensor,
    tensor_or_tensor_list: Sequence[Tensor] | Tensor,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.reduce_scatter."""
    _check("reduce_scatter", sync_op, use_calc_stream)
    return collectives.reduce_scatter(tensor, tensor_or_tensor_list, op, group, sync_op)


def scatter(
    tensor: Tensor,
    tensor_or_tensor_list: Sequence[Tensor] | Tensor | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> CollectiveTask | None:
    """distributed.scatter."""
    _check("scatter", sync_op, use_calc_stream)
    return collectives.scatter(tensor, tensor_or_tensor_list, src, group, sync_op)


def send(
    tensor: Tensor, dst: int = 0, group: Group | None = None, sync_op: bool = True, use_calc_stream: bool = False
) -> CollectiveTask | None:
    """distributed.send."""
    _check("send", sync_op, use_calc_stream)
    return point_to_point.send(tensor, dst, group, sync_op)
