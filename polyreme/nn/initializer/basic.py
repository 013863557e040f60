"""Constant, normal, uniform and Xavier initial values.

Floor: 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.nn.initializer.base import Initializer, fans


class Constant(Initializer):
    """Every element the same."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


class Normal(Initializer):
    """Gaussian with this mean and standard deviation."""

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        self.mean = mean
        self.std = std

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        draw = jax.random.normal(self.key(), tuple(shape), jnp.float32)
        return (draw * self.std + self.mean).astype(dtype)


class Uniform(Initializer):
    """Uniform in [low, high)."""

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        self.low = low
        self.high = high

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return jax.random.uniform(self.key(), tuple(shape), jnp.float32, self.low, self.high).astype(dtype)


class XavierUniform(Initializer):
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out)). Source: Glorot and Bengio, 2010, equation 16."""

    def __init__(self, fan_in: int | None = None, fan_out: int | None = None, gain: float = 1.0) -> None:
        self.fan_in, self.fan_out, self.gain = fan_in, fan_out, gain

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        ins, outs = fans(shape)
        ins, outs = self.fan_in or ins, self.fan_out or outs
        limit = self.gain * math.sqrt(6.0 / (ins + outs))
        return Uniform(-limit, limit).values(shape, dtype)


class XavierNormal(XavierUniform):
    """Gaussian of standard deviation gain * sqrt(2 / (fan_in + fan_out)). Source: Glorot and Bengio, 2010, equation 12."""

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        ins, outs = fans(shape)
        ins, outs = self.fan_in or ins, self.fan_out or outs
        return Normal(0.0, self.gain * math.sqrt(2.0 / (ins + outs))).values(shape, dtype)
