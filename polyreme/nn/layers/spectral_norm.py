"""A weight divided by its largest singular value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.core import state
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.manipulation import reshape, transpose


class SpectralNorm(Layer):
    """weight / sigma, sigma the largest singular value of weight as a matrix whose rows are its dim `dim`.

    sigma = u^T W v by power_iters steps of power iteration from weight_u and weight_v, which every call moves on; no
    gradient flows to u and v. Source: arXiv:1802.05957, algorithm 1.
    """

    def __init__(
        self,
        weight_shape: Sequence[int],
        dim: int = 0,
        power_iters: int = 1,
        eps: float = 1e-12,
        dtype: Any = "float32",
    ) -> None:
        super().__init__(dtype=dtype)
        self._weight_shape = list(weight_shape)
        self._dim = resolve_dim("SpectralNorm", weight_shape, dim, power_iters)
        self._power_iters, self._eps = power_iters, eps
        for part, size in vector_sizes(weight_shape, self._dim).items():
            vector = self.create_parameter([size], ParamAttr(initializer=Normal(), trainable=False))
            vector.is_statistic = True
            self.add_parameter(f"weight_{part}", vector)

    def forward(self, x: Any) -> Any:
        if list(x.shape) != self._weight_shape:
            raise ShapeError(f"SpectralNorm was made for a weight of shape {self._weight_shape}, got {list(x.shape)}")
        return over_singular_value(x, self.weight_u, self.weight_v, self._dim, self._power_iters, self._eps)


def resolve_dim(what: str, shape: Sequence[int], dim: int, power_iters: int) -> int:
    """dim, counted from the first. Raises ConfigError for one that the shape has not, and for no steps."""
    if not -len(shape) <= dim < len(shape):
        raise ConfigError(f"{what}: dim {dim} is outside weight_shape {list(shape)}")
    if power_iters < 1:
        raise ConfigError(f"{what}: power_iters is at least 1, got {power_iters}")
    return dim % len(shape)


def vector_sizes(shape: Sequence[int], dim: int) -> dict[str, int]:
    """Elements of the singular vectors u and v of a weight as a matrix whose rows are its dim `dim`."""
    return {"u": shape[dim], "v": math.prod(shape) // shape[dim]}


def over_singular_value(x: Any, u: Any, v: Any, dim: int, power_iters: int, eps: float) -> Any:
    """x divided by its largest singular value, which power_iters steps estimate from u and v and move those."""
    order = [dim, *(d for d in range(x.ndim) if d != dim)]
    matrix = reshape(transpose(x, order), [x.shape[dim], -1])
    fixed, left, right = matrix.detach(), u, v
    for _ in range(power_iters):
        right = F.normalize(fixed.T.matmul(left), axis=0, epsilon=eps)
        left = F.normalize(fixed.matmul(right), axis=0, epsilon=eps)
    if power_iters:
        state.write(u, state.read(left))
        state.write(v, state.read(right))
    return x / (left * matrix.matmul(right)).sum()
