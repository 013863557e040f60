"""Turning the tape off and on: no_grad, enable_grad, set_grad_enabled; each a context manager and a decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast, overload

from polyreme.eager.tape import grad_mode

F = TypeVar("F", bound=Callable[..., Any])


class _GradSwitch:
    """Sets whether ops are taped inside the block, or inside the decorated function."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._outer: list[bool] = []

    def __enter__(self) -> Self:
        self._outer.append(grad_mode.enabled)
        grad_mode.enabled = self._enabled
        return self

    def __exit__(self, *_: object) -> None:
        grad_mode.enabled = self._outer.pop()

    def __call__(self, fn: F) -> F:
        if inspect.isgeneratorfunction(fn):
            raise TypeError(f"{fn.__qualname__} is a generator; use the context manager inside it")

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _GradSwitch(self._enabled):
                return fn(*args, **kwargs)

        return cast(F, run)


@overload
def no_grad(func: F) -> F: ...
@overload
def no_grad(func: None = None) -> _GradSwitch: ...
def no_grad(func: Any = None) -> Any:
    """Nothing inside is taped: results have stop_gradient=True. `with no_grad():`, `@no_grad` or `@no_grad()`."""
    switch = _GradSwitch(False)
    return switch if func is None else switch(func)


@overload
def enable_grad(func: F) -> F: ...
@overload
def enable_grad(func: None = None) -> _GradSwitch: ...
def enable_grad(func: Any = None) -> Any:
    """Ops inside are taped again, within no_grad too."""
    switch = _GradSwitch(True)
    return switch if func is None else switch(func)


class set_grad_enabled(_GradSwitch):
    """Turn the tape on or off, at once and until the end of the block if used as a context manager."""

    def __init__(self, mode: bool) -> None:
        super().__init__(bool(mode))
        self._before = grad_mode.enabled
        grad_mode.enabled = self._enabled

    def __enter__(self) -> Self:
        self._outer.append(self._before)
        grad_mode.enabled = self._enabled
        return self


def is_grad_enabled() -> bool:
    """True if ops are taped now."""
    return grad_mode.enabled
