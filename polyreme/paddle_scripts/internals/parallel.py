"""Helpers of paddle.distributed.fleet that scripts call beside its layers.

Tensors over a mesh are global here: what PaddlePaddle's tensor-parallel helpers gather, split and reduce is there
already, so over a group of mesh axes they pass their input on. Over a group of several processes, where each holds a
part of its own, they are not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polyreme.distributed.communication import replicas
from polyreme.distributed.communication.collectives import all_reduce as _all_reduce
from polyreme.distributed.communication.group import Group, ReduceOp, default_group, is_initialized
from polyreme.distributed.fleet.fleet import fleet
from polyreme.distributed.parallel import ParallelEnv
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import AbsentError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer


def _whole(tensor: Any, group: Group | None, what: str) -> Any:
    if group is not None and not group.axes and group.nranks > 1:
        raise AbsentError(
            f"{what} over {group.nranks} processes that each hold a part: use the layers of fleet.meta_parallel, whose "
            "parameters are global Tensors over the mesh of fleet.init"
        )
    return tensor


def _c_identity(tensor: Any, group: Group | None = None, skip_c_identity_dynamic: bool = False) -> Any:
    return _whole(tensor, group, "_c_identity")


def _c_concat(tensor: Any, group: Group | None = None) -> Any:
    return _whole(tensor, group, "_c_concat")


def _c_split(tensor: Any, group: Group | None = None) -> Any:
    return _whole(tensor, group, "_c_split")


def _mp_allreduce(tensor: Any, op: int = ReduceOp.SUM, group: Group | None = None, *_: Any, **__: Any) -> Any:
    return _whole(tensor, group, "_mp_allreduce")


def _c_lookup_table(table: Any, index: Any, start_index: int = 0, vocab_size: int = -1, name: Any = None) -> Any:
    """Rows of a table whose first row is start_index; zeros for other indices."""
    inside = (index >= start_index) & (index < start_index + table.shape[0])
    rows = F.embedding((index - start_index) * inside.astype(index.dtype), table)
    return rows * inside.astype(rows.dtype).unsqueeze(-1)


def _c_softmax_with_cross_entropy(
    logits: Any, label: Any, group: Group | None = None, return_softmax: bool = False, ignore_index: int = -100
) -> Any:
    logits = _whole(logits, group, "_c_softmax_with_cross_entropy")
    return F.softmax_with_cross_entropy(
        logits, label.unsqueeze(-1) if label.ndim < logits.ndim else label, ignore_index=ignore_index,
        return_softmax=return_softmax,
    )  # fmt: skip


def fused_allreduce_gradients(parameter_list: Iterable[Any], hcg: Any) -> None:
    """Average gradients over the processes that train on other data; over mesh axes they are those of the whole."""
    fused_allreduce_gradients_with_group(parameter_list, None if hcg is None else hcg.get_data_parallel_group())


def fused_allreduce_gradients_with_group(
    parameter_list: Iterable[Any], group: Group | None, bucket_size: int = 0, scale: float | None = None
) -> None:
    """Sum gradients over a group of processes and divide by scale, by default their number."""
    members = default_group() if group is None else group
    if members.axes or members.nranks == 1:
        return
    for gradient in [p.grad for p in parameter_list if p.grad is not None]:
        _all_reduce(gradient, ReduceOp.AVG if scale is None else ReduceOp.SUM, members)
        if scale is not None:
            gradient.set_value(gradient / scale)


def sync_params_buffers(
    model: Layer, comm_group: Group | None = None, src_rank: int = 0, is_model_parallel: bool = False, **_: Any
) -> None:
    """Give every process of a group the first one's parameters and buffers."""
    members = default_group() if comm_group is None else comm_group
    if not members.axes and members.nranks > 1:
        replicas.agree([*model.parameters(), *model.buffers()], members)


def _broadcast(model: Layer, hcg: Any, fuse_params: bool = True) -> None:
    sync_params_buffers(model)


broadcast_dp_parameters = broadcast_mp_parameters = _broadcast
broadcast_sharding_parameters = broadcast_sep_parameters = _broadcast


def obtain_optimizer_parameters_list(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer updates."""
    return list(unwrap_optimizer(optimizer)._parameters)


def unwrap_optimizer(optimizer: Any, optimizer_instances: Any = ()) -> Any:
    """The optimizer inside of fleet's."""
    while hasattr(optimizer, "_inner_opt"):
        optimizer = optimizer._inner_opt
    return optimizer


def all_reduce(input: Any, mode: str = "sum") -> np.ndarray:
    """The sum, mean, max or min of a number or array over all processes."""
    op = {"sum": ReduceOp.SUM, "mean": ReduceOp.AVG, "max": ReduceOp.MAX, "min": ReduceOp.MIN}[mode]
    tensor = to_tensor(np.asarray(input))
    _all_reduce(tensor, op)
    return tensor.numpy()


def in_auto_parallel_align_mode() -> bool:
    """False: results are the same on every mesh without a mode of their own."""
    return False


def _is_parallel_ctx_initialized() -> bool:
    return is_initialized()


_is_data_parallel_mode = _is_parallel_ctx_initialized
_global_parallel_env = None


def _get_global_parallel_env() -> ParallelEnv:
    return ParallelEnv()


def __getattr__(name: str) -> Any:
    if name == "_HYBRID_PARALLEL_GROUP":  # another one after each fleet.init
        return fleet._group
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class PipelineNames:
    """Attributes of PipelineParallel."""

    def timer_printer(self) -> None:
        """Nothing: the stopwatches are fleet.utils.timer_helper's, and log when they are asked to."""


class FleetNames:
    """Attributes of Fleet."""

    _runtime_handle = None

    @property
    def _hcg(self: Any) -> Any:
        """Absent before fleet.init: scripts ask for it by hasattr."""
        return self.get_hybrid_communicate_group()


class TrackerNames:
    """Attributes of RNGStatesTracker."""

    @property
    def states_(self: Any) -> dict[str, Tensor]:
        """Where every stream stands, by name."""
        return self.get_states_tracker()

    @property
    def seeds_(self: Any) -> set[int]:
        """The seeds that streams started from."""
        return set(self._seeds.values())
