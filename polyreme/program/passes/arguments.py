"""The arguments of recorded calls by parameter."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from polyreme.program.operation import Call, function_of


@functools.cache
def defaults_of(name: str) -> dict[str, Any] | None:
    """Parameter -> default (inspect.Parameter.empty without one) of what a Call calls; None if it takes any number of
    arguments.
    """
    declared = getattr(function_of(name), "op", None)
    if declared is not None:
        return dict(zip(declared.names, declared.defaults, strict=True))
    found = inspect.signature(function_of(name)).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return None
    return {p.name: p.default for p in found}


def arguments_of(call: Call) -> dict[str, Any] | None:
    """Every argument of a call by parameter, defaults filled in; None where that cannot be said."""
    known = defaults_of(call.name)
    if known is None or len(call.args) > len(known) or not call.kwargs.keys() <= known.keys():
        return None
    return {**known, **dict(zip(known, call.args, strict=False)), **call.kwargs}
