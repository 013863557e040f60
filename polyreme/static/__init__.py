"""polyreme.static: Programs, recorded in static mode and run by an Executor.

Floor: 7.
"""

from polyreme.core.place import CPUPlace, CUDAPlace
from polyreme.hapi.input_spec import InputSpec
from polyreme.nn.parameter import ParamAttr
from polyreme.program.executor import Executor
from polyreme.program.gradient import append_backward, gradients
from polyreme.program.mode import data
from polyreme.program.program import (
    Program,
    Variable,
    default_main_program,
    default_startup_program,
    name_scope,
    program_guard,
)
from polyreme.program.scope import Scope, global_scope, scope_guard

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "Executor",
    "InputSpec",
    "ParamAttr",
    "Program",
    "Scope",
    "Variable",
    "append_backward",
    "data",
    "default_main_program",
    "default_startup_program",
    "global_scope",
    "gradients",
    "name_scope",
    "program_guard",
    "scope_guard",
]
