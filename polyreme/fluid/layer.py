"""What every function of fluid.layers is made with: recording, and refusals of what cannot be honoured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.fluid.mode import begin, guard
from polyreme.ops.manipulation import flatten
from polyreme.program.block import Variable


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of fluid.layers: what it calls is recorded, see fluid.mode.

    Called on Tensors that have values, outside of Programs, it runs at once, as in scripts of PaddlePaddle 2.0 to 2.4.
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if state.watch.active is None and _have_values([*args, *kwargs.values()]):
            with guard():
                return fn(*args, **kwargs)
        begin()
        return fn(*args, **kwargs)

    return run


def _have_values(arguments: list[Any]) -> bool:
    flat = [v for a in arguments for v in (a if isinstance(a, (list, tuple)) else (a,))]
    return any(isinstance(v, Tensor) and not isinstance(v, Variable) for v in flat)


def one(value: Any) -> Any:
    """A number as 1.7 has it: of shape [1]."""
    return flatten(value) if not value.shape else value


def unsupported(what: str, parameter: str, value: Any, instead: str) -> None:
    """ConfigError for a parameter whose value cannot be honoured."""
    raise ConfigError(f"fluid.layers.{what}: {parameter}={value!r} cannot be honoured; {instead}")


def seedless(what: str, seed: Any) -> None:
    """ConfigError for a seed of a layer that draws at every step."""
    if seed not in (None, 0):
        unsupported(what, "seed", seed, "set Program.random_seed, which fixes every random op of the Program")


__all__ = ["layer", "one", "seedless", "unsupported"]
