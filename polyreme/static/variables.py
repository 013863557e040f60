"""Variables with initial values: create_global_var and create_parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError
from polyreme.ops.creation import full
from polyreme.root import create_parameter

__all__ = ["create_global_var", "create_parameter"]


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: Any,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Any:
    """A Variable that is filled with value: by the startup Program if persistable, else at the start of every run.

    force_cpu: where it lies is for the compiler to say, and its value is the same. Raises ProgramError outside static
    mode and for a name that is taken by something else.
    """
    if (recorder := state.recorder()) is None:
        raise ProgramError("create_global_var makes a Variable of a static Program; call enable_static() first")
    sizes, wanted = [int(size) for size in shape], dtypes.as_dtype(dtype)
    if not persistable:
        made = full(sizes, value, wanted)
        if name is not None:
            made.name = name
            made.block.vars.setdefault(name, made)
        return made
    start = Tensor(np.full(sizes, value, wanted))
    return recorder.declare_buffer(name or unique_name.generate("create_global_var"), start)
