"""dropout + add + norm, the joint of a transformer block.

One form on every backend: XLA fuses the dropout and the addition into one loop by itself, and the norms carry their
own backward pass (kernels.norm). A backward pass of its own for the whole was left out: it would save nothing but the
dropout bits, at the price of drawing them twice, and drawing is the dear part on CPU.
"""

import jax
import jax.numpy as jnp

from polyreme.errors import ConfigError
from polyreme.kernels.norm import layer_norm, layer_norm_plain, rms_norm, rms_norm_plain


def residual_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    epsilon: float = 1e-5,
    *,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """s = residual + dropout(x) -> (layer_norm(s), s), both [..., m].

    Raises ConfigError for a rate outside [0, 1) or without a key, ShapeError when weight or bias is not [m].
    """
    total = residual + _dropout(x, dropout_key, dropout_rate)
    return layer_norm(total, weight, bias, epsilon), total


def residual_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    epsilon: float = 1e-6,
    *,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """s = residual + dropout(x) -> (rms_norm(s), s), both [..., m].

    Raises ConfigError for a rate outside [0, 1) or without a key, ShapeError when weight is not [m].
    """
    total = residual + _dropout(x, dropout_key, dropout_rate)
    return rms_norm(total, weight, epsilon), total


def residual_layer_norm_plain(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    epsilon: float = 1e-5,
    *,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The plain twin of residual_layer_norm."""
    total = residual + _dropout(x, dropout_key, dropout_rate)
    return layer_norm_plain(total, weight, bias, epsilon), total


def residual_rms_norm_plain(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    epsilon: float = 1e-6,
    *,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The plain twin of residual_rms_norm."""
    total = residual + _dropout(x, dropout_key, dropout_rate)
    return rms_norm_plain(total, weight, epsilon), total


def _dropout(x, key, rate: float) -> jax.Array:
    if not 0 <= rate < 1:
        raise ConfigError(f"residual norm: dropout_rate is {rate}; it must lie in [0, 1)")
    if rate == 0:
        return x
    if key is None:
        raise ConfigError(f"residual norm: dropout_rate {rate} needs a dropout_key; pass one, or a rate of 0")
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
