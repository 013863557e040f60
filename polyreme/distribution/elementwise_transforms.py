"""Transforms that act on each element: absolute value, affine, exponential, power, sigmoid, hyperbolic tangent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.distribution.parameters import Constraint, as_tensors, check
from polyreme.distribution.transform import Transform
from polyreme.eager.tensor import Tensor
from polyreme.nn.functional import softplus
from polyreme.ops.creation import zeros_like
from polyreme.ops.math import abs as abs_of
from polyreme.ops.math import atanh, exp, log, log1p, sigmoid, tanh
from polyreme.ops.repetition import broadcast_shapes

not_zero: Constraint = Constraint(lambda v: v != 0, "other than 0")


def _exact(given: Any, tensor: Tensor) -> Any:
    """A Python number as it is, so that it takes the dtype of what it meets; else the Tensor."""
    return given if isinstance(given, (int, float)) else tensor


class AbsTransform(Transform):
    """y = |x|, which two x have: inverse(y) is the tuple (-y, y), also for y = 0, and for a y < 0, which no x has."""

    is_injective: bool = False

    def _forward(self, x: Tensor) -> Tensor:
        return abs_of(x)

    def _inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return -y, y

    def _inverse_log_det_jacobian(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return zeros_like(y), zeros_like(y)

    def _image(self, y: Tensor) -> tuple[Tensor, float]:
        return y >= 0, 1.0


class AffineTransform(Transform):
    """y = loc + scale * x; scale is not 0. Numbers or Tensors, which broadcast with x."""

    def __init__(self, loc: Any, scale: Any) -> None:
        check("AffineTransform", "scale", scale, not_zero)
        self._loc, self._scale = as_tensors("AffineTransform", loc=loc, scale=scale)
        self._by = _exact(loc, self._loc), _exact(scale, self._scale)

    @property
    def loc(self) -> Tensor:
        """What is added."""
        return self._loc

    @property
    def scale(self) -> Tensor:
        """What x is multiplied by."""
        return self._scale

    def _forward(self, x: Tensor) -> Tensor:
        loc, scale = self._by
        return loc + scale * x

    def _inverse(self, y: Tensor) -> Tensor:
        loc, scale = self._by
        return (y - loc) / scale

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        loc, scale = self._by
        return log(abs_of(scale + zeros_like(x + loc)))

    def _forward_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return broadcast_shapes(shape, self._loc.shape, self._scale.shape)

    _inverse_shape = _forward_shape


class ExpTransform(Transform):
    """y = exp(x)."""

    def _forward(self, x: Tensor) -> Tensor:
        return exp(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return log(y)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return x

    def _image(self, y: Tensor) -> tuple[Tensor, float]:
        return y > 0, 1.0


class PowerTransform(Transform):
    """y = x^power for x > 0; power is not 0, a number or a Tensor, which broadcasts with x."""

    def __init__(self, power: Any) -> None:
        check("PowerTransform", "power", power, not_zero)
        (self._power,) = as_tensors("PowerTransform", power=power)
        self._by = _exact(power, self._power)

    @property
    def power(self) -> Tensor:
        """The exponent."""
        return self._power

    def _forward(self, x: Tensor) -> Tensor:
        return x**self._by

    def _inverse(self, y: Tensor) -> Tensor:
        return y ** (1 / self._by)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return log(abs_of(self._by * x ** (self._by - 1)))

    def _forward_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return broadcast_shapes(shape, self._power.shape)

    _inverse_shape = _forward_shape

    def _image(self, y: Tensor) -> tuple[Tensor, float]:
        return y > 0, 1.0


class SigmoidTransform(Transform):
    """y = 1 / (1 + exp(-x)); its inverse is log(y / (1 - y))."""

    def _forward(self, x: Tensor) -> Tensor:
        return sigmoid(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return log(y) - log1p(-y)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return -softplus(-x) - softplus(x)

    def _image(self, y: Tensor) -> tuple[Tensor, float]:
        return (y > 0) & (y < 1), 0.5


class TanhTransform(Transform):
    """y = tanh(x)."""

    def _forward(self, x: Tensor) -> Tensor:
        return tanh(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return atanh(y)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        # log(1 - tanh(x)^2), without the cancellation
        return 2.0 * (math.log(2) - x - softplus(-2.0 * x))

    def _image(self, y: Tensor) -> tuple[Tensor, float]:
        return abs_of(y) < 1, 0.0
