"""What an initializer is, and how many inputs and outputs a parameter has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polyreme.core import rng, state
from polyreme.core.symbol import Symbol
from polyreme.core.transfer import from_host


class Initializer:
    """Initial values for a parameter: `values(shape, dtype)` makes them, calling it fills a Tensor."""

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        """An array of initial values. Random ones come from the default generator."""
        raise NotImplementedError

    def __call__(self, param: Any, block: Any = None) -> Any:
        """Fill param in place; returns it. In static mode the startup Program will."""
        if isinstance(param._array, Symbol):
            state.require_recorder("the initial value of a Variable").initialize(param, self)
            return param
        state.write(param, self.values(param.shape, param.dtype))
        return param

    def key(self) -> jax.Array:
        """A random key of its own."""
        return rng.default_generator.next_key()


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
