"""Whole-step capture: to_static and its switches."""

from polyreme.jit.to_static import StaticFunction, enable_to_static, not_to_static, to_static

__all__ = ["StaticFunction", "enable_to_static", "not_to_static", "to_static"]
