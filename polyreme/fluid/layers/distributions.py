"""Distributions of 1.7: Uniform, Normal, Categorical and MultivariateNormalDiag, whose parameters are numbers, arrays
or Variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core.rng import fixed_key
from polyreme.core.state import TensorState
from polyreme.errors import ConfigError
from polyreme.fluid.layers.tensor import assign
from polyreme.fluid.mode import begin
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import random as rn
from polyreme.ops import reduce as rd
from polyreme.ops.activation import log_softmax
from polyreme.ops.creation import diagonal


def _parameter(what: str, value: Any) -> Any:
    """A Variable of it, a number as one of shape [1]."""
    begin()
    if isinstance(value, TensorState):
        return value
    if not isinstance(value, (int, float, list, tuple, np.ndarray)):
        raise ConfigError(f"{what}: got {type(value).__name__}; give a number, an array or a Variable")
    return assign(np.atleast_1d(np.asarray(value, "float32")))


class _TwoParameters:
    """A distribution of two parameters that broadcast against each other."""

    def __init__(self, first: Any, second: Any) -> None:
        # numbers have no shape of their own: draws have the shape that is asked for
        self._numbers = all(isinstance(v, (int, float)) for v in (first, second))
        name = type(self).__name__
        self._first, self._second = _parameter(name, first), _parameter(name, second)

    def _draws(self, shape: Sequence[int], seed: int, draw: Any) -> Any:
        """draw(sizes) of sizes [*shape, *the parameters' sizes]."""
        begin()
        sizes = [] if self._numbers else list(ar.add(self._first, self._second).shape)
        return draw([*shape, *sizes], **fixed_key(seed))


class Uniform(_TwoParameters):
    """The uniform distribution between low and high."""

    def __init__(self, low: Any, high: Any) -> None:
        super().__init__(low, high)
        self.low, self.high = self._first, self._second

    def sample(self, shape: Sequence[int], seed: int = 0) -> Any:
        """Draws [*shape, *sizes of low and high]; with a seed the same ones in each run."""
        return ar.add(
            ar.multiply(self._draws(shape, seed, rn.rand), ar.subtract(self.high, self.low)), self.low
        )  # fmt: skip

    def log_prob(self, value: Any) -> Any:
        """-log(high - low) between low and high, both excluded; else -inf."""
        begin()
        inside = ar.logical_and(ar.less_than(self.low, value), ar.less_than(value, self.high))
        return ar.subtract(mt.log(ar.cast(inside, value.dtype)), self.entropy())

    def entropy(self) -> Any:
        """log(high - low)."""
        begin()
        return mt.log(ar.subtract(self.high, self.low))


class Normal(_TwoParameters):
    """The normal distribution of mean loc and standard deviation scale."""

    def __init__(self, loc: Any, scale: Any) -> None:
        super().__init__(loc, scale)
        self.loc, self.scale = self._first, self._second

    def sample(self, shape: Sequence[int], seed: int = 0) -> Any:
        """Draws [*shape, *sizes of loc and scale]; with a seed the same ones in each run."""
        return ar.add(ar.multiply(self._draws(shape, seed, rn.randn), self.scale), self.loc)

    def entropy(self) -> Any:
        """log(2 pi e scale^2) / 2."""
        begin()
        return mt.scale(mt.log(self.scale), 1.0, 0.5 + 0.5 * math.log(2 * math.pi))

    def log_prob(self, value: Any) -> Any:
        """-z^2 / 2 - log(scale) - log(2 pi) / 2 for z = (value - loc) / scale."""
        begin()
        z = ar.divide(ar.subtract(value, self.loc), self.scale)
        return ar.subtract(mt.scale(mt.square(z), -0.5, -0.5 * math.log(2 * math.pi)), mt.log(self.scale))

    def kl_divergence(self, other: Normal) -> Any:
        """(r^2 + z^2 - 1) / 2 - log(r) for r = scale / other.scale and z = (loc - other.loc) / other.scale."""
        _same("Normal", self, other)
        ratio = ar.divide(self.scale, other.scale)
        z = ar.divide(ar.subtract(self.loc, other.loc), other.scale)
        return ar.subtract(mt.scale(ar.add(mt.square(ratio), mt.square(z)), 0.5, -0.5), mt.log(ratio))


class Categorical:
    """Classes with chances in proportion to e^logits [*b, classes]."""

    def __init__(self, logits: Any) -> None:
        self.logits = _parameter("Categorical", logits)

    def kl_divergence(self, other: Categorical) -> Any:
        """Sum over classes of p (log p - log q), [*b, 1]."""
        _same("Categorical", self, other)
        log_p, log_q = log_softmax(self.logits, -1), log_softmax(other.logits, -1)
        return rd.sum(ar.multiply(mt.exp(log_p), ar.subtract(log_p, log_q)), -1, keepdim=True)

    def entropy(self) -> Any:
        """-sum over classes of p log p, [*b, 1]."""
        begin()
        log_p = log_softmax(self.logits, -1)
        return mt.scale(rd.sum(ar.multiply(mt.exp(log_p), log_p), -1, keepdim=True), -1.0)


class MultivariateNormalDiag:
    """The normal distribution of mean loc [k] and covariance scale [k, k], of which the diagonal counts."""

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = (_parameter("MultivariateNormalDiag", v) for v in (loc, scale))

    def entropy(self) -> Any:
        """(k (1 + log 2 pi) + log det(scale)) / 2, [1]."""
        begin()
        size = self.scale.shape[0]
        logs = rd.sum(mt.log(diagonal(self.scale)), keepdim=True)
        return mt.scale(logs, 0.5, 0.5 * size * (1 + math.log(2 * math.pi)))

    def kl_divergence(self, other: MultivariateNormalDiag) -> Any:
        """(sum of v / w + (loc - other.loc)^2 / w - 1 + log w - log v) / 2 over diagonals v of this and w of other."""
        _same("MultivariateNormalDiag", self, other)
        v, w = diagonal(self.scale), diagonal(other.scale)
        apart = mt.square(ar.subtract(self.loc, other.loc))
        terms = ar.add(ar.divide(ar.add(v, apart), w), ar.subtract(mt.log(w), mt.log(v)))
        return rd.sum(mt.scale(terms, 0.5, -0.5), keepdim=True)


def _same(what: str, one: Any, other: Any) -> None:
    begin()
    if not isinstance(other, type(one)):
        raise ConfigError(f"{what}.kl_divergence: other is {type(other).__name__}; give another {what}")


__all__ = ["Categorical", "MultivariateNormalDiag", "Normal", "Uniform"]
