"""Distributions over counts: Bernoulli, Binomial, Geometric, Poisson.

Mass is -inf (in logs) outside the support; a value between two counts is not refused: the formula is smooth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.distribution.distribution import Distribution, sample_shape
from polyreme.distribution.exponential_family import ExponentialFamily
from polyreme.distribution.gamma import masked, supported
from polyreme.distribution.kl import register_kl
from polyreme.distribution.parameters import (
    above_zero_to_one,
    as_tensors,
    as_value,
    broadcast,
    check,
    concrete,
    non_negative,
    probability,
    repeated,
)
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError
from polyreme.ops.arithmetic import cast
from polyreme.ops.creation import full_like, zeros_like
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import stack
from polyreme.ops.math import floor, log, log1p, sigmoid
from polyreme.ops.probability import multinomial_entropy, poisson_entropy, xlog1py, xlogy
from polyreme.ops.random import bernoulli, binomial, poisson, rand_like
from polyreme.ops.special import lgamma, logit


class Bernoulli(ExponentialFamily):
    """1 with probability probs, else 0; probs in [0, 1]. `logits` is log(probs / (1 - probs))."""

    probs: Any
    name: str

    def __init__(self, probs: Any, name: str | None = None) -> None:
        check("Bernoulli", "probs", probs, probability)
        (self.probs,) = as_tensors("Bernoulli", probs=probs)
        self.name = name or "Bernoulli"
        super().__init__(self.probs.shape)

    @property
    def logits(self) -> Tensor:
        """log(probs / (1 - probs))."""
        return logit(self.probs)

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        return bernoulli(repeated(self.probs, shape))

    def rsample(self, shape: Sequence[int] = (), temperature: float = 1.0) -> Tensor:
        """Logits of relaxed draws, differentiable with respect to probs: [*shape, *batch_shape].

        (logits + logistic noise) / temperature, whose sigmoid is the Concrete distribution (arXiv:1611.00712): the
        sigmoid is close to 0 or 1 for a small temperature. Raises ConfigError for a temperature <= 0.
        """
        if not temperature > 0:
            raise ConfigError(f"Bernoulli.rsample: temperature={temperature!r}; give a number above 0")
        logits = repeated(self.logits, sample_shape(shape))
        # u is never 0, which would be infinite noise; 1 - u never is either
        u = rand_like(logits).clip(float(np.finfo(np.float32).tiny), 1.0 - float(np.finfo(np.float32).epsneg))
        return (logits + logit(u)) / temperature

    def log_prob(self, value: Any) -> Tensor:
        """value * log(probs) + (1 - value) * log(1 - probs), also between 0 and 1; -inf outside."""
        value = as_value(value, self.probs)
        inside = (value >= 0) & (value <= 1)
        x = supported(inside, value, 0.5)
        return masked(inside, xlogy(x, self.probs) + xlog1py(1 - x, -self.probs))

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value."""
        value = as_value(value, self.probs)
        below_one = where(value < 0, zeros_like(value), 1 - self.probs)
        return where(value < 1, below_one, full_like(below_one, 1.0))

    def entropy(self) -> Tensor:
        """-(p log p + (1 - p) log(1 - p))."""
        return -xlogy(self.probs, self.probs) - xlog1py(1 - self.probs, -self.probs)

    @property
    def _natural_parameters(self) -> tuple[Tensor, ...]:
        return (self.logits,)

    def _log_normalizer(self, *natural_parameters: Tensor) -> Tensor:
        return -log(sigmoid(-natural_parameters[0]))


class Binomial(Distribution):
    """How many of total_count independent trials succeed, each with probability probs in [0, 1]; they broadcast.

    entropy() sums over the support and so needs total_count as a number or as a Tensor with a value.
    """

    total_count: Tensor
    probs: Any

    def __init__(self, total_count: Any, probs: Any) -> None:
        check("Binomial", "total_count", total_count, non_negative)
        check("Binomial", "probs", probs, probability)
        counts = concrete(total_count)
        if counts is not None and not np.all(counts == np.floor(counts)):
            raise ConfigError(f"Binomial: total_count={total_count!r} counts trials; give whole numbers")
        self._most = None if counts is None else int(counts.max(initial=0))
        (chance,) = as_tensors("Binomial", probs=probs)
        self.total_count, self.probs = broadcast(
            "Binomial", total_count=cast(as_value(total_count, chance), chance.dtype), probs=chance
        )
        super().__init__(self.probs.shape)

    @property
    def mean(self) -> Tensor:
        return self.total_count * self.probs

    @property
    def variance(self) -> Tensor:
        return self.total_count * self.probs * (1 - self.probs)

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        drawn = binomial(repeated(self.total_count, shape), repeated(self.probs, shape))
        return cast(drawn, self.probs.dtype)

    def log_prob(self, value: Any) -> Tensor:
        """Log mass at value; -inf outside [0, total_count]."""
        value, n, p = as_value(value, self.probs), self.total_count, self.probs
        inside = (value >= 0) & (value <= n)
        k = where(inside, value, zeros_like(value))
        choices = lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
        return masked(inside, choices + xlogy(k, p) + xlog1py(n - k, -p))

    def entropy(self) -> Tensor:
        """Entropy, nats. Raises CaptureError where total_count has no value."""
        if self._most is None:
            raise CaptureError("Binomial.entropy: total_count has no value in a capture; give a Python number")
        success = cast(self.probs, "float64")  # so that it and its complement sum to 1 however many trials there are
        entropy = multinomial_entropy(self.total_count, stack([success, 1 - success], -1), self._most)
        return cast(entropy, self.probs.dtype)


class Geometric(Distribution):
    """How many trials fail before the first that succeeds: 0, 1, 2, ...; probs in (0, 1] is that of success."""

    probs: Any

    def __init__(self, probs: Any) -> None:
        check("Geometric", "probs", probs, above_zero_to_one)
        (self.probs,) = as_tensors("Geometric", probs=probs)
        super().__init__(self.probs.shape)

    @property
    def mean(self) -> Tensor:
        return 1 / self.probs - 1

    @property
    def variance(self) -> Tensor:
        return (1 / self.probs - 1) / self.probs

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        # the floor of an exponential draw; its derivative is 0 almost everywhere
        probs = repeated(self.probs, shape)
        return floor(log1p(-rand_like(probs)) / log1p(-probs))

    def pmf(self, k: Any) -> Tensor:
        """(1 - probs)^k * probs."""
        return self.prob(k)

    def log_pmf(self, k: Any) -> Tensor:
        """log((1 - probs)^k * probs); -inf below 0."""
        return self.log_prob(k)

    def log_prob(self, value: Any) -> Tensor:
        """Log mass at value; -inf below 0."""
        k = as_value(value, self.probs)
        return masked(k >= 0, xlog1py(k, -self.probs) + log(self.probs))

    def cdf(self, k: Any) -> Tensor:  # type: ignore[override]
        """Probability of a draw of at most k: 1 - (1 - probs)^(floor(k) + 1)."""
        k = floor(as_value(k, self.probs))
        inside = k >= 0
        return where(inside, -((supported(inside, k, 0.0) + 1) * log1p(-self.probs)).expm1(), zeros_like(k))

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        return -log(self.probs) - xlog1py(1 - self.probs, -self.probs) / self.probs


class Poisson(Distribution):
    """The Poisson distribution of mean rate >= 0. A number becomes a batch [1], as PaddlePaddle documents."""

    rate: Tensor

    def __init__(self, rate: Any) -> None:
        check("Poisson", "rate", rate, non_negative)
        (self.rate,) = as_tensors("Poisson", rate=[float(rate)] if isinstance(rate, (int, float)) else rate)
        super().__init__(self.rate.shape)

    @property
    def mean(self) -> Tensor:
        return self.rate

    @property
    def variance(self) -> Tensor:
        return self.rate

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        return poisson(repeated(self.rate, shape))

    def log_prob(self, value: Any) -> Tensor:
        """Log mass at value; -inf below 0."""
        value = as_value(value, self.rate)
        inside = value >= 0
        k = supported(inside, value, 0.0)
        return masked(inside, xlogy(k, self.rate) - self.rate - lgamma(k + 1))

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        return poisson_entropy(self.rate)


def _cross(p: Tensor, q: Tensor) -> Tensor:
    """Divergence between single trials of probabilities p and q."""
    return xlogy(p, p) - xlogy(p, q) + xlog1py(1 - p, -p) - xlog1py(1 - p, -q)


@register_kl(Bernoulli, Bernoulli)
def _bernoulli(p: Bernoulli, q: Bernoulli) -> Tensor:
    return _cross(p.probs, q.probs)


@register_kl(Binomial, Binomial)
def _binomial(p: Binomial, q: Binomial) -> Tensor:
    counts = concrete(p.total_count), concrete(q.total_count)
    if counts[0] is not None and counts[1] is not None and not np.all(counts[0] == counts[1]):
        raise ConfigError(
            f"kl_divergence(Binomial, Binomial): total_count is {counts[0].tolist()} and {counts[1].tolist()}; give "
            "equal ones, there is no closed form otherwise"
        )
    return p.total_count * _cross(p.probs, q.probs)


@register_kl(Geometric, Geometric)
def _geometric(p: Geometric, q: Geometric) -> Tensor:
    return _cross(p.probs, q.probs) / p.probs


@register_kl(Poisson, Poisson)
def _poisson(p: Poisson, q: Poisson) -> Tensor:
    return xlogy(p.rate, p.rate) - xlogy(p.rate, q.rate) - p.rate + q.rate
