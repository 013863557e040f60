"""Tensors spread over a mesh by placements, and what distributes programs by them."""

from polyreme.distributed.auto_parallel import api
from polyreme.distributed.auto_parallel.engine.engine import Engine
from polyreme.distributed.auto_parallel.engine.strategy import Strategy
from polyreme.distributed.auto_parallel.layers.annotate import (
    fetch,
    parallel_manual_seed,
    recompute,
    shard_op,
    shard_tensor,
)
from polyreme.distributed.auto_parallel.layers.ring import RingConv2d, RingFlashAttention
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, create_mesh, get_mesh, set_mesh

__all__ = [
    "Engine",
    "ProcessMesh",
    "RingConv2d",
    "RingFlashAttention",
    "Strategy",
    "api",
    "create_mesh",
    "fetch",
    "get_mesh",
    "parallel_manual_seed",
    "recompute",
    "set_mesh",
    "shard_op",
    "shard_tensor",
]
