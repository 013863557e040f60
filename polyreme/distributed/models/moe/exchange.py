"""Rows sent to the experts of other processes and brought back, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.autograd import PyLayer
from polyreme.distributed.communication import alltoall_single
from polyreme.distributed.communication.group import Group, resolve
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.creation import zeros
from polyreme.ops.indices.gather import gather


def global_scatter(
    x: Any, local_count: Any, global_count: Any, group: Group | None = None, use_calc_stream: bool = True
) -> Any:
    """Rows x [n, d], sorted by expert, to the processes that have their experts -> the rows that come here [m, d].

    local_count [w * e]: rows for expert i % e of process i // e, which add up to n; global_count [w * e]: rows that
    come from process i // e for expert i % e here, which add up to m. The result is sorted by expert, then by process.
    With one process it is x. The sizes are read from the counts, so it is called outside of captured code. There are
    no streams to choose from. Raises ShapeError for counts that do not fit, ConfigError for a group of mesh axes.

    >>> import polyreme as pr
    >>> counts = pr.to_tensor([2, 1])
    >>> global_scatter(pr.to_tensor([[1.0], [2.0], [3.0]]), counts, counts).tolist()
    [[1.0], [2.0], [3.0]]
    """
    members, sent, comes = _counts("global_scatter", local_count, global_count, group)
    _check_rows("global_scatter", "local_count", x, sent)
    return _Scatter.apply(x, members, sent, comes)


def global_gather(
    x: Any, local_count: Any, global_count: Any, group: Group | None = None, use_calc_stream: bool = True
) -> Any:
    """The inverse of global_scatter with these counts: x [m, d], sorted by expert and process -> [n, d]."""
    members, sent, comes = _counts("global_gather", local_count, global_count, group)
    _check_rows("global_gather", "global_count", x, comes)
    return _Gather.apply(x, members, sent, comes)


class _Scatter(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, members: Group, sent: np.ndarray, comes: np.ndarray) -> Any:
        ctx.call = (members, sent, comes)
        return _scattered(x, members, sent, comes)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Gather.apply(grad, *ctx.call)


class _Gather(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, members: Group, sent: np.ndarray, comes: np.ndarray) -> Any:
        ctx.call = (members, sent, comes)
        return _gathered(x, members, sent, comes)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Scatter.apply(grad, *ctx.call)


def _scattered(x: Any, members: Group, sent: np.ndarray, comes: np.ndarray) -> Any:
    received = zeros([int(comes.sum()), *x.shape[1:]], x.dtype)
    alltoall_single(received, x, sent.sum(1).tolist(), comes.sum(1).tolist(), members)
    return gather(received, Tensor(_by_expert(comes)))


def _gathered(x: Any, members: Group, sent: np.ndarray, comes: np.ndarray) -> Any:
    received = zeros([int(sent.sum()), *x.shape[1:]], x.dtype)
    by_process = gather(x, Tensor(np.argsort(_by_expert(comes), kind="stable")))
    alltoall_single(received, by_process, comes.sum(1).tolist(), sent.sum(1).tolist(), members)
    return received


def _by_expert(comes: np.ndarray) -> np.ndarray:
    """The positions of rows that arrive sorted by process [w], then expert [e], once sorted by expert, then process."""
    expert = np.repeat(np.tile(np.arange(comes.shape[1]), len(comes)), comes.reshape(-1))
    return np.argsort(expert, kind="stable")


def _counts(what: str, local: Any, comes: Any, group: Group | None) -> tuple[Group, np.ndarray, np.ndarray]:
    """(group, counts sent [w, e], counts that come [w, e])."""
    members = resolve(group, what)
    if members is None or members.axes:
        raise ConfigError(
            f"{what}: a group {'of mesh axes' if members else 'without this process'}; needs one of processes, which "
            "hold rows of their own. A Tensor over mesh axes is global: use nn.MoE or MoELayer with a plan of ep"
        )
    arrays = [np.asarray(c.numpy()) for c in (local, comes)]
    for name, counts in zip(("local_count", "global_count"), arrays, strict=True):
        if counts.dtype.kind not in "iu":
            raise DTypeError(f"{what}: {name} of {counts.dtype}; counts are integers, cast them to int64")
    if arrays[0].shape != arrays[1].shape or arrays[0].ndim != 1 or arrays[0].size % members.nranks:
        raise ShapeError(
            f"{what}: local_count {list(arrays[0].shape)} and global_count {list(arrays[1].shape)} for "
            f"{members.nranks} processes; needs [processes * experts] twice"
        )
    sent, received = (a.reshape(members.nranks, -1) for a in arrays)
    return members, sent, received


def _check_rows(what: str, name: str, x: Any, counts: np.ndarray) -> None:
    if not x.shape or x.shape[0] != counts.sum() or counts.min(initial=0) < 0:
        raise ShapeError(
            f"{what}: x {list(x.shape)}, but {name}={counts.reshape(-1).tolist()} adds up to {counts.sum()}"
        )
