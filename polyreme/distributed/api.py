"""Every name of polyreme.distributed, which loads them when the first is asked for."""

from polyreme.distributed import auto_parallel, sharding
from polyreme.distributed.auto_parallel.engine.dist_model import DistModel, to_static
from polyreme.distributed.auto_parallel.engine.strategy import Strategy
from polyreme.distributed.auto_parallel.engine.to_distributed import to_distributed
from polyreme.distributed.auto_parallel.layers.annotate import DistAttr
from polyreme.distributed.auto_parallel.layers.parallelize import parallelize
from polyreme.distributed.auto_parallel.layers.plans import (
    ColWiseParallel,
    PrepareLayerInput,
    PrepareLayerOutput,
    RowWiseParallel,
)
from polyreme.distributed.auto_parallel.layers.plans_sequence import (
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
)
from polyreme.distributed.auto_parallel.layers.plans_spatial import (
    ContextParallel,
    ConvParallel,
    PrepareContextParallel,
)
from polyreme.distributed.auto_parallel.layers.shard_dataloader import shard_dataloader
from polyreme.distributed.auto_parallel.layers.shard_layer import shard_layer
from polyreme.distributed.auto_parallel.layers.shard_optimizer import (
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    shard_optimizer,
    shard_scaler,
)
from polyreme.distributed.auto_parallel.layers.split_points import SplitPoint
from polyreme.distributed.auto_parallel.tensors.dist_tensor import dtensor_from_fn, shard_tensor
from polyreme.distributed.auto_parallel.tensors.local_layer import LocalLayer
from polyreme.distributed.auto_parallel.tensors.local_map import local_map
from polyreme.distributed.auto_parallel.tensors.placements import Partial, Placement, ReduceType, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, get_mesh, set_mesh
from polyreme.distributed.auto_parallel.tensors.reshard import reshard
from polyreme.distributed.checkpoint import (
    ShardedStateDict,
    ShardedWeight,
    build_sharded_state_dict,
    load_merged_state_dict,
    load_state_dict,
    save_state_dict,
    shard_weight,
)
from polyreme.distributed.communication import (
    Group,
    P2POp,
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    alltoall,
    alltoall_single,
    axis_group,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_group,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
    recv,
    recv_object_list,
    reduce,
    reduce_scatter,
    scatter,
    scatter_object_list,
    send,
    send_object_list,
    stream,
    wait,
)
from polyreme.distributed.data_parallel import DataParallel
from polyreme.distributed.job import watchdog
from polyreme.distributed.parallel import (
    ParallelEnv,
    gloo_barrier,
    gloo_init_parallel_env,
    gloo_release,
    init_parallel_env,
)
from polyreme.distributed.spawning import spawn
from polyreme.distributed.splitting import split
from polyreme.distributed.tasks import TaskPlan
from polyreme.distributed.unshard import unshard_dtensor
from polyreme.jit.device_branches import branches

__all__ = [
    "ColWiseParallel",
    "ContextParallel",
    "ConvParallel",
    "DataParallel",
    "DistAttr",
    "DistModel",
    "Group",
    "LocalLayer",
    "P2POp",
    "ParallelEnv",
    "Partial",
    "Placement",
    "PrepareContextParallel",
    "PrepareLayerInput",
    "PrepareLayerOutput",
    "ProcessMesh",
    "ReduceOp",
    "ReduceType",
    "Replicate",
    "RowWiseParallel",
    "SequenceParallelBegin",
    "SequenceParallelDisable",
    "SequenceParallelEnable",
    "SequenceParallelEnd",
    "Shard",
    "ShardedStateDict",
    "ShardedWeight",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "SplitPoint",
    "Strategy",
    "TaskPlan",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "auto_parallel",
    "axis_group",
    "barrier",
    "batch_isend_irecv",
    "branches",
    "broadcast",
    "broadcast_object_list",
    "build_sharded_state_dict",
    "destroy_process_group",
    "dtensor_from_fn",
    "gather",
    "get_backend",
    "get_group",
    "get_mesh",
    "get_rank",
    "get_world_size",
    "gloo_barrier",
    "gloo_init_parallel_env",
    "gloo_release",
    "init_parallel_env",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "load_merged_state_dict",
    "load_state_dict",
    "local_map",
    "new_group",
    "parallelize",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reshard",
    "save_state_dict",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_mesh",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_scaler",
    "shard_tensor",
    "shard_weight",
    "sharding",
    "spawn",
    "split",
    "stream",
    "to_distributed",
    "to_static",
    "unshard_dtensor",
    "wait",
    "watchdog",
]
