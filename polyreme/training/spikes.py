"""Spikes: losses and gradient norms far above what they have been, found inside the step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from polyreme.errors import ConfigError

ACTIONS = ("skip", "clip")
_LEAST_SHARE = 0.01
"""The least standard deviation, as a share of the mean: a loss that stands still has none of its own."""


@dataclass(frozen=True)
class SpikePolicy:
    """The policy for a step whose loss or gradient norm is above the mean by `sigmas` standard deviations.

    action: "skip" changes nothing; "clip" scales the gradients down to that limit of their norm, a spike of the loss
    alone leaves nothing to clip. Mean and deviation are of about the last `window` steps, and count after `warmup`
    steps. A spike enters them as the limit that it passed, so that a new level is learnt. Raises ConfigError for values
    out of range.

    >>> SpikePolicy("skip").sigmas
    10.0
    """

    action: str
    sigmas: float = 10.0
    window: int = 100
    warmup: int = 20

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"SpikePolicy: action={self.action!r}; give one of {', '.join(ACTIONS)}")
        if not (self.sigmas > 0 and self.window >= 1 and self.warmup >= 1):
            raise ConfigError(
                f"SpikePolicy: sigmas={self.sigmas}, window={self.window}, warmup={self.warmup}; give a positive "
                "number and whole numbers of at least 1"
            )

    @staticmethod
    def start() -> jax.Array:
        """The statistic before the first step: rows of steps, mean and variance, of loss and norm, float32 [3, 2]."""
        return jnp.zeros((3, 2), jnp.float32)

    def judge(self, statistic: jax.Array, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Judge a step: (the statistic with this step in it, bool: loss or norm is a spike, the factor of the
        gradients).

        A step that is not finite is not counted.
        """
        return _judge(statistic, loss, norm, self.sigmas, self.window, self.warmup)


@jax.jit
def _judge(
    statistic: jax.Array, loss: jax.Array, norm: jax.Array, sigmas: float, window: int, warmup: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    values = jnp.stack([loss, norm]).astype(jnp.float32).reshape(2)
    count, mean, variance = statistic
    deviation = jnp.maximum(jnp.sqrt(variance), _LEAST_SHARE * jnp.abs(mean))
    limit = jnp.where(count >= warmup, mean + sigmas * deviation, jnp.inf).astype(jnp.float32)
    is_over = values > limit
    shown = jnp.minimum(values, limit)
    # the mean of the first steps, then one that forgets what is older than the window
    rate = 1 / jnp.minimum(count + 1, window)
    step = shown - mean
    new = jnp.stack([count + 1, mean + rate * step, (1 - rate) * (variance + rate * step * step)]).astype(jnp.float32)
    factor = jnp.where(is_over[1], limit[1] / values[1], 1).astype(jnp.float32)
    return jnp.where(jnp.isfinite(values).all(), new, statistic), is_over.any(), factor
