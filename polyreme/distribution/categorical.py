"""Distributions over categories: Categorical, Multinomial."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.distribution.distribution import Distribution
from polyreme.distribution.gamma import masked
from polyreme.distribution.kl import register_kl
from polyreme.distribution.parameters import as_tensors, as_value, below_infinity, check, non_negative, repeated
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.functional import log_softmax
from polyreme.ops.arithmetic import cast
from polyreme.ops.bounds import check_index
from polyreme.ops.creation import full
from polyreme.ops.indices.gather import take_along_axis, where
from polyreme.ops.manipulation import reshape
from polyreme.ops.math import exp, log
from polyreme.ops.probability import gumbel_like, multinomial_counts, multinomial_entropy, xlogy
from polyreme.ops.reduce import sum as sum_of
from polyreme.ops.repetition import expand
from polyreme.ops.search import argmax
from polyreme.ops.special import lgamma


class Categorical(Distribution):
    """One of n categories; logits is [*batch, n], a draw an int64 number below n.

    logits mean two things, as in PaddlePaddle 3.3.1, whose documented examples show both. sample(), entropy() and
    kl_divergence() take softmax(logits) as probabilities; prob(), probs() and log_prob() take logits / sum(logits), and
    so need logits >= 0 (ConfigError). For the log-probability of what sample() drew from logits of any sign, use
    nn.functional.log_softmax(logits).

    >>> one = Categorical([1.0, 3.0])
    >>> one.prob([0, 1]).tolist()
    [0.25, 0.75]
    >>> round(one.entropy().item(), 4)  # of softmax([1, 3]) = [0.119, 0.881]
    0.3653
    """

    logits: Tensor
    name: str

    def __init__(self, logits: Any, name: str | None = None) -> None:
        (self.logits,) = as_tensors("Categorical", logits=logits)
        shape = self.logits.shape
        if not shape or shape[-1] == 0:
            raise ShapeError(f"Categorical: logits has shape {list(shape)}; give [*batch, categories], at least one")
        self._weights = logits
        self.name = name or "Categorical"
        super().__init__(shape[:-1])

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        check("Categorical.sample", "logits", self._weights, below_infinity)
        logits = repeated(self.logits, shape)
        return argmax(logits + gumbel_like(logits), -1)

    def entropy(self) -> Tensor:
        """Entropy of softmax(logits), nats: [*batch]."""
        logs = log_softmax(self.logits, -1)
        return -sum_of(exp(logs) * logs, -1)

    def prob(self, value: Any) -> Tensor:
        """logits / sum(logits) at the categories in value, int64.

        One distribution: in value's shape. A batch: value [m] asks every distribution for the same m categories; value
        [*batch, m] asks each for its own -> [*batch, m].
        """
        check("Categorical.prob", "logits", self._weights, non_negative)
        chances = self.logits / sum_of(self.logits, -1, keepdim=True)
        value = value if isinstance(value, Tensor) else to_tensor(value)
        categories = chances.shape[-1]
        check_index("Categorical.prob", value, categories, chances.ndim - 1, negative=False)
        value = where(value < 0, full([], categories, value.dtype), value)  # NaN where nothing could be checked
        if len(self.batch_shape) == 0:
            return reshape(take_along_axis(chances, reshape(value, [-1]), -1), value.shape)
        if value.ndim == 0:
            return reshape(self.prob(reshape(value, [1])), self.batch_shape)
        if value.ndim not in (1, chances.ndim):
            raise ShapeError(
                f"Categorical.prob: value has shape {list(value.shape)}, logits {list(self.logits.shape)}; give [m] or "
                f"{[*self.batch_shape, 'm']}"
            )
        return take_along_axis(chances, expand(value, [*self.batch_shape, value.shape[-1]]), -1)

    def log_prob(self, value: Any) -> Tensor:
        """log(prob(value))."""
        return log(self.prob(value))


class Multinomial(Distribution):
    """How often each of k outcomes comes up in total_count trials: probs [*batch, k] >= 0, divided by their sum.

    A draw is [k], of probs' dtype.
    """

    total_count: int
    probs: Any

    def __init__(self, total_count: int, probs: Any) -> None:
        if not isinstance(total_count, (int, np.integer)) or isinstance(total_count, bool) or total_count < 1:
            raise ConfigError(f"Multinomial: total_count={total_count!r}; give a whole number of at least 1")
        check("Multinomial", "probs", probs, non_negative)
        (weights,) = as_tensors("Multinomial", probs=probs)
        shape = weights.shape
        if not shape or shape[-1] == 0:
            raise ShapeError(f"Multinomial: probs has shape {list(shape)}; give [*batch, outcomes], at least one")
        self.total_count = int(total_count)
        self.probs = weights / sum_of(weights, -1, keepdim=True)
        super().__init__(shape[:-1], shape[-1:])

    @property
    def mean(self) -> Tensor:
        return self.probs * self.total_count

    @property
    def variance(self) -> Tensor:
        return self.total_count * self.probs * (1 - self.probs)

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        return multinomial_counts(repeated(self.probs, shape), self.total_count)

    def log_prob(self, value: Any) -> Tensor:
        """Log mass at counts [..., k] -> [...]; -inf where they do not sum to total_count."""
        value = as_value(value, self.probs)
        whole = lgamma(sum_of(value, -1) + 1) - sum_of(lgamma(value + 1), -1) + sum_of(xlogy(value, self.probs), -1)
        return masked(sum_of(value, -1) == self.total_count, whole)

    def entropy(self) -> Tensor:
        """Entropy, nats."""
        count = full(self.batch_shape, self.total_count, "float64")
        # what many trials make of a rounding of the sum of the probabilities
        probs = cast(self.probs, "float64")
        probs = probs / sum_of(probs, -1, keepdim=True)
        return cast(multinomial_entropy(count, probs, self.total_count), self.probs.dtype)


@register_kl(Categorical, Categorical)
def _categorical(p: Categorical, q: Categorical) -> Tensor:
    """Of softmax(logits), [*batch, 1]: PaddlePaddle documents the last dim, which other families do not have."""
    logs = log_softmax(p.logits, -1)
    return sum_of(exp(logs) * (logs - log_softmax(q.logits, -1)), -1, keepdim=True)


@register_kl(Multinomial, Multinomial)
def _multinomial(p: Multinomial, q: Multinomial) -> Tensor:
    if p.total_count != q.total_count:
        raise ConfigError(
            f"kl_divergence(Multinomial, Multinomial): total_count is {p.total_count} and {q.total_count}; give "
            "equal ones, there is no closed form otherwise"
        )
    return p.total_count * sum_of(xlogy(p.probs, p.probs) - xlogy(p.probs, q.probs), -1)
