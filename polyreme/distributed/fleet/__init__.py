"""fleet: hybrid parallelism as the public API spells it."""

from collections.abc import Callable
from typing import Any

from polyreme.distributed import auto_parallel as auto
from polyreme.distributed.fleet import meta_parallel, recompute, utils
from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.role_maker import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
from polyreme.distributed.fleet.base.topology import CommunicateTopology, HybridCommunicateGroup, ParallelMode
from polyreme.distributed.fleet.base.util_factory import UtilBase
from polyreme.distributed.fleet.fleet import Fleet, fleet
from polyreme.distributed.fleet.model import distributed_model, distributed_optimizer
from polyreme.distributed.fleet.scaler import distributed_scaler
from polyreme.errors import nearest

init = fleet.init
reset = fleet.reset
get_hybrid_communicate_group = fleet.get_hybrid_communicate_group
is_first_worker = fleet.is_first_worker
worker_index = fleet.worker_index
worker_num = fleet.worker_num
rank = fleet.rank
nranks = fleet.nranks
world_size = fleet.world_size
node_num = fleet.node_num
is_worker = fleet.is_worker
worker_endpoints = fleet.worker_endpoints
is_server = fleet.is_server
server_num = fleet.server_num
server_index = fleet.server_index
server_endpoints = fleet.server_endpoints
barrier_worker = fleet.barrier_worker
init_worker = fleet.init_worker
stop_worker = fleet.stop_worker
init_server: Callable[..., Any] = fleet.init_server
run_server: Callable[..., Any] = fleet.run_server
shrink: Callable[..., Any] = fleet.shrink
save_inference_model: Callable[..., Any] = fleet.save_inference_model
save_persistables: Callable[..., Any] = fleet.save_persistables


def __getattr__(name: str) -> object:
    if name == "util":  # another one after each fleet.init
        return fleet.util
    if name == "plan":
        return fleet.plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}")


__all__ = [
    "CommunicateTopology",
    "DistributedStrategy",
    "Fleet",
    "HybridCommunicateGroup",
    "PaddleCloudRoleMaker",
    "ParallelMode",
    "Role",
    "UserDefinedRoleMaker",
    "UtilBase",
    "auto",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "fleet",
    "get_hybrid_communicate_group",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "meta_parallel",
    "node_num",
    "nranks",
    "rank",
    "recompute",
    "reset",
    "run_server",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "shrink",
    "stop_worker",
    "utils",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]
