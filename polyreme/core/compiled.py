"""Functions as jax.jit compiles them: told of where they meet many shapes, some with options where run by themselves.

How many programs a process keeps is program_bound's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import get_opaque_trace_state

from polyreme.core import state
from polyreme.core.engine import backend, xla_flags
from polyreme.core.engine.program_bound import Programs, bound

_log = logging.getLogger("polyreme.core")

# models have fewer shapes for one function; data of free sizes has more
_MANY_SHAPES = 128
_NOT_TRACING = get_opaque_trace_state()


class Alone(NamedTuple):
    """XLA options of a program that is run by itself.

    table: one of xla_flags. fits: whether that is good for a call of these arrays; None if for any.
    """

    table: Mapping[str, tuple[xla_flags.Option, ...]]
    fits: Callable[..., bool] | None = None


DRAWS = Alone(xla_flags.DRAWING)


def compiled(fn: Callable[..., Any], alone: Alone | None = None) -> Callable[..., Any]:
    """jax.jit of fn, which warns once of many sets of shapes. alone: options of calls outside of other programs."""
    count = 0

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        nonlocal count
        # a captured function's shapes are its own to count
        if state.watch.active is None:
            count += 1
            if count == _MANY_SHAPES:
                _warn(fn.__name__, args)
            bound.add(programs)
        return fn(*args)

    program = jax.jit(traced) if alone is None else ProgramAlone(traced, alone)
    programs = Programs(fn.__name__, program)
    return program


def _warn(name: str, args: tuple) -> None:
    shapes = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in jax.tree.leaves(args))
    _log.warning(
        "%s was compiled for %d sets of shapes, the last of them %s; each takes 20 ms or more and 0.5 MB. Pad data to "
        "a few sizes, or sort it into batches of like sizes",
        name,
        _MANY_SHAPES,
        shapes,
    )


class ProgramAlone:
    """jax.jit of a function, with options where it is run by itself.

    jax takes options for a program, not for a call inside one that is being traced: that one has none.
    """

    __slots__ = ("__weakref__", "_alone", "_fits", "_fn", "_inside", "_table")

    def __init__(self, fn: Callable[..., Any], alone: Alone) -> None:
        self._fn = fn
        self._table, self._fits = alone
        self._inside: Callable[..., Any] = jax.jit(fn)
        self._alone: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if get_opaque_trace_state() != _NOT_TRACING or not (self._fits is None or self._fits(*args)):
            return self._inside(*args)
        if self._alone is None:
            # only now: the options depend on the backend, which starts with the first array
            options = backend.options_alone(self._table)
            self._alone = jax.jit(self._fn, compiler_options=options) if options else self._inside
        return self._alone(*args)

    def clear_cache(self) -> None:
        """Release every program, like clear_cache of jax.jit's functions."""
        for program in (self._inside, self._alone):
            if program is not None:
                program.clear_cache()  # type: ignore[attr-defined]
