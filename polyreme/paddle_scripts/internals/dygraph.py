"""paddle.base.dygraph: running code as it is called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from polyreme.autograd import grad
from polyreme.eager.mode import no_grad
from polyreme.fluid.dygraph import guard, to_variable
from polyreme.paddle_scripts.internals.framework import in_declarative_mode
from polyreme.program.mode import in_dynamic_mode as enabled


def param_guard(parameters: Any) -> AbstractContextManager[None]:
    """Nothing: parameters are the same Tensors when code is captured."""
    return nullcontext()


def to_static_mode_guard(is_to_static: bool = True) -> AbstractContextManager[None]:
    """Nothing: to_static itself says what is captured."""
    return nullcontext()


def switch_to_static_graph(func: Callable[..., Any]) -> Callable[..., Any]:
    """func itself: what builds a Program says so with program_guard."""
    return func


__all__ = ["enabled", "grad", "guard", "in_declarative_mode", "no_grad", "param_guard", "to_variable"]
