"""Kaiming initial values, and the gain of an activation.

Source: arXiv:1502.01852.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn.initializer.base import Initializer, fans
from polyreme.nn.initializer.basic import Normal, Uniform

_GAINS = {
    "sigmoid": 1.0,
    "linear": 1.0,
    "conv1d": 1.0,
    "conv2d": 1.0,
    "conv3d": 1.0,
    "conv1d_transpose": 1.0,
    "conv2d_transpose": 1.0,
    "conv3d_transpose": 1.0,
    "tanh": 5.0 / 3.0,
    "relu": math.sqrt(2.0),
    "selu": 3.0 / 4.0,
}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Factor on the standard deviation that keeps a signal's scale through an activation.

    param: the negative slope of "leaky_relu", 0.01 if None. Raises ConfigError for an unknown activation.

    >>> round(calculate_gain("tanh"), 4)
    1.6667
    """
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else float(param)
        return math.sqrt(2.0 / (1.0 + slope**2))
    if nonlinearity not in _GAINS:
        raise ConfigError(f"calculate_gain: {nonlinearity!r}{did_you_mean(nonlinearity, [*_GAINS, 'leaky_relu'])}")
    return _GAINS[nonlinearity]


class KaimingNormal(Initializer):
    """Gaussian of standard deviation gain / sqrt(fan), gain by the activation that follows. Source: equation 14.

    mode: "fan_in" or "fan_out". fan_in: the number to use instead of the parameter's own.
    """

    fan_in: float | int | None
    gain: float

    def __init__(
        self,
        fan_in: float | None = None,
        negative_slope: float = 0.0,
        nonlinearity: str = "relu",
        mode: str = "fan_in",
    ) -> None:
        if mode not in ("fan_in", "fan_out"):
            raise ConfigError(f"{type(self).__name__}: mode is 'fan_in' or 'fan_out', got {mode!r}")
        if isinstance(fan_in, (int, float)):  # of a Tensor the value is read when it is used
            self._check_fan(fan_in)
        self.fan_in, self.mode = fan_in, mode
        self.gain = calculate_gain(nonlinearity, negative_slope)

    def std(self, shape: Sequence[int]) -> float:
        """Standard deviation for a parameter of this shape."""
        fan = fans(shape)[0 if self.mode == "fan_in" else 1] if self.fan_in is None else self.fan_in
        self._check_fan(fan)
        return self.gain / math.sqrt(float(fan))

    def _check_fan(self, fan: Any) -> None:
        if getattr(fan, "size", 1) != 1 or not float(fan) > 0:
            raise ConfigError(f"{type(self).__name__}: fan_in is a number above 0, got {fan!r}")

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return Normal(0.0, self.std(shape)).values(shape, dtype)


class KaimingUniform(KaimingNormal):
    """Uniform in +-gain * sqrt(3 / fan): the same standard deviation as KaimingNormal."""

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        limit = math.sqrt(3.0) * self.std(shape)
        return Uniform(-limit, limit).values(shape, dtype)
