"""MultivariateNormal: the normal distribution of vectors, by its mean and one of three matrices."""

from __future__ import annotations

import math
from typing import Any

from polyreme.distribution.distribution import Distribution
from polyreme.distribution.kl import register_kl
from polyreme.distribution.parameters import as_tensors, as_value, repeated
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.creation import diagonal, eye
from polyreme.ops.manipulation import flip, reshape, swapaxes, unsqueeze
from polyreme.ops.math import log, square
from polyreme.ops.matrices.linalg import cholesky, inverse, triangular_solve
from polyreme.ops.random import randn_like
from polyreme.ops.reduce import sum as sum_of
from polyreme.ops.repetition import broadcast_tensors, expand

_LOG_2PI = math.log(2 * math.pi)


class MultivariateNormal(Distribution):
    """Normal vectors [k] of mean loc [*b, k] and a positive definite covariance [*b, k, k].

    One matrix is given: covariance_matrix, its inverse precision_matrix, or scale_tril, the lower triangular L with
    L L^T = covariance. Batch dims broadcast; a number as loc is the mean of vectors of length k. The other two matrices
    are computed when asked for.
    """

    loc: Tensor

    def __init__(
        self,
        loc: Any,
        covariance_matrix: Any = None,
        precision_matrix: Any = None,
        scale_tril: Any = None,
    ) -> None:
        matrices = {
            "covariance_matrix": covariance_matrix,
            "precision_matrix": precision_matrix,
            "scale_tril": scale_tril,
        }
        named = [name for name, value in matrices.items() if value is not None]
        if len(named) != 1:
            raise ConfigError(
                f"MultivariateNormal: give one of {', '.join(matrices)}; got {', '.join(named) or 'none'}"
            )
        mean, matrix = as_tensors("MultivariateNormal", loc=loc, **{named[0]: matrices[named[0]]})
        if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
            raise ShapeError(f"MultivariateNormal: {named[0]} has shape {list(matrix.shape)}; give [*b, k, k]")
        mean = mean if mean.ndim else reshape(mean, [1])
        self.loc, _ = broadcast_tensors([mean, diagonal(matrix, axis1=-2, axis2=-1)])
        self._scale = {"scale_tril": lambda m: m, "covariance_matrix": cholesky, "precision_matrix": _from_precision}[
            named[0]
        ](matrix)
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:])

    def _whole(self, matrix: Tensor) -> Tensor:
        k = self.event_shape[0]
        return expand(matrix, [*self.batch_shape, k, k])

    @property
    def scale_tril(self) -> Tensor:
        """The lower triangular L with L L^T = covariance: [*b, k, k]."""
        return self._whole(self._scale)

    @property
    def covariance_matrix(self) -> Tensor:
        """[*b, k, k]."""
        return self._whole(self._scale @ swapaxes(self._scale, -1, -2))

    @property
    def precision_matrix(self) -> Tensor:
        """The inverse of the covariance: [*b, k, k]."""
        half = inverse(self._scale)
        return self._whole(swapaxes(half, -1, -2) @ half)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return expand(sum_of(square(self._scale), -1), self.loc.shape)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        noise = randn_like(repeated(self.loc, shape))
        return self.loc + (self._scale @ unsqueeze(noise, -1)).squeeze(-1)

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value [..., k] -> [...]."""
        apart = as_value(value, self.loc) - self.loc
        squared = _squared_length(self._scale, apart)
        return (squared + self.event_shape[0] * _LOG_2PI) * -0.5 - _half_log_det(self._scale)

    def entropy(self) -> Tensor:
        """k / 2 * log(2 pi e) + log det(L): [*b]."""
        whole = _half_log_det(self._scale) + 0.5 * self.event_shape[0] * (1 + _LOG_2PI)
        return expand(whole, self.batch_shape)


def _from_precision(precision: Tensor) -> Tensor:
    """Cholesky factor of the inverse: that of the precision with rows and columns turned round, inverted."""
    turned = cholesky(flip(precision, [-2, -1]))
    upper = swapaxes(flip(turned, [-2, -1]), -1, -2)
    return triangular_solve(upper, eye(precision.shape[-1], dtype=precision.dtype), upper=False)


def _half_log_det(scale: Tensor) -> Tensor:
    return sum_of(log(diagonal(scale, axis1=-2, axis2=-1)), -1)


def _squared_length(scale: Tensor, apart: Tensor) -> Tensor:
    """|L^-1 d|^2 of vectors d [..., k]."""
    return sum_of(square(triangular_solve(scale, unsqueeze(apart, -1), upper=False)), [-2, -1])


@register_kl(MultivariateNormal, MultivariateNormal)
def _multivariate_normal(p: MultivariateNormal, q: MultivariateNormal) -> Tensor:
    if p.event_shape != q.event_shape:
        raise ShapeError(
            f"kl_divergence: vectors of lengths {p.event_shape[0]} and {q.event_shape[0]}; give equal ones"
        )
    between = triangular_solve(q.scale_tril, p.scale_tril, upper=False)
    trace = sum_of(square(between), [-2, -1])
    apart = _squared_length(q.scale_tril, p.loc - q.loc)
    return _half_log_det(q.scale_tril) - _half_log_det(p.scale_tril) + 0.5 * (trace + apart - p.event_shape[0])
