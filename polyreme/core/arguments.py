"""The arguments of calls by parameter, for functions known by the name they are declared under.

A call that is about to run is bound by its op (Op.bind), which raises for what does not fit; here calls are looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme.core.op import function_of


def parameters_of(name: str) -> list[str]:
    """Parameter names of an op, composite or Tensor method."""
    declared = getattr(function_of(name), "op", None)
    return list(declared.names) if declared is not None else list(inspect.signature(function_of(name)).parameters)


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


def keywords_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of any function by keyword, no defaults filled in. Raises TypeError as the call would."""
    signature = inspect.signature(function)
    keywords: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(value)
        else:
            keywords[name] = value
    return keywords
