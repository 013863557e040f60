"""Whole-step capture: to_static, its switches, and control flow on Tensors."""

from polyreme.jit.control_flow import case, cond, switch_case, while_loop
from polyreme.jit.to_static import StaticFunction, enable_to_static, not_to_static, to_static

__all__ = [
    "StaticFunction",
    "case",
    "cond",
    "enable_to_static",
    "not_to_static",
    "switch_case",
    "to_static",
    "while_loop",
]
