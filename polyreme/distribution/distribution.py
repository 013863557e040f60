"""Distribution: what every family has, and what it writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.distribution import kl
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import ShapeError
from polyreme.ops.math import exp, sqrt


class Distribution:
    """A batch of independent distributions of one family.

    A sample has shape [*sample_shape, *batch_shape, *event_shape]: sample_shape is asked for, batch_shape counts
    distributions with parameters of their own, event_shape is that of one draw. Families write what they can of
    log_prob, sample or rsample, entropy, mean and variance; what a family has not raises NotImplementedError.

    Parameters are checked where they have values: not inside a captured function, nor in a static Program.

    >>> from polyreme.distribution import Normal
    >>> two = Normal([0.0, 10.0], 1.0)
    >>> two.batch_shape, two.event_shape, two.sample([5]).shape
    ((2,), (), paddle.Size([5, 2]))
    """

    def __init__(self, batch_shape: Sequence[int] = (), event_shape: Sequence[int] = ()) -> None:
        self._batch_shape = tuple(batch_shape)
        self._event_shape = tuple(event_shape)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """How many distributions there are, in which dims."""
        return self._batch_shape

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one draw from one of them."""
        return self._event_shape

    @property
    def mean(self) -> Tensor:
        """Mean of each distribution: [*batch_shape, *event_shape]."""
        raise self._lacks("mean")

    @property
    def variance(self) -> Tensor:
        """Variance of each distribution, element by element: [*batch_shape, *event_shape]."""
        raise self._lacks("variance")

    @property
    def stddev(self) -> Tensor:
        """Square root of the variance."""
        return sqrt(self.variance)

    def sample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draws without a gradient: [*shape, *batch_shape, *event_shape]."""
        with no_grad():
            return self._sample(sample_shape(shape))

    def rsample(self, shape: Sequence[int] = ()) -> Tensor:
        """Draws as differentiable functions of the parameters: [*shape, *batch_shape, *event_shape]."""
        return self._rsample(sample_shape(shape))

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        return self._rsample(shape)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        raise self._lacks("rsample")

    def entropy(self) -> Tensor:
        """Entropy of each distribution, nats: [*batch_shape]."""
        raise self._lacks("entropy")

    def kl_divergence(self, other: Distribution) -> Tensor:
        """kl_divergence(self, other)."""
        return kl.kl_divergence(self, other)

    def log_prob(self, value: Any) -> Tensor:
        """Log of the density, or of the mass, at value; -inf outside the support."""
        raise self._lacks("log_prob")

    def prob(self, value: Any) -> Tensor:
        """The density, or the mass, at value."""
        return exp(self.log_prob(value))

    def _prob_by_its_older_name(self, value: Any) -> Tensor:
        """prob(value), by its older name; a parameter called probs takes its place."""
        return self.prob(value)

    probs: Any = _prob_by_its_older_name

    def cdf(self, value: Any) -> Tensor:
        """Probability of a draw of at most value."""
        raise self._lacks("cdf")

    def icdf(self, value: Any) -> Tensor:
        """The quantile: the draw below which another falls with probability value."""
        raise self._lacks("icdf")

    def _lacks(self, what: str) -> NotImplementedError:
        family = type(self).__name__
        has = [
            n for n in ("log_prob", "sample", "rsample", "entropy", "mean", "variance", "cdf", "icdf") if _has(self, n)
        ]
        return NotImplementedError(f"{family} has no {what}; it has {', '.join(has) or 'none of the others either'}")


_BEHIND: dict[str, tuple[str, ...]] = {"sample": ("sample", "_sample", "_rsample"), "rsample": ("rsample", "_rsample")}


def _has(distribution: Distribution, name: str) -> bool:
    def own(attribute: str) -> Callable[..., Any]:
        return getattr(type(distribution), attribute)

    return any(own(n) is not getattr(Distribution, n) for n in _BEHIND.get(name, (name,)))


def sample_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A sample shape as a tuple; a Tensor or ndarray of sizes counts as one. Raises TypeError for a lone number."""
    if isinstance(shape, (state.TensorState, np.ndarray)):
        shape = shape.tolist()  # type: ignore[union-attr]
    if not isinstance(shape, (list, tuple)):
        raise TypeError(f"a sample shape is a sequence of sizes, got {shape!r}; for one dim give [{shape!r}]")
    if not all(isinstance(size, (int, np.integer, state.TensorState)) and not isinstance(size, bool) for size in shape):
        raise ShapeError(f"a sample shape is a sequence of sizes >= 0, got {list(shape)}")
    return tuple(shape)
