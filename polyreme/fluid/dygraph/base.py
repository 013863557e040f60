"""Tensors from arrays, and whether code runs as it is called."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ProgramError
from polyreme.fluid.mode import guard, in_dygraph_mode


def enabled() -> bool:
    """Whether code runs as it is called."""
    return in_dygraph_mode()


def to_variable(value: Any, name: str | None = None, zero_copy: bool | None = None) -> Tensor:
    """A Tensor with a copy of an ndarray; a Tensor as it is. Raises ProgramError outside guard().

    zero_copy: whether memory is shared is never seen here, since arrays are never changed in place.
    """
    if not in_dygraph_mode():
        raise ProgramError("dygraph.to_variable: call it inside `with fluid.dygraph.guard():`")
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (np.ndarray, int, float, list, tuple)):
        raise TypeError(f"dygraph.to_variable takes an ndarray, got {type(value).__name__}")
    made = to_tensor(value)
    if name is not None:
        made.name = name
    return made


__all__ = ["enabled", "guard", "no_grad", "to_variable"]
