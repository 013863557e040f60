"""Python's builtin functions that decide by the values they are given, for Tensors whose value is not known yet.

Without such a Tensor among the arguments each is Python's own.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Any

from polyreme.jit import host_calls
from polyreme.jit.branch import condition
from polyreme.jit.capture import staged
from polyreme.jit.control_flow import TensorRange, if_exp, not_, or_


def max_(*args: Any, **options: Any) -> Any:
    """max: the first of the largest."""
    return _best(builtins.max, lambda new, old: new > old, args, options)


def min_(*args: Any, **options: Any) -> Any:
    """min: the first of the smallest."""
    return _best(builtins.min, lambda new, old: new < old, args, options)


def _best(python: Callable, better: Callable, args: tuple, options: dict[str, Any]) -> Any:
    items = list(args[0]) if len(args) == 1 else list(args)
    if not any(staged(item) for item in items) or "key" in options:
        return python(items, **options) if len(args) == 1 else python(*args, **options)
    found = items[0]
    for item in items[1:]:
        found = if_exp(better(item, found), _constant(item), _constant(found), python.__name__)
    return found


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def any_(items: Iterable[Any]) -> Any:
    """any, as a bool or a 0-D bool Tensor."""
    result: Any = False
    for item in items:
        result = or_(_constant(result), _constant(_truth(item)))
        if result is True:
            break
    return result


def all_(items: Iterable[Any]) -> Any:
    """all, as a bool or a 0-D bool Tensor."""
    return not_(any_(not_(item) for item in items))


def _truth(item: Any) -> Any:
    return condition(item) if staged(item) else bool(item)


def enumerate_(items: Any, start: int = 0) -> Any:
    """enumerate, also over range(Tensor)."""
    if not isinstance(items, TensorRange):
        return enumerate(items, start)
    return items.counted(start)


def reversed_(items: Any) -> Any:
    """reversed, also of range(Tensor)."""
    return items.reversed() if isinstance(items, TensorRange) else reversed(items)


_REPLACED: dict[Any, Callable[..., Any]] = {
    max: max_, min: min_, any: any_, all: all_, enumerate: enumerate_, reversed: reversed_,
    str: host_calls.str_, repr: host_calls.repr_,
}  # fmt: skip


def replaced(fn: Any) -> Any:
    """The function that converted code calls in place of a builtin function or method."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, str) and fn.__name__ == "format":
        return host_calls.format_by(owner)
    return _REPLACED.get(fn, fn)
