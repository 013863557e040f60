"""Constant, normal, truncated normal, uniform and Xavier initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from polyreme.core import draws
from polyreme.errors import ConfigError
from polyreme.nn.initializer.base import Initializer, array_of, fans


class Constant(Initializer):
    """Every element the same."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return array_of(np.full(shape, self.value, dtype), dtype)


class Normal(Initializer):
    """Gaussian with this mean and standard deviation."""

    def __init__(self, mean: float = 0.0, std: float = 1.0, name: str | None = None) -> None:
        _check_std(self, std)
        self.mean = mean
        self.std = std

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return array_of(draws.normal(self.key(), shape) * self.std + self.mean, dtype)


class TruncatedNormal(Initializer):
    """Gaussian with this mean and standard deviation, drawn again until it lies in [a, b]."""

    mean: float
    std: float
    a: float
    b: float

    def __init__(
        self, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, name: str | None = None
    ) -> None:
        _check_std(self, std)
        _check_range(self, a, b)
        self.mean, self.std, self.a, self.b = mean, std, a, b

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        if not self.std:
            return array_of(np.full(shape, min(max(self.mean, self.a), self.b)), dtype)
        low, high = (self.a - self.mean) / self.std, (self.b - self.mean) / self.std
        draw = draws.truncated_normal(self.key(), shape, low, high)
        # the bounds in units of std round: clip keeps the promise
        return array_of((draw * self.std + self.mean).clip(self.a, self.b), dtype)


class Uniform(Initializer):
    """Uniform in [low, high)."""

    def __init__(self, low: float = -1.0, high: float = 1.0, name: str | None = None) -> None:
        _check_range(self, low, high)
        self.low = low
        self.high = high

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return array_of(draws.uniform(self.key(), shape, self.low, self.high), dtype)


class XavierUniform(Initializer):
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out)). Source: Glorot and Bengio, 2010, equation 16."""

    fan_in: float | None
    fan_out: float | None
    gain: float

    def __init__(
        self, fan_in: float | None = None, fan_out: float | None = None, gain: float = 1.0, name: str | None = None
    ) -> None:
        self.fan_in, self.fan_out, self.gain = fan_in, fan_out, gain

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        ins, outs = fans(shape)
        ins, outs = self.fan_in or ins, self.fan_out or outs
        limit = self.gain * math.sqrt(6.0 / (ins + outs))
        return Uniform(-limit, limit).values(shape, dtype)


class XavierNormal(XavierUniform):
    """Gaussian of standard deviation gain * sqrt(2 / (fan_in + fan_out)).

    Source: Glorot and Bengio, 2010, equation 12.
    """

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        ins, outs = fans(shape)
        ins, outs = self.fan_in or ins, self.fan_out or outs
        return Normal(0.0, self.gain * math.sqrt(2.0 / (ins + outs))).values(shape, dtype)


def _check_std(owner: Initializer, std: float) -> None:
    if not std >= 0:
        raise ConfigError(f"{type(owner).__name__}: std is a number of at least 0, got {std!r}")


def _check_range(owner: Initializer, low: float, high: float) -> None:
    if not low <= high:
        raise ConfigError(f"{type(owner).__name__}: the lower bound {low!r} is above the upper bound {high!r}")
