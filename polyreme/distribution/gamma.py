"""Families made of Gamma draws: Gamma, Chi2, Exponential, Beta, Dirichlet. Their draws have implicit gradients."""

from __future__ import annotations

import math
from typing import Any

from polyreme.distribution.exponential_family import ExponentialFamily
from polyreme.distribution.kl import register_kl
from polyreme.distribution.parameters import as_tensors, as_value, broadcast, check, positive, repeated
from polyreme.eager.tensor import Tensor
from polyreme.errors import ShapeError
from polyreme.nn.functional import softmax
from polyreme.ops.creation import full_like
from polyreme.ops.indices.gather import where
from polyreme.ops.math import log, log1p, reciprocal, sigmoid, square
from polyreme.ops.probability import standard_log_gamma, xlog1py, xlogy
from polyreme.ops.random import rand_like, standard_gamma
from polyreme.ops.reduce import sum as sum_of
from polyreme.ops.special import digamma, lgamma


def supported(inside: Tensor, value: Tensor, safe: float) -> Tensor:
    """value where inside its support, else a number at which the log density is finite."""
    return where(inside, value, full_like(value, safe))


def masked(inside: Tensor, log_density: Tensor) -> Tensor:
    """log_density inside the support, else -inf."""
    return where(inside, log_density, full_like(log_density, -math.inf))


class Gamma(ExponentialFamily):
    """The Gamma distribution of shape parameter concentration > 0 and rate > 0: mean concentration / rate."""

    concentration: Tensor
    rate: Tensor

    def __init__(self, concentration: Any, rate: Any) -> None:
        check("Gamma", "concentration", concentration, positive)
        check("Gamma", "rate", rate, positive)
        self.concentration, self.rate = broadcast("Gamma", concentration=concentration, rate=rate)
        super().__init__(self.rate.shape)

    @property
    def mean(self) -> Tensor:
        return self.concentration / self.rate

    @property
    def variance(self) -> Tensor:
        return self.concentration / square(self.rate)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        return standard_gamma(repeated(self.concentration, shape)) / self.rate

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value; -inf below 0."""
        value = as_value(value, self.rate)
        inside = value >= 0
        x, a = supported(inside, value, 1.0), self.concentration
        return masked(inside, xlogy(a, self.rate) + xlogy(a - 1, x) - self.rate * x - lgamma(a))

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        a = self.concentration
        return a - log(self.rate) + lgamma(a) + (1 - a) * digamma(a)

    @property
    def _natural_parameters(self) -> tuple[Tensor, ...]:
        return self.concentration - 1, -self.rate

    def _log_normalizer(self, *natural_parameters: Tensor) -> Tensor:
        x, y = natural_parameters
        return lgamma(x + 1) - (x + 1) * log(-y)


class Chi2(Gamma):
    """The distribution of a sum of df squares of standard normal draws: Gamma(df / 2, 1 / 2); df > 0."""

    df: Tensor

    def __init__(self, df: Any) -> None:
        check("Chi2", "df", df, positive)
        (self.df,) = as_tensors("Chi2", df=df)
        super().__init__(0.5 * self.df, full_like(self.df, 0.5))


class Exponential(ExponentialFamily):
    """The exponential distribution of rate > 0: density rate * exp(-rate * x) for x >= 0."""

    rate: Tensor

    def __init__(self, rate: Any) -> None:
        check("Exponential", "rate", rate, positive)
        (self.rate,) = as_tensors("Exponential", rate=rate)
        super().__init__(self.rate.shape)

    @property
    def mean(self) -> Tensor:
        return reciprocal(self.rate)

    @property
    def variance(self) -> Tensor:
        return square(1 / self.rate)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        rate = repeated(self.rate, shape)
        return -log1p(-rand_like(rate)) / rate

    def log_prob(self, value: Any) -> Tensor:
        """log(rate) - rate * value; -inf below 0."""
        value = as_value(value, self.rate)
        return masked(value >= 0, log(self.rate) - self.rate * value)

    def entropy(self) -> Tensor:
        """1 - log(rate)."""
        return -log(self.rate) + 1

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value: 1 - exp(-rate * value)."""
        return -(-self.rate * as_value(value, self.rate).clip(min=0.0)).expm1()

    def icdf(self, value: Any) -> Tensor:
        """The quantile at value in [0, 1]: -log(1 - value) / rate; NaN above 1."""
        return -log1p(-as_value(value, self.rate)) / self.rate

    @property
    def _natural_parameters(self) -> tuple[Tensor, ...]:
        return (-self.rate,)

    def _log_normalizer(self, *natural_parameters: Tensor) -> Tensor:
        return -log(-natural_parameters[0])


class Beta(ExponentialFamily):
    """The Beta distribution on [0, 1] of alpha > 0 and beta > 0: mean alpha / (alpha + beta)."""

    alpha: Tensor
    beta: Tensor

    def __init__(self, alpha: Any, beta: Any) -> None:
        check("Beta", "alpha", alpha, positive)
        check("Beta", "beta", beta, positive)
        self.alpha, self.beta = broadcast("Beta", alpha=alpha, beta=beta)
        super().__init__(self.alpha.shape)

    @property
    def mean(self) -> Tensor:
        return self.alpha / (self.alpha + self.beta)

    @property
    def variance(self) -> Tensor:
        total = self.alpha + self.beta
        return self.alpha * self.beta / (square(total) * (total + 1))

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        a, b = repeated(self.alpha, shape), repeated(self.beta, shape)
        return sigmoid(standard_log_gamma(a) - standard_log_gamma(b))

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value; -inf outside [0, 1]."""
        value = as_value(value, self.alpha)
        inside = (value >= 0) & (value <= 1)
        x = supported(inside, value, 0.5)
        return masked(inside, xlogy(self.alpha - 1, x) + xlog1py(self.beta - 1, -x) - self._log_beta())

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        a, b = self.alpha, self.beta
        return self._log_beta() - (a - 1) * digamma(a) - (b - 1) * digamma(b) + (a + b - 2) * digamma(a + b)

    def _log_beta(self) -> Tensor:
        return lgamma(self.alpha) + lgamma(self.beta) - lgamma(self.alpha + self.beta)

    @property
    def _natural_parameters(self) -> tuple[Tensor, ...]:
        return self.alpha, self.beta

    def _log_normalizer(self, *natural_parameters: Tensor) -> Tensor:
        x, y = natural_parameters
        return lgamma(x) + lgamma(y) - lgamma(x + y)


class Dirichlet(ExponentialFamily):
    """The Dirichlet distribution over points of the simplex: concentration > 0 [*batch, k], an event is [k]."""

    concentration: Tensor

    def __init__(self, concentration: Any) -> None:
        check("Dirichlet", "concentration", concentration, positive)
        (self.concentration,) = as_tensors("Dirichlet", concentration=concentration)
        shape = self.concentration.shape
        if not shape:
            raise ShapeError("Dirichlet: concentration is one number; give a Tensor whose last dim is the categories'")
        super().__init__(shape[:-1], shape[-1:])

    @property
    def mean(self) -> Tensor:
        return self.concentration / sum_of(self.concentration, -1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        total = sum_of(self.concentration, -1, keepdim=True)
        return self.concentration * (total - self.concentration) / (square(total) * (total + 1))

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        return softmax(standard_log_gamma(repeated(self.concentration, shape)), -1)

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value [..., k] -> [...]; elements sum to 1, which is not looked at."""
        value = as_value(value, self.concentration)
        return sum_of(xlogy(self.concentration - 1, value), -1) - self._log_normalizer(self.concentration)

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        a = self.concentration
        total, k = sum_of(a, -1), a.shape[-1]
        whole = self._log_normalizer(a) + (total - k) * digamma(total)
        return whole - sum_of((a - 1) * digamma(a), -1)

    @property
    def _natural_parameters(self) -> tuple[Tensor, ...]:
        return (self.concentration,)

    def _log_normalizer(self, *natural_parameters: Tensor) -> Tensor:
        (a,) = natural_parameters
        return sum_of(lgamma(a), -1) - lgamma(sum_of(a, -1))


@register_kl(Gamma, Gamma)
def _gamma(p: Gamma, q: Gamma) -> Tensor:
    a, b, ratio = p.concentration, q.concentration, p.rate / q.rate
    return b * log(ratio) + lgamma(b) - lgamma(a) + (a - b) * digamma(a) + a * (1 / ratio - 1)


@register_kl(Exponential, Exponential)
def _exponential(p: Exponential, q: Exponential) -> Tensor:
    ratio = q.rate / p.rate
    return ratio - 1 - log(ratio)
