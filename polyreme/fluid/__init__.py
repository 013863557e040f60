"""polyreme.fluid: the names and behaviours of PaddlePaddle 1.7's `fluid`, over programs and ops.

Floor: 7.
"""

from polyreme.core.place import CPUPlace, CUDAPlace, is_compiled_with_cuda
from polyreme.fluid import clip, initializer, layers, optimizer, regularizer
from polyreme.fluid.executor import Executor
from polyreme.fluid.lod_tensor import LoDTensor, LoDTensorArray, create_lod_tensor, create_random_int_lodtensor
from polyreme.fluid.param_attr import ParamAttr
from polyreme.program.program import (
    Program,
    Variable,
    default_main_program,
    default_startup_program,
    name_scope,
    program_guard,
)
from polyreme.program.scope import Scope, global_scope, scope_guard

__all__ = ["LoDTensor", "LoDTensorArray", "create_lod_tensor", "create_random_int_lodtensor"]
