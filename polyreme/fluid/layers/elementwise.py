"""Arithmetic, comparisons and logic of two Variables, with 1.7's axis, act, cond and out."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.eager.dispatch import rebind
from polyreme.errors import DTypeError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.manipulation import unsqueeze
from polyreme.program.activations import activate


def put(target: Any, result: Any, what: str) -> Any:
    """Give target this value from here on, as 1.7's output=, out= and cond= do; returns it. Raises DTypeError."""
    if not getattr(target, "persistable", False):
        return rebind(target, result, what)
    if result.dtype != target.dtype:
        raise DTypeError(f"{what}: the result is {result.dtype.name}, {target.name!r} is {target.dtype.name}; cast it")
    state.write(target, result._array)
    return target


def aligned(x: Any, y: Any, axis: int, what: str) -> Any:
    """y with dims of 1 behind it, so that its first dim stands under x's dim `axis`."""
    if axis == -1 or x.ndim == y.ndim:
        return y
    behind = x.ndim - axis - y.ndim
    if not 0 <= axis < x.ndim or behind < 0:
        raise ShapeError(f"{what}: y {list(y.shape)} does not fit x {list(x.shape)} from dim axis={axis} on")
    return unsqueeze(y, builtins.list(builtins.range(y.ndim, y.ndim + behind))) if behind else y


def _elementwise(name: str, fn: Callable[[Any, Any], Any], formula: str) -> Callable[..., Any]:
    def run(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
        return activate(fn(x, aligned(x, y, axis, run.__name__)), act)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"act({formula}), element by element; y's dims stand under x's from dim axis on, -1 for the last."
    return layer(run)


elementwise_add: Callable[..., Any] = _elementwise("elementwise_add", ar.add, "x + y")
elementwise_sub: Callable[..., Any] = _elementwise("elementwise_sub", ar.subtract, "x - y")
elementwise_mul: Callable[..., Any] = _elementwise("elementwise_mul", ar.multiply, "x * y")
elementwise_div: Callable[..., Any] = _elementwise("elementwise_div", ar.divide, "x / y")
elementwise_max: Callable[..., Any] = _elementwise("elementwise_max", mt.maximum, "max(x, y)")
elementwise_min: Callable[..., Any] = _elementwise("elementwise_min", mt.minimum, "min(x, y)")
elementwise_pow: Callable[..., Any] = _elementwise("elementwise_pow", ar.pow, "x ** y")
elementwise_mod: Callable[..., Any] = _elementwise("elementwise_mod", ar.remainder, "x mod y")
elementwise_floordiv: Callable[..., Any] = _elementwise("elementwise_floordiv", ar.floor_divide, "floor(x / y)")


def _compare(fn: Callable[[Any, Any], Any], x: Any, y: Any, cond: Any, what: str) -> Any:
    result = fn(x, y)
    return result if cond is None else put(cond, result, what)


@layer
def less_than(x: Any, y: Any, force_cpu: bool | None = None, cond: Any = None) -> Any:
    """x < y; written into cond if that is given. force_cpu: the value does not depend on where it is computed."""
    return _compare(ar.less_than, x, y, cond, "less_than")


def _comparison(name: str, fn: Callable[[Any, Any], Any], formula: str) -> Callable[..., Any]:
    def run(x: Any, y: Any, cond: Any = None) -> Any:
        return _compare(fn, x, y, cond, run.__name__)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"{formula}, element by element; written into cond if that is given."
    return layer(run)


less_equal: Callable[..., Any] = _comparison("less_equal", ar.less_equal, "x <= y")
greater_than: Callable[..., Any] = _comparison("greater_than", ar.greater_than, "x > y")
greater_equal: Callable[..., Any] = _comparison("greater_equal", ar.greater_equal, "x >= y")
equal: Callable[..., Any] = _comparison("equal", ar.equal, "x == y")
not_equal: Callable[..., Any] = _comparison("not_equal", ar.not_equal, "x != y")


def _logical(name: str, fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def run(x: Any, y: Any, out: Any = None, name: str | None = None) -> Any:
        return _compare(fn, x, y, out, run.__name__)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"{name.removeprefix('logical_')} of bools, element by element; written into out if that is given."
    return layer(run)


logical_and: Callable[..., Any] = _logical("logical_and", ar.logical_and)
logical_or: Callable[..., Any] = _logical("logical_or", ar.logical_or)
logical_xor: Callable[..., Any] = _logical("logical_xor", ar.logical_xor)


@layer
def logical_not(x: Any, out: Any = None, name: str | None = None) -> Any:
    """not of bools, element by element; written into out if that is given."""
    return _compare(lambda a, _: ar.logical_not(a), x, None, out, "logical_not")


@layer
def sums(input: Any, out: Any = None) -> Any:
    """The sum of Variables of one shape; written into out if that is given."""
    total = mt.add_n(input if isinstance(input, (builtins.list, tuple)) else [input])
    return total if out is None else put(out, total, "sums")


@layer
def sum(x: Any) -> Any:
    """The sum of Variables of one shape."""
    return mt.add_n(x if isinstance(x, (builtins.list, tuple)) else [x])


@layer
def scale(
    x: Any, scale: Any = 1.0, bias: float = 0.0, bias_after_scale: bool = True, act: str | None = None,
    name: str | None = None,
) -> Any:  # fmt: skip
    """act(scale * x + bias), or act(scale * (x + bias)) unless bias_after_scale."""
    return activate(mt.scale(x, scale, bias, bias_after_scale), act)


@layer
def pow(x: Any, factor: Any = 1.0, name: str | None = None) -> Any:
    """x ** factor."""
    return ar.pow(x, factor)


@layer
def increment(x: Any, value: float = 1.0, in_place: bool = True) -> Any:
    """x + value, of shape [1]; x has that value from here on, unless in_place is False."""
    raised = ar.add(x, int(value) if dtypes.is_integer(x.dtype) else value)
    return put(x, raised, "increment") if in_place else raised


__all__ = [
    "elementwise_add", "elementwise_div", "elementwise_floordiv", "elementwise_max", "elementwise_min",
    "elementwise_mod", "elementwise_mul", "elementwise_pow", "elementwise_sub", "equal", "greater_equal",
    "greater_than", "increment", "less_equal", "less_than", "logical_and", "logical_not", "logical_or", "logical_xor",
    "not_equal", "pow", "scale", "sum", "sums",
]  # fmt: skip
