"""Tensors spread over a mesh by placements, and what distributes programs by them."""

from polyreme.distributed.auto_parallel.annotate import (
    fetch,
    parallel_manual_seed,
    recompute,
    shard_op,
    shard_tensor,
)
from polyreme.distributed.auto_parallel.engine import Engine
from polyreme.distributed.auto_parallel.process_mesh import ProcessMesh, create_mesh, get_mesh, set_mesh
from polyreme.distributed.auto_parallel.ring import RingConv2d, RingFlashAttention
from polyreme.distributed.auto_parallel.strategy import Strategy

__all__ = [
    "Engine",
    "ProcessMesh",
    "RingConv2d",
    "RingFlashAttention",
    "Strategy",
    "create_mesh",
    "fetch",
    "get_mesh",
    "parallel_manual_seed",
    "recompute",
    "set_mesh",
    "shard_op",
    "shard_tensor",
]
