"""ContinuousBernoulli: the Bernoulli mass function, normalised as a density on [0, 1].

Source: arXiv:1907.06845.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.distribution.distribution import Distribution
from polyreme.distribution.gamma import masked, supported
from polyreme.distribution.kl import register_kl
from polyreme.distribution.parameters import as_tensors, as_value, check, probability, repeated
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.ops.arithmetic import cast
from polyreme.ops.creation import full_like
from polyreme.ops.indices.gather import where
from polyreme.ops.math import abs as abs_of
from polyreme.ops.math import expm1, log, log1p, reciprocal, square
from polyreme.ops.random import rand_like


class ContinuousBernoulli(Distribution):
    """The density C(probs) * probs^x * (1 - probs)^(1 - x) on [0, 1]. A number becomes a batch [1], as PaddlePaddle
    documents; probs is kept a rounding away from 0 and 1.

    lims: between these C, the mean and the variance, which are 0 / 0 at probs = 1/2, are computed by Taylor series of
    four terms in probs - 1/2; outside by their formulas, which lose precision by 1 / |probs - 1/2|, in float64.
    """

    probs: Any
    lims: tuple[float, ...]

    def __init__(self, probs: Any, lims: Sequence[float] = (0.499, 0.501)) -> None:
        check("ContinuousBernoulli", "probs", probs, probability)
        if len(lims) != 2 or not 0 < lims[0] <= 0.5 <= lims[1] < 1:
            raise ConfigError(f"ContinuousBernoulli: lims={lims!r}; give two numbers around 0.5, inside (0, 1)")
        (chance,) = as_tensors("ContinuousBernoulli", probs=[probs] if isinstance(probs, (int, float)) else probs)
        rounding = float(dtypes.finfo(chance.dtype).eps)
        self.probs = chance.clip(rounding, 1 - rounding)
        self.lims = tuple(lims)
        super().__init__(chance.shape)

    @property
    def _far(self) -> Tensor:
        """Where the formulas are used."""
        return (self.probs <= self.lims[0]) | (self.probs > self.lims[1])

    @property
    def _apart(self) -> Tensor:
        """probs where the formulas are used, elsewhere another number at which they are finite."""
        return cast(where(self._far, self.probs, full_like(self.probs, 0.25)), "float64")

    @property
    def _logit(self) -> Tensor:
        """log(p / (1 - p)) of those."""
        return log(self._apart) - log1p(-self._apart)

    def _series(self, formula: Tensor, *terms: float) -> Tensor:
        """formula where far from 1/2, near it the polynomial in (probs - 1/2)^2 of these coefficients."""
        squared, near = square(self.probs - 0.5), full_like(self.probs, terms[-1])
        for term in terms[-2::-1]:
            near = near * squared + term
        return where(self._far, cast(formula, near.dtype), near)

    @property
    def _log_norm(self) -> Tensor:
        """log C: of 2 artanh(1 - 2 p) / (1 - 2 p), or 2 at 1/2."""
        formula = log(abs_of(self._logit)) - log(abs_of(1 - 2 * self._apart))
        return self._series(formula, math.log(2), 4 / 3, 104 / 45, 16064 / 2835)

    @property
    def mean(self) -> Tensor:
        p = self._apart
        shift = reciprocal(4 * p - 2) - reciprocal(self._logit)
        ratio = self._series(shift / (p - 0.5), 1 / 3, 16 / 45, 704 / 945, 27392 / 14175)
        return 0.5 + (self.probs - 0.5) * ratio

    @property
    def variance(self) -> Tensor:
        p = self._apart
        formula = square(self._logit) ** -1 - p * (1 - p) / square(1 - 2 * p)
        return self._series(formula, 1 / 12, -1 / 15, -128 / 945, -4864 / 14175)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        return self.icdf(rand_like(repeated(self.probs, shape)))

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value; -inf outside [0, 1]."""
        value = as_value(value, self.probs)
        inside = (value >= 0) & (value <= 1)
        x = supported(inside, value, 0.5)
        return masked(inside, x * log(self.probs) + (1 - x) * log1p(-self.probs) + self._log_norm)

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        mean = self.mean
        return -(self._log_norm + mean * log(self.probs) + (1 - mean) * log1p(-self.probs))

    def _tilt(self) -> tuple[Tensor, Tensor, Tensor]:
        """t = log(p / (1 - p)); where it is so small that its square or cube rounds off; t, or 1 where small."""
        t = log(self.probs) - log1p(-self.probs)
        small = abs_of(t) < float(dtypes.finfo(t.dtype).eps) ** (1 / 3)
        return t, small, where(small, full_like(t, 1.0), t)

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value: expm1(t x) / expm1(t), t = log(p / (1 - p))."""
        x = as_value(value, self.probs).clip(0.0, 1.0)
        t, small, far = self._tilt()
        series = x * (1 + t * ((x - 1) / 2 + t * (x * (x / 6 - 0.25) + 1 / 12)))
        return where(small, series, expm1(far * x) / expm1(far))

    def icdf(self, value: Any) -> Tensor:
        """The quantile at value in [0, 1]: log1p(u expm1(t)) / t, t = log(p / (1 - p))."""
        u = as_value(value, self.probs)
        t, small, far = self._tilt()
        series = u * (1 + t * ((1 - u) / 2 + t * (u * (u / 3 - 0.5) + 1 / 6)))
        return where(small, series, log1p(u * expm1(far)) / far)


@register_kl(ContinuousBernoulli, ContinuousBernoulli)
def _continuous_bernoulli(p: ContinuousBernoulli, q: ContinuousBernoulli) -> Tensor:
    mean = p.mean
    return -p.entropy() - (q._log_norm + mean * log(q.probs) + (1 - mean) * log1p(-q.probs))
