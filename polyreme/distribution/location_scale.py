"""Families of loc + scale * a standard draw: Normal, Laplace, Cauchy, Gumbel, StudentT; and Uniform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from polyreme.distribution.distribution import Distribution, sample_shape
from polyreme.distribution.kl import register_kl
from polyreme.distribution.parameters import (
    as_value,
    broadcast,
    check,
    concrete,
    positive,
    repeated,
)
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.ops.creation import complex as complex_of
from polyreme.ops.creation import full_like, zeros_like
from polyreme.ops.indices.gather import where
from polyreme.ops.math import abs as abs_of
from polyreme.ops.math import atan, exp, expm1, log, log1p, sign, sqrt, square, tan
from polyreme.ops.probability import gumbel_like, location_scale_log_density
from polyreme.ops.random import gaussian, normal, rand_like, randn_like, standard_gamma, uniform
from polyreme.ops.special import digamma, lgamma

_LOG_2PI = math.log(2 * math.pi)
_EULER = 0.57721566490153286  # the Euler-Mascheroni constant: mean of a standard Gumbel draw


class LocationScale(Distribution):
    """loc + scale * a standard draw; loc and scale broadcast. scale > 0.

    A family writes `_standard` draws, those for loc = 0 and scale = 1, and names its density among those of
    location_scale_log_density.
    """

    loc: Tensor
    scale: Tensor

    family: ClassVar[str]

    def __init__(self, loc: Any, scale: Any) -> None:
        check(type(self).__name__, "scale", scale, positive)
        self.loc, self.scale = broadcast(type(self).__name__, loc=loc, scale=scale)
        super().__init__(self.scale.shape)

    def _standard(self, like: Tensor) -> Tensor:
        """Standard draws in like's shape and dtype."""
        raise NotImplementedError

    def _z(self, value: Any) -> Tensor:
        return (as_value(value, self.loc) - self.loc) / self.scale

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        scale = repeated(self.scale, shape)
        return self.loc + scale * self._standard(scale)

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value, which broadcasts with the batch."""
        return location_scale_log_density(as_value(value, self.loc), self.loc, self.scale, self.family)


class Normal(LocationScale):
    """The normal distribution of mean loc and standard deviation scale.

    A complex loc makes it the circular complex normal, of density exp(-|x - loc|^2 / scale^2) / (pi scale^2): scale^2
    is the sum of the variances of the real and the imaginary part. Densities and divergences are real numbers.

    >>> round(Normal(0.0, 2.0).log_prob(0.0).item(), 4)
    -1.6121
    """

    name: str

    family = "normal"

    def __init__(self, loc: Any, scale: Any, name: str | None = None) -> None:
        super().__init__(loc, scale)
        self.name = name or "Normal"
        self._complex = self.loc.is_complex()

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return square(self.scale)

    def sample(self, shape: Sequence[int] = (), seed: int = 0) -> Tensor:
        """Draws without a gradient: [*shape, *batch_shape]. A seed other than 0 fixes this call's numbers."""
        if not seed:
            return super().sample(shape)
        with no_grad():
            scale = repeated(self.scale, sample_shape(shape))
            noise = gaussian(scale.shape, 0.0, 1.0, seed, scale.dtype)
            if self._complex:  # another seed for the other part
                noise = complex_of(noise, gaussian(scale.shape, 0.0, 1.0, seed + 1, scale.dtype)) / math.sqrt(2)
            return self.loc + scale * noise

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        if self._complex:
            return super()._rsample(shape)
        return normal(repeated(self.loc, shape), self.scale)

    def _standard(self, like: Tensor) -> Tensor:
        return complex_of(randn_like(like), randn_like(like)) / math.sqrt(2)

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value, which broadcasts with the batch."""
        if not self._complex:
            return super().log_prob(value)
        value = value if isinstance(value, Tensor) else Tensor(value)
        apart = abs_of(value - self.loc) / self.scale
        return -square(apart) - 2 * log(self.scale) - math.log(math.pi)

    def entropy(self) -> Tensor:
        """log(2 pi e scale^2) / 2, of the complex normal log(pi e scale^2)."""
        if self._complex:
            return 2 * log(self.scale) + (math.log(math.pi) + 1)
        return log(self.scale) + 0.5 * (_LOG_2PI + 1)


class Laplace(LocationScale):
    """The Laplace distribution, of density exp(-|x - loc| / scale) / (2 scale)."""

    family = "laplace"

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return 2 * square(self.scale)

    @property
    def stddev(self) -> Tensor:
        """sqrt(2) * scale."""
        return self.scale * math.sqrt(2)

    def _standard(self, like: Tensor) -> Tensor:
        # the difference of two exponential draws; neither logarithm is of 0
        return log1p(-rand_like(like)) - log1p(-rand_like(like))

    def entropy(self) -> Tensor:
        """1 + log(2 scale)."""
        return log(self.scale) + (1 + math.log(2))

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value."""
        z = self._z(value)
        return sign(z) * expm1(-abs_of(z)) * -0.5 + 0.5

    def icdf(self, value: Any) -> Tensor:
        """The quantile at value in [0, 1]; NaN outside."""
        above = as_value(value, self.loc) - 0.5
        return self.loc - self.scale * sign(above) * log1p(-2 * abs_of(above))


class Cauchy(LocationScale):
    """The Cauchy distribution: its peak is at loc, and scale is half its width at half that height.

    It has no mean, variance and standard deviation; asking for one raises ConfigError (a ValueError).
    """

    name: str

    family = "cauchy"

    def __init__(self, loc: Any, scale: Any, name: str | None = None) -> None:
        super().__init__(loc, scale)
        self.name = name or "Cauchy"

    @property
    def mean(self) -> Tensor:
        raise self._undefined("mean")

    @property
    def variance(self) -> Tensor:
        raise self._undefined("variance")

    @property
    def stddev(self) -> Tensor:
        """Does not exist: raises ConfigError."""
        raise self._undefined("stddev")

    def _undefined(self, what: str) -> ConfigError:
        return ConfigError(f"Cauchy: its {what} does not exist, the integral diverges; loc is its median")

    def sample(self, shape: Sequence[int] = (), name: str | None = None) -> Tensor:
        """Draws without a gradient: [*shape, *batch_shape]."""
        return super().sample(shape)

    def rsample(self, shape: Sequence[int] = (), name: str | None = None) -> Tensor:
        """Draws as differentiable functions of loc and scale: [*shape, *batch_shape]."""
        return super().rsample(shape)

    def _standard(self, like: Tensor) -> Tensor:
        return tan(math.pi * (rand_like(like) - 0.5))

    def entropy(self) -> Tensor:
        """log(4 pi scale)."""
        return log(self.scale) + math.log(4 * math.pi)

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value."""
        return atan(self._z(value)) / math.pi + 0.5


class Gumbel(LocationScale):
    """The Gumbel distribution of the largest of many draws, of distribution function exp(-exp(-(x - loc) / scale))."""

    family = "gumbel"

    @property
    def mean(self) -> Tensor:
        return self.loc + self.scale * _EULER

    @property
    def variance(self) -> Tensor:
        return square(self.stddev)

    @property
    def stddev(self) -> Tensor:
        """pi / sqrt(6) * scale."""
        return self.scale * (math.pi / math.sqrt(6))

    def _standard(self, like: Tensor) -> Tensor:
        return gumbel_like(like)

    def entropy(self) -> Tensor:
        """1 + log(scale) + Euler's constant."""
        return log(self.scale) + (1 + _EULER)

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value."""
        return exp(-exp(-self._z(value)))


class StudentT(LocationScale):
    """Student's t distribution with df > 0 degrees of freedom, moved by loc and stretched by scale.

    The mean is NaN for df <= 1; the variance NaN for df <= 1 and infinite for df <= 2.
    """

    df: Tensor
    loc: Tensor
    scale: Tensor
    name: str

    def __init__(self, df: Any, loc: Any, scale: Any, name: str | None = None) -> None:
        check("StudentT", "df", df, positive)
        check("StudentT", "scale", scale, positive)
        self.df, self.loc, self.scale = broadcast("StudentT", df=df, loc=loc, scale=scale)
        self.name = name or "StudentT"
        Distribution.__init__(self, self.df.shape)

    @property
    def mean(self) -> Tensor:
        return where(self.df > 1, self.loc, full_like(self.loc, math.nan))

    @property
    def variance(self) -> Tensor:
        df = where(self.df > 2, self.df, full_like(self.df, 3.0))
        finite = square(self.scale) * df / (df - 2)
        infinite = where(self.df > 1, full_like(df, math.inf), full_like(df, math.nan))
        return where(self.df > 2, finite, infinite)

    def _standard(self, like: Tensor) -> Tensor:
        df = self.df + zeros_like(like)
        return randn_like(like) * sqrt(0.5 * df / standard_gamma(0.5 * df))

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value, which broadcasts with the batch."""
        df = self.df
        norm = lgamma(0.5 * (df + 1)) - lgamma(0.5 * df) - 0.5 * log(math.pi * df)
        return norm - log(self.scale) - 0.5 * (df + 1) * log1p(square(self._z(value)) / df)

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        half, more = 0.5 * self.df, 0.5 * (self.df + 1)
        log_beta = lgamma(half) + math.lgamma(0.5) - lgamma(more)
        return log(self.scale) + 0.5 * log(self.df) + log_beta + more * (digamma(more) - digamma(half))


class Uniform(Distribution):
    """The uniform distribution on [low, high); low < high, and both broadcast."""

    low: Tensor
    high: Tensor
    name: str

    def __init__(self, low: Any, high: Any, name: str | None = None) -> None:
        self.low, self.high = broadcast("Uniform", low=low, high=high)
        values = [concrete(low), concrete(high)]
        if values[0] is not None and values[1] is not None:
            gap = values[1] - values[0]
            if not (gap > 0).all():
                raise ConfigError(f"Uniform: high - low is {float(gap.min())!r} somewhere; give low < high everywhere")
        self.name = name or "Uniform"
        super().__init__(self.low.shape)

    @property
    def mean(self) -> Tensor:
        return (self.low + self.high) * 0.5

    @property
    def variance(self) -> Tensor:
        return square(self.high - self.low) / 12

    def sample(self, shape: Sequence[int] = (), seed: int = 0) -> Tensor:
        """Draws without a gradient: [*shape, *batch_shape]. A seed other than 0 fixes this call's numbers."""
        if not seed:
            return super().sample(shape)
        with no_grad():
            low = repeated(self.low, sample_shape(shape))
            return low + (self.high - self.low) * uniform(low.shape, low.dtype, 0.0, 1.0, seed)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        low = repeated(self.low, shape)
        return low + (self.high - self.low) * rand_like(low)

    def log_prob(self, value: Any) -> Tensor:
        """-log(high - low) where low <= value < high, else -inf."""
        value = as_value(value, self.low)
        density = -log(self.high - self.low) + zeros_like(value)
        return where((value >= self.low) & (value < self.high), density, full_like(density, -math.inf))

    def entropy(self) -> Tensor:
        """log(high - low)."""
        return log(self.high - self.low)

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value."""
        share = (as_value(value, self.low) - self.low) / (self.high - self.low)
        return share.clip(0.0, 1.0)


@register_kl(Normal, Normal)
def _normal(p: Normal, q: Normal) -> Tensor:
    ratio = square(p.scale / q.scale)
    apart = square(abs_of(p.loc - q.loc) / q.scale)
    whole = ratio + apart - 1 - log(ratio)
    return whole if p._complex or q._complex else 0.5 * whole


@register_kl(Laplace, Laplace)
def _laplace(p: Laplace, q: Laplace) -> Tensor:
    apart, ratio = abs_of(p.loc - q.loc), p.scale / q.scale
    return ratio * exp(-apart / p.scale) + apart / q.scale - log(ratio) - 1


@register_kl(Cauchy, Cauchy)
def _cauchy(p: Cauchy, q: Cauchy) -> Tensor:
    """Chyzak and Nielsen 2019, equation 2."""
    squares = square(p.scale + q.scale) + square(p.loc - q.loc)
    return log(squares / (4 * p.scale * q.scale))


@register_kl(Gumbel, Gumbel)
def _gumbel(p: Gumbel, q: Gumbel) -> Tensor:
    ratio, apart = p.scale / q.scale, (p.loc - q.loc) / q.scale
    return -log(ratio) + _EULER * (ratio - 1) + apart + exp(-apart + lgamma(1 + ratio)) - 1


@register_kl(Uniform, Uniform)
def _uniform(p: Uniform, q: Uniform) -> Tensor:
    inside = (p.low >= q.low) & (p.high <= q.high)
    apart = log((q.high - q.low) / (p.high - p.low))
    return where(inside, apart, full_like(apart, math.inf))
