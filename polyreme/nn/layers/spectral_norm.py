"""A weight divided by its largest singular value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.ops.manipulation import reshape, transpose


class SpectralNorm(Layer):
    """weight / sigma, sigma the largest singular value of weight as a matrix whose rows are its dim `dim`.

    sigma = u^T W v by power_iters steps of power iteration from the buffers weight_u and weight_v, which every call
    moves on; no gradient flows to u and v. Source: arXiv:1802.05957, algorithm 1.
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
        self.weight_shape = list(weight_shape)
        if not -len(self.weight_shape) <= dim < len(self.weight_shape):
            raise ConfigError(f"SpectralNorm: dim {dim} is outside weight_shape {self.weight_shape}")
        if power_iters < 1:
            raise ConfigError(f"SpectralNorm: power_iters is at least 1, got {power_iters}")
        self.dim, self.power_iters, self.eps = dim % len(self.weight_shape), power_iters, eps
        rows = self.weight_shape[self.dim]
        columns = math.prod(self.weight_shape) // rows
        self.register_buffer("weight_u", Tensor(Normal().values([rows], self._dtype)))
        self.register_buffer("weight_v", Tensor(Normal().values([columns], self._dtype)))

    def forward(self, x: Any) -> Any:
        if list(x.shape) != self.weight_shape:
            raise ShapeError(f"SpectralNorm was made for a weight of shape {self.weight_shape}, got {list(x.shape)}")
        order = [self.dim, *(d for d in range(x.ndim) if d != self.dim)]
        matrix = reshape(transpose(x, order), [x.shape[self.dim], -1])
        fixed, u, v = matrix.detach(), self.weight_u, self.weight_v
        for _ in range(self.power_iters):
            v = F.normalize(fixed.T.matmul(u), axis=0, epsilon=self.eps)
            u = F.normalize(fixed.matmul(v), axis=0, epsilon=self.eps)
        state.write(self.weight_u, state.read(u))
        state.write(self.weight_v, state.read(v))
        return x / (u * matrix.matmul(v)).sum()
