"""polyreme.static: Programs, recorded in static mode and run by an Executor."""

from typing import Any

from polyreme.core.devices.place import CPUPlace, CUDAPlace
from polyreme.eager.tensor import Tensor as Variable  # of either world: isinstance(x, Variable)
from polyreme.errors import did_you_mean
from polyreme.hapi.input_spec import InputSpec
from polyreme.nn.parameter import ParamAttr
from polyreme.program.current import default_main_program, default_startup_program, name_scope, program_guard
from polyreme.program.drawing import draw
from polyreme.program.executor import Executor
from polyreme.program.gradient import append_backward, gradients
from polyreme.program.mode import data
from polyreme.program.parameters import WeightNormParamAttr
from polyreme.program.program import Program
from polyreme.program.scope import Scope, global_scope, scope_guard
from polyreme.static import amp, nn, passes
from polyreme.static.average import ExponentialMovingAverage
from polyreme.static.compiled import BuildStrategy, CompiledProgram, ExecutionStrategy
from polyreme.static.host import Print, py_func
from polyreme.static.io import (
    deserialize_persistables,
    deserialize_program,
    load,
    load_from_file,
    load_inference_model,
    load_program_state,
    normalize_program,
    save,
    save_inference_model,
    save_to_file,
    serialize_persistables,
    serialize_program,
    set_program_state,
)
from polyreme.static.metrics import accuracy, auc
from polyreme.static.places import cpu_places, cuda_places, device_guard, xpu_places
from polyreme.static.variables import create_global_var, create_parameter

_IPU = "it programs a Graphcore IPU, for which XLA has no backend here"
LEFT_OUT = {
    "IpuCompiledProgram": _IPU,
    "IpuStrategy": _IPU,
    "ctr_metric_bundle": "its sums are for jobs on parameter servers, of which there are none; use auc and accuracy",
    "ipu_shard_guard": _IPU,
    "set_ipu_shard": _IPU,
}
"""Public names of the API that do not exist here, and why."""


def __getattr__(name: str) -> Any:
    if name in LEFT_OUT:
        raise AttributeError(f"polyreme.static has no {name}: {LEFT_OUT[name]}")
    raise AttributeError(f"polyreme.static has no name {name!r}{did_you_mean(name, __all__)}")


__all__ = [
    "BuildStrategy",
    "CPUPlace",
    "CUDAPlace",
    "CompiledProgram",
    "ExecutionStrategy",
    "Executor",
    "ExponentialMovingAverage",
    "InputSpec",
    "ParamAttr",
    "Print",
    "Program",
    "Scope",
    "Variable",
    "WeightNormParamAttr",
    "accuracy",
    "amp",
    "append_backward",
    "auc",
    "cpu_places",
    "create_global_var",
    "create_parameter",
    "cuda_places",
    "data",
    "default_main_program",
    "default_startup_program",
    "deserialize_persistables",
    "deserialize_program",
    "device_guard",
    "draw",
    "global_scope",
    "gradients",
    "load",
    "load_from_file",
    "load_inference_model",
    "load_program_state",
    "name_scope",
    "nn",
    "normalize_program",
    "passes",
    "program_guard",
    "py_func",
    "save",
    "save_inference_model",
    "save_to_file",
    "scope_guard",
    "serialize_persistables",
    "serialize_program",
    "set_program_state",
    "xpu_places",
]
