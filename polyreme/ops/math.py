"""Elementwise functions of one or more Tensors.

Floor: 2.  Integers given to a function with real values become the default dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core.dtype import floating
from polyreme.core.op import op


@op(inplace=True)
def abs(x: Array) -> Array:
    """|x|; of a complex x its magnitude, real. The gradient at 0 is 0."""
    return jnp.abs(x)


@op(amp="fp32", inplace=True)
def exp(x: Array) -> Array:
    """e to the x."""
    return jnp.exp(floating(x))


@op(amp="fp32", inplace=True)
def log(x: Array) -> Array:
    """Natural logarithm; -inf at 0, NaN below."""
    return jnp.log(floating(x))


@op(inplace=True)
def sqrt(x: Array) -> Array:
    """Square root; NaN below 0."""
    return jnp.sqrt(floating(x))


@op(inplace=True)
def square(x: Array) -> Array:
    """x * x."""
    return jnp.square(x)


@op(inplace=True)
def tanh(x: Array) -> Array:
    """Hyperbolic tangent."""
    return jnp.tanh(floating(x))


@op(inplace=True)
def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    return jax.nn.sigmoid(floating(x))


@op(inplace=True)
def clip(x: Array, min: Array | None = None, max: Array | None = None) -> Array:
    """x kept between min and max, each a number, a Tensor or None (no bound), in x's dtype.

    The gradient is 0 outside the bounds.
    """
    if min is not None:
        low = min.astype(x.dtype)
        x = jnp.where(x < low, low, x)
    if max is not None:
        high = max.astype(x.dtype)
        x = jnp.where(x > high, high, x)
    return x
