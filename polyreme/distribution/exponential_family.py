"""ExponentialFamily: entropy and divergence from the derivative of the log normalizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.autograd import grad
from polyreme.core.op import recorded
from polyreme.distribution.distribution import Distribution
from polyreme.distribution.kl import register_kl
from polyreme.eager.mode import enable_grad
from polyreme.eager.tensor import Tensor
from polyreme.ops.reduce import sum as sum_of


class ExponentialFamily(Distribution):
    """A family with density exp(<t(x), theta> - F(theta) + k(x)).

    A subclass gives `_natural_parameters`, the Tensors of theta, `_log_normalizer(*theta)`, which computes F by ops,
    and `_mean_carrier_measure`, the mean of k(x). Then entropy() is F(theta) - <theta, grad F(theta)> - E[k(x)], and
    kl_divergence between two of one class is the Bregman divergence of F (Nielsen and Nock 2010).
    """

    @property
    def _natural_parameters(self) -> tuple[Tensor, ...]:
        raise self._lacks("_natural_parameters")

    def _log_normalizer(self, *natural_parameters: Tensor) -> Tensor:
        raise self._lacks("_log_normalizer")

    @property
    def _mean_carrier_measure(self) -> Any:
        raise self._lacks("_mean_carrier_measure")

    def entropy(self) -> Tensor:
        """Entropy of each distribution, nats: [*batch_shape]."""
        theta = self._natural_parameters
        normalizer, slopes = _normalizer_and_slopes(self)
        return normalizer - _inner(theta, slopes, normalizer) - self._mean_carrier_measure


def _normalizer_and_slopes(family: ExponentialFamily) -> tuple[Tensor, list[Tensor]]:
    """F(theta) and its gradient, both differentiable with respect to theta."""
    normalizer, *slopes = values_and_slopes(family._log_normalizer, *family._natural_parameters)
    return normalizer, slopes


@recorded
def values_and_slopes(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """[fn(*inputs), the gradient of its sum for each input]; a static Program holds this as one call."""
    wants = any(not t.stop_gradient for t in inputs)
    with enable_grad():
        # the derivative is by leaves of its own where an input wants no gradient
        taped = [t if not t.stop_gradient else _leaf(t) for t in inputs]
        values = fn(*taped)
        slopes = grad(values, taped, create_graph=wants)
    return [values if wants else values.detach(), *(s for s in slopes if s is not None)]


def _leaf(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    found.stop_gradient = False
    return found


def _inner(a: tuple[Tensor, ...] | list[Tensor], b: list[Tensor], batch: Tensor) -> Tensor:
    """Sum of products over the natural parameters, and over the dims of an event that they have."""
    products = [x * y for x, y in zip(a, b, strict=True)]
    return sum(sum_of(p, list(range(batch.ndim, p.ndim))) if p.ndim > batch.ndim else p for p in products)  # type: ignore[return-value]


@register_kl(ExponentialFamily, ExponentialFamily)
def _bregman(p: ExponentialFamily, q: ExponentialFamily) -> Tensor:
    if type(p) is not type(q):
        raise NotImplementedError(
            f"kl_divergence({type(p).__name__}, {type(q).__name__}): the Bregman divergence is between two of one "
            "class; write a function with register_kl"
        )
    at_p, slopes = _normalizer_and_slopes(p)
    theta_p, theta_q = p._natural_parameters, q._natural_parameters
    at_q = q._log_normalizer(*theta_q)
    apart = [b - a for a, b in zip(theta_p, theta_q, strict=True)]
    return at_q - at_p - _inner(apart, slopes, at_p)
