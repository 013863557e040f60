"""Positional arguments in the order that layers of PaddlePaddle had before 3.3, beside the order that they have now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def is_bool(value: Any) -> bool:
    """True for True and False alone."""
    return isinstance(value, bool)


def is_no_bool(value: Any) -> bool:
    """True for all but True and False."""
    return not isinstance(value, bool)


def also_in_order(
    common: int, names: tuple[str, ...], unless: Callable[[Any], bool] = is_bool
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Let an __init__ take what follows its first `common` positional arguments as `names`, in the earlier order,
    unless the first of it belongs to the present order. Raises TypeError for one too many, or one that is named too.
    """

    def decorate(init: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(init)
        def run(self: Any, *args: Any, **kwargs: Any) -> R:
            if len(args) <= common or unless(args[common]):
                return init(self, *args, **kwargs)
            rest = args[common:]
            what = type(self).__name__
            if len(rest) > len(names):
                raise TypeError(f"{what}: takes {common + len(names)} positional arguments, {len(args)} were given")
            named = dict(zip(names, rest, strict=False))
            twice = sorted(named.keys() & kwargs.keys())
            if twice:
                raise TypeError(f"{what}: {', '.join(twice)} was given by position and by name; give it once")
            return init(self, *args[:common], **named, **kwargs)

        return run

    return decorate
