"""Kernels of messages and samples over graphs."""

from __future__ import annotations

from typing import Any

from polyreme import geometric, incubate
from polyreme.paddle_scripts.internals.kernels.registry import Kernels, listing

KERNELS: Kernels = {}
_kernel = listing(KERNELS)


def _size(out_size: Any) -> Any:
    """A number of rows: an int, a Tensor or a list of one; 0 is as many as the input has."""
    if isinstance(out_size, (list, tuple)):
        out_size = out_size[0] if out_size else 0
    return None if isinstance(out_size, int) and out_size <= 0 else out_size


@_kernel
def _send_u_recv(x: Any, src_index: Any, dst_index: Any, reduce_op: str = "SUM", out_size: Any = (0,)) -> Any:
    return geometric.send_u_recv(x, src_index, dst_index, reduce_op.lower(), _size(out_size))


@_kernel
def _send_ue_recv(
    x: Any, y: Any, src_index: Any, dst_index: Any, message_op: str = "ADD", reduce_op: str = "SUM",
    out_size: Any = (0,),
) -> Any:  # fmt: skip
    return geometric.send_ue_recv(
        x, y, src_index, dst_index, message_op.lower(), reduce_op.lower(), _size(out_size)
    )  # fmt: skip


@_kernel
def _send_uv(x: Any, y: Any, src_index: Any, dst_index: Any, message_op: str = "ADD") -> Any:
    return geometric.send_uv(x, y, src_index, dst_index, message_op.lower())


@_kernel
def _segment_pool(x: Any, segment_ids: Any, pooltype: str = "SUM") -> Any:
    return getattr(geometric, f"segment_{pooltype.lower()}")(x, segment_ids)


def _three(out: Any) -> tuple[Any, Any, Any]:
    """Neighbours, how many, and the ids of the edges, or None."""
    return out if len(out) == 3 else (*out, None)


@_kernel
def _graph_sample_neighbors(
    row: Any, colptr: Any, x: Any, eids: Any, perm_buffer: Any, sample_size: int, return_eids: bool,
    flag_perm_buffer: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    return _three(incubate.graph_sample_neighbors(row, colptr, x, eids, perm_buffer, sample_size, return_eids))


@_kernel
def _weighted_sample_neighbors(
    row: Any, colptr: Any, edge_weight: Any, input_nodes: Any, eids: Any, sample_size: int, return_eids: bool
) -> tuple[Any, Any, Any]:
    return _three(
        geometric.weighted_sample_neighbors(row, colptr, edge_weight, input_nodes, sample_size, eids, return_eids)
    )


@_kernel
def _graph_khop_sampler(
    row: Any, colptr: Any, x: Any, eids: Any, sample_sizes: Any, return_eids: bool
) -> tuple[Any, Any, Any, Any, Any]:
    out = incubate.graph_khop_sampler(row, colptr, x, sample_sizes, eids, return_eids)
    return out if len(out) == 5 else (*out, None)
