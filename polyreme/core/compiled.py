"""Functions as jax.jit compiles them: told of where they meet many shapes, with options where they draw numbers.

jax itself bounds what it keeps: 8,192 programs, each 0.2 MB or more and 3 of the 65,530 mappings that Linux allows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from polyreme.core import backend, state

_log = logging.getLogger("polyreme.core")

# models have fewer shapes for one function; data of free sizes has more
_MANY_SHAPES = 128
_NOT_TRACING = get_opaque_trace_state()


def compiled(fn: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    """jax.jit of fn, which warns once of many sets of shapes. draws: whether fn draws random numbers."""
    count = 0

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        nonlocal count
        # a captured function's shapes are its own to count
        if state.watch.active is None:
            count += 1
            if count == _MANY_SHAPES:
                _warn(fn.__name__, args)
        return fn(*args)

    return DrawingProgram(traced) if draws else jax.jit(traced)


def _warn(name: str, args: tuple) -> None:
    shapes = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in jax.tree.leaves(args))
    _log.warning(
        "%s was compiled for %d sets of shapes, the last of them %s; each takes 20 ms or more and 0.2 MB. Pad data to "
        "a few sizes, or sort it into batches of like sizes",
        name,
        _MANY_SHAPES,
        shapes,
    )


class DrawingProgram:
    """jax.jit of a function that draws random numbers, with the options of xla_flags.DRAWING.

    jax takes options for a program, not for a call inside one that is being traced: that one has none.
    """

    __slots__ = ("_alone", "_fn", "_inside")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._inside: Callable[..., Any] = jax.jit(fn)
        self._alone: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if get_opaque_trace_state() != _NOT_TRACING:
            return self._inside(*args)
        if self._alone is None:
            # only now: the options depend on the backend, which starts with the first array
            options = backend.drawing_options()
            self._alone = jax.jit(self._fn, compiler_options=options) if options else self._inside
        return self._alone(*args)
