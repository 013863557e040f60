"""The arguments of calls by parameter, and as values to compare."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.core.op import function_of


@functools.cache
def defaults_of(name: str) -> dict[str, Any] | None:
    """Parameter -> default (inspect.Parameter.empty without one) of a declared function; None if it takes any number of
    arguments.
    """
    declared = getattr(function_of(name), "op", None)
    if declared is not None:
        return dict(zip(declared.names, declared.defaults, strict=True))
    parameters = inspect.signature(function_of(name)).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return {p.name: p.default for p in parameters}


def arguments_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every argument of a call by parameter, defaults filled in; None where that cannot be said."""
    known = defaults_of(name)
    if known is None or len(args) > len(known) or not kwargs.keys() <= known.keys():
        return None
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


def frozen(value: Any) -> Any:
    """An argument as something hashable that is equal only for what means the same: 1, 1.0 and True differ."""
    cls = value.__class__
    if isinstance(value, (list, tuple)):
        return cls, tuple(map(frozen, value))
    if isinstance(value, dict):
        return cls, tuple((k, frozen(value[k])) for k in sorted(value))
    if isinstance(value, slice):
        return cls, tuple(map(frozen, (value.start, value.stop, value.step)))
    if isinstance(value, np.ndarray):
        return cls, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (float, complex)):
        return cls, repr(value)  # 0.0 and -0.0 are equal
    return cls, value


def plain(value: Any) -> Any:
    """An argument to compare; lists and tuples of the same are the same."""
    return frozen(tuple(value) if isinstance(value, list) else value)
