"""Layer with 1.7's parameters, and Tensors from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme import nn
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ProgramError
from polyreme.fluid.mode import in_dygraph_mode


class Layer(nn.Layer):
    """Base class of layers: parameters and sublayers as attributes, and a forward."""

    def __init__(self, name_scope: str | None = None, dtype: Any = "float32") -> None:
        super().__init__(name_scope, dtype)


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


__all__ = ["Layer", "enabled", "to_variable"]
