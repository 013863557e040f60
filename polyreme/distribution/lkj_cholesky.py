"""LKJCholesky: Cholesky factors of random correlation matrices.

Source: Lewandowski, Kurowicka and Joe 2009, sections 2.4 (C-vine) and 3.2 (onion).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.distribution.distribution import Distribution
from polyreme.distribution.gamma import Beta
from polyreme.distribution.parameters import as_tensors, as_value, check, positive, repeated
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.creation import arange, diagonal, eye, ones_like, tril
from polyreme.ops.manipulation import concat, unsqueeze
from polyreme.ops.math import log, sqrt, square
from polyreme.ops.random import randn_like
from polyreme.ops.reduce import sum as sum_of
from polyreme.ops.scan import cumprod
from polyreme.ops.special import lgamma, multigammaln


class LKJCholesky(Distribution):
    """Lower triangular L [dim, dim], rows of length 1: L L^T is a correlation matrix, density det^(concentration - 1).

    dim >= 2; concentration > 0, a number or [*batch]: 1 makes all correlation matrices equally likely, more favours the
    identity. sample_method: "onion" grows the matrix by directions on spheres, "cvine" by partial correlations; both
    draw from the same distribution, and differ in which numbers they use.
    """

    concentration: Tensor
    dim: int

    def __init__(self, dim: int = 2, concentration: Any = 1.0, sample_method: str = "onion") -> None:
        if not isinstance(dim, int) or dim < 2:
            raise ConfigError(f"LKJCholesky: dim={dim!r}; give a whole number of at least 2")
        if sample_method not in ("onion", "cvine"):
            raise ConfigError(f"LKJCholesky: sample_method={sample_method!r}; give 'onion' or 'cvine'")
        check("LKJCholesky", "concentration", concentration, positive)
        (self.concentration,) = as_tensors("LKJCholesky", concentration=concentration)
        self.dim, self.sample_method = dim, sample_method
        super().__init__(self.concentration.shape, (dim, dim))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws without a gradient: [*sample_shape, *batch, dim, dim]."""
        return super().sample(sample_shape)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        eta = unsqueeze(repeated(self.concentration, shape), -1)
        return self._onion(eta) if self.sample_method == "onion" else self._cvine(eta)

    def _onion(self, eta: Tensor) -> Tensor:
        """Row i >= 1 left of the diagonal: a direction times the root of a Beta(i / 2, eta + (dim - 1 - i) / 2)."""
        below = arange(1, self.dim, dtype=eta.dtype)
        lengths = Beta(0.5 * below, eta + 0.5 * (self.dim - 1 - below)).rsample()
        lengths = concat([ones_like(eta), lengths], -1)
        noise = tril(randn_like(unsqueeze(ones_like(lengths), -1) * ones_like(unsqueeze(lengths, -2))), -1)
        # the first row has no direction; a 1 there keeps its length from dividing by 0
        first = eye(self.dim, dtype=eta.dtype)[0]
        direction = noise / sqrt(sum_of(square(noise), -1, keepdim=True) + unsqueeze(first, -1))
        left = sqrt(unsqueeze(lengths, -1)) * direction
        rest = sqrt((1 - sum_of(square(left), -1)).clip(min=0.0))
        return left + unsqueeze(rest, -1) * eye(self.dim, dtype=eta.dtype)

    def _cvine(self, eta: Tensor) -> Tensor:
        """Partial correlations of column j are 2 b - 1 with b from Beta(s, s), s = eta + (dim - 2 - j) / 2."""
        column = arange(self.dim, dtype=eta.dtype)
        # the last column has no entry below the diagonal; its parameter is any number above 0
        shape = eta + 0.5 * (self.dim - 2 - column).clip(min=0.0)
        shape = unsqueeze(shape, -2) * ones_like(unsqueeze(shape, -1))
        partial = tril(2 * Beta(shape, shape).rsample() - 1, -1)
        left = cumprod(sqrt(1 - square(partial)), -1)
        before = concat([ones_like(left[..., :1]), left[..., :-1]], -1)
        return (partial + eye(self.dim, dtype=eta.dtype)) * tril(before)

    def log_prob(self, value: Any) -> Tensor:
        """Log density at L [..., dim, dim] -> [...], with respect to its entries below the diagonal."""
        value = as_value(value, self.concentration)
        if tuple(value.shape[-2:]) != self.event_shape:
            raise ShapeError(
                f"LKJCholesky.log_prob: value has shape {list(value.shape)}; give [..., {self.dim}, {self.dim}]"
            )
        eta = self.concentration
        row = arange(2, self.dim + 1, dtype=eta.dtype)
        power = 2 * unsqueeze(eta - 1, -1) + self.dim - row
        kernel = sum_of(power * log(diagonal(value, axis1=-2, axis2=-1)[..., 1:]), -1)
        count = self.dim - 1
        top = eta + 0.5 * count
        norm = 0.5 * count * math.log(math.pi) + multigammaln(top - 0.5, count) - count * lgamma(top)
        return kernel - norm
