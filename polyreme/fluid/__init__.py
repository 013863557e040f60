"""polyreme.fluid: the names and behaviours of PaddlePaddle 1.7's `fluid`, over programs and ops. See docs/fluid.md."""

from polyreme.core import unique_name
from polyreme.core.devices.place import CPUPlace, CUDAPinnedPlace, CUDAPlace, is_compiled_with_cuda
from polyreme.eager.tensor import Tensor as VarBase
from polyreme.flags import get_flags, set_flags
from polyreme.fluid import (
    average,
    backward,
    clip,
    compiler,
    contrib,
    core,
    data_feeder,
    dataset,
    debugger,
    dygraph,
    dygraph_grad_clip,
    evaluator,
    executor,
    framework,
    incubate,
    initializer,
    install_check,
    io,
    layers,
    lod_tensor,
    metrics,
    net_drawer,
    nets,
    optimizer,
    parallel_executor,
    param_attr,
    profiler,
    reader,
    regularizer,
    transpiler,
)
from polyreme.fluid.absent import refusing
from polyreme.fluid.backward import append_backward, gradients
from polyreme.fluid.compiler import BuildStrategy, CompiledProgram, ExecutionStrategy
from polyreme.fluid.contrib.inferencer import Inferencer
from polyreme.fluid.contrib.trainer import (
    BeginEpochEvent,
    BeginStepEvent,
    CheckpointConfig,
    EndEpochEvent,
    EndStepEvent,
    Trainer,
)
from polyreme.fluid.data_feeder import DataFeeder
from polyreme.fluid.dataset import DatasetFactory, InMemoryDataset, QueueDataset
from polyreme.fluid.dygraph.checkpoint import load_dygraph, save_dygraph
from polyreme.fluid.executor import Executor
from polyreme.fluid.framework import (
    Program,
    Variable,
    cpu_places,
    cuda_pinned_places,
    cuda_places,
    default_main_program,
    default_startup_program,
    memory_optimize,
    name_scope,
    program_guard,
    release_memory,
    require_version,
)
from polyreme.fluid.input import data, embedding, one_hot
from polyreme.fluid.io import load, save
from polyreme.fluid.layers import learning_rate_scheduler as learning_rate_decay
from polyreme.fluid.mode import disable_dygraph, enable_dygraph, in_dygraph_mode
from polyreme.fluid.parallel_executor import ParallelExecutor
from polyreme.fluid.param_attr import ParamAttr, WeightNormParamAttr
from polyreme.fluid.transpiler import DistributeTranspiler, DistributeTranspilerConfig
from polyreme.program.scope import Scope, global_scope, scope_guard
from polyreme.sequences.lod_tensor import LoDTensor, LoDTensorArray, create_lod_tensor, create_random_int_lodtensor
from polyreme.static.places import device_guard

Tensor = LoDTensor

__all__ = [
    "BeginEpochEvent",
    "BeginStepEvent",
    "BuildStrategy",
    "CPUPlace",
    "CUDAPinnedPlace",
    "CUDAPlace",
    "CheckpointConfig",
    "CompiledProgram",
    "DataFeeder",
    "DatasetFactory",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "EndEpochEvent",
    "EndStepEvent",
    "ExecutionStrategy",
    "Executor",
    "InMemoryDataset",
    "Inferencer",
    "LoDTensor",
    "LoDTensorArray",
    "ParallelExecutor",
    "ParamAttr",
    "Program",
    "QueueDataset",
    "Scope",
    "Tensor",
    "Trainer",
    "VarBase",
    "Variable",
    "WeightNormParamAttr",
    "append_backward",
    "average",
    "backward",
    "clip",
    "compiler",
    "contrib",
    "core",
    "cpu_places",
    "create_lod_tensor",
    "create_random_int_lodtensor",
    "cuda_pinned_places",
    "cuda_places",
    "data",
    "data_feeder",
    "dataset",
    "debugger",
    "default_main_program",
    "default_startup_program",
    "device_guard",
    "disable_dygraph",
    "dygraph",
    "dygraph_grad_clip",
    "embedding",
    "enable_dygraph",
    "evaluator",
    "executor",
    "framework",
    "get_flags",
    "global_scope",
    "gradients",
    "in_dygraph_mode",
    "incubate",
    "initializer",
    "install_check",
    "io",
    "is_compiled_with_cuda",
    "layers",
    "learning_rate_decay",
    "load",
    "load_dygraph",
    "lod_tensor",
    "memory_optimize",
    "metrics",
    "name_scope",
    "net_drawer",
    "nets",
    "one_hot",
    "optimizer",
    "parallel_executor",
    "param_attr",
    "profiler",
    "program_guard",
    "reader",
    "regularizer",
    "release_memory",
    "require_version",
    "save",
    "save_dygraph",
    "scope_guard",
    "set_flags",
    "transpiler",
    "unique_name",
]

__getattr__ = refusing("fluid", __name__)
