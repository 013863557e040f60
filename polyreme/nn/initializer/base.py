"""What an initializer is, and how many inputs and outputs a parameter has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from polyreme.core import rng, state
from polyreme.core.devices.transfer import from_host
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor


class Initializer:
    """Initial values for a parameter: `values(shape, dtype)` makes them, calling it fills a Tensor.

    A subclass defines one of values, forward(param, block) and __call__(param, block); the latter two write into param.

    >>> class Sevens(Initializer):
    ...     def forward(self, param, block=None):
    ...         param.fill_(7.0)
    >>> Sevens().values([2], np.dtype("float32")).tolist()
    [7.0, 7.0]
    """

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        """An array of initial values. Random ones come from the default generator."""
        if (type(self).forward, type(self).__call__) == (Initializer.forward, Initializer.__call__):
            raise NotImplementedError(f"{type(self).__name__} defines none of values, forward and __call__")
        return filled(self, shape, dtype)

    def __call__(self, param: Any, block: Any = None) -> Any:
        """Fill param in place; returns it. In static mode the startup Program will."""
        return self.forward(param, block)

    def forward(self, param: Any, block: Any = None) -> Any:
        """What calling it does: fill param with values."""
        if isinstance(param._array, Symbol):
            state.require_recorder("the initial value of a Variable").initialize(param, self)
            return param
        state.write(param, self.values(param.shape, param.dtype))
        return param

    def key(self) -> jax.Array:
        """A random key of its own."""
        return rng.default_generator.next_key()


class Filling(Initializer):
    """The initializer that a function of (param, block) is, which writes into param."""

    def __init__(self, fill: Callable[..., Any]) -> None:
        self.fill = fill

    def __call__(self, param: Any, block: Any = None) -> Any:
        self.fill(param, block)
        return param


def filled(fill: Callable[..., Any], shape: Sequence[int], dtype: np.dtype) -> jax.Array:
    """What fill(param, block) writes into a Tensor of zeros."""
    with state.outside_capture():
        param = Tensor(from_host(np.zeros(shape), dtype))
        fill(param, None)
        return param._array


def array_of(values: Any, dtype: np.dtype) -> jax.Array:
    """Values on the host, or traced ones, as an array of this dtype."""
    return values.astype(dtype) if isinstance(values, state.Tracer) else from_host(values, dtype)


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """(inputs, outputs) of one unit: [in, out] of a matrix, [out, in, *kernel] of a convolution (times its size)."""
    if len(shape) < 2:
        return (shape[0], shape[0]) if shape else (1, 1)
    if len(shape) == 2:
        return shape[0], shape[1]
    receptive = math.prod(shape[2:])
    return shape[1] * receptive, shape[0] * receptive
