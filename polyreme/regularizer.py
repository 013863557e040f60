"""Penalties on the size of parameters, given to an optimizer or to one parameter by its ParamAttr."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from polyreme.errors import ConfigError
from polyreme.module_names import suggest_names


@dataclass(frozen=True)
class WeightDecayRegularizer:
    """Base of the penalties; equal ones compare equal and hash alike, so that a captured step is found again."""

    coeff: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.coeff, bool) or not isinstance(self.coeff, (int, float)) or not self.coeff >= 0:
            raise ConfigError(f"{type(self).__name__}: coeff is a number of at least 0, got {self.coeff!r}")

    def gradient(self, p: jax.Array) -> jax.Array:
        """What the penalty adds to the gradient of parameter p, in p's shape and dtype."""
        raise NotImplementedError


@dataclass(frozen=True)
class L1Decay(WeightDecayRegularizer):
    """Penalty coeff * sum |p|: coeff * sign(p) on the gradient, 0 at 0."""

    def gradient(self, p: jax.Array) -> jax.Array:
        return jnp.asarray(self.coeff, p.dtype) * jnp.sign(p)


@dataclass(frozen=True)
class L2Decay(WeightDecayRegularizer):
    """Penalty coeff / 2 * sum p^2: coeff * p on the gradient.

    >>> L2Decay(0.1) == L2Decay(0.1)
    True
    """

    def gradient(self, p: jax.Array) -> jax.Array:
        return jnp.asarray(self.coeff, p.dtype) * p


__all__ = ["L1Decay", "L2Decay", "WeightDecayRegularizer"]

suggest_names(__name__)
