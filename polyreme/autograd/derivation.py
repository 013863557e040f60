"""Functions that take a function and differentiate it; a static Program records a call of one as one operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from polyreme.core import state

DERIVATIONS: dict[str, Callable[..., Any]] = {}
"""By name, as they run on Tensors with values."""
F = TypeVar("F", bound=Callable[..., Any])


def derivation(fn: F) -> F:
    """Declare fn(func, xs, ...), whose results are Tensors in nested lists and tuples, under its name."""
    DERIVATIONS[fn.__name__] = fn

    @functools.wraps(fn)
    def public(func: Callable[..., Any], xs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = state.recorder()
        if recorder is None:
            return fn(func, xs, *args, **kwargs)
        return recorder.derive(fn.__name__, func, xs, args, kwargs)

    return public  # type: ignore[return-value]
