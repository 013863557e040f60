"""fluid.framework: Programs, places, and what version this is."""

from __future__ import annotations

import warnings
from typing import Any

from polyreme.core.devices.place import CUDAPinnedPlace, is_compiled_with_cuda
from polyreme.errors import ConfigError
from polyreme.fluid.absent import refusing
from polyreme.fluid.mode import in_dygraph_mode
from polyreme.nn.parameter import Parameter
from polyreme.program.block import Block, Variable
from polyreme.program.current import default_main_program, default_startup_program, name_scope, program_guard
from polyreme.program.operation import Operation as Operator
from polyreme.program.program import Program
from polyreme.static.places import cpu_places, cuda_places

SPOKEN = (1, 7, 0)
"""The version whose names and behaviour polyreme.fluid has."""


def require_version(min_version: str, max_version: str | None = None) -> None:
    """Raises ConfigError unless 1.7.0, whose behaviour this is, lies between the two versions."""
    low, high = _parts(min_version), None if max_version is None else _parts(max_version)
    if low > SPOKEN or (high is not None and high < SPOKEN):
        raise ConfigError(
            f"require_version: polyreme.fluid behaves as version 1.7.0, wanted is {min_version} to "
            f"{max_version or 'any'}; use polyreme itself for what is newer"
        )


def _parts(version: str) -> tuple[int, ...]:
    if not isinstance(version, str) or not all(p.isdigit() for p in version.split(".")):
        raise ConfigError(f"require_version takes a version such as '1.6.0', got {version!r}")
    return (*map(int, version.split(".")), 0, 0)[:3]


def _get_var(name: str, program: Program | None = None) -> Any:
    """The Variable of this name in a Program's outermost block, the default main one's unless given; ProgramError if
    there is none."""
    return (default_main_program() if program is None else program).global_block().var(name)


def memory_optimize(
    input_program: Program, skip_opt_set: Any = None, print_log: bool = False, level: int = 0,
    skip_grads: bool = True,
) -> None:  # fmt: skip
    """Nothing, but a warning, as in 1.7: the compiler shares memory between values by itself."""
    warnings.warn("memory_optimize does nothing: the compiler does that", DeprecationWarning, stacklevel=2)


def release_memory(input_program: Program, skip_opt_set: Any = None) -> None:
    """Nothing, but a warning, as in 1.7."""
    warnings.warn("release_memory does nothing: the compiler does that", DeprecationWarning, stacklevel=2)


def cuda_pinned_places(device_count: int | None = None) -> list[CUDAPinnedPlace]:
    """So many CUDAPinnedPlaces, CPU_NUM or 1 unless given."""
    return [CUDAPinnedPlace() for _ in cpu_places(device_count)]


__all__ = [
    "Block", "Operator", "Parameter", "Program", "Variable", "cpu_places", "cuda_pinned_places", "cuda_places",
    "default_main_program", "default_startup_program", "in_dygraph_mode", "is_compiled_with_cuda", "memory_optimize",
    "name_scope", "program_guard", "release_memory", "require_version",
]  # fmt: skip

__getattr__ = refusing("fluid.framework", __name__)
