"""layer_norm and rms_norm over the last dim, with their own backward pass, and the plain twins."""

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.errors import ShapeError
from polyreme.kernels.custom_vjp import custom_vjp


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim: [..., m], [m], [m] -> [..., m].

    Statistics in at least float32; the result has x's dtype. Its own backward pass keeps x, mean and 1/deviation
    alone; in time it is even with the derivative JAX makes of the plain form (2048 x 256 and 4096 x 1024, two cores).
    Source: arXiv:1607.06450. Reverse mode of any order; for forward mode use layer_norm_plain.

    Raises ShapeError when weight or bias is not [m].
    """
    _check("layer_norm", x, weight=weight, bias=bias)
    return _layer_norm(float(epsilon), x, weight, bias)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim: [..., m], [m] -> [..., m].

    Statistics in at least float32; the result has x's dtype. Source: arXiv:1910.07467. Reverse mode of any order; for
    forward mode use rms_norm_plain.

    Raises ShapeError when weight is not [m].
    """
    _check("rms_norm", x, weight=weight)
    return _rms_norm(float(epsilon), x, weight)


def layer_norm_plain(x: jax.Array, weight: jax.Array, bias: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """The plain twin of layer_norm: derivatives by JAX."""
    _check("layer_norm", x, weight=weight, bias=bias)
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdims=True)
    unit = centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
    return (unit * weight + bias).astype(x.dtype)


def rms_norm_plain(x: jax.Array, weight: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """The plain twin of rms_norm: derivatives by JAX."""
    _check("rms_norm", x, weight=weight)
    wide = _wide(x)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * weight).astype(x.dtype)


def _wide(x) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _leading_sum(x) -> jax.Array:
    return x.sum(tuple(range(x.ndim - 1)))


@custom_vjp(0)
def _layer_norm(epsilon: float, x, weight, bias):
    return _layer_norm_fwd(epsilon, x, weight, bias)[0]


def _layer_norm_fwd(epsilon: float, x, weight, bias):
    wide = _wide(x)
    mean = wide.mean(-1, keepdims=True)
    centred = wide - mean
    inverse = lax.rsqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
    return (centred * inverse * weight + bias).astype(x.dtype), (x, weight, bias, mean, inverse)


def _layer_norm_bwd(epsilon: float, residuals, dy):
    x, weight, bias, mean, inverse = residuals
    dy_wide = _wide(dy)
    unit = (_wide(x) - mean) * inverse
    scaled = dy_wide * weight
    dx = inverse * (scaled - scaled.mean(-1, keepdims=True) - unit * (scaled * unit).mean(-1, keepdims=True))
    dweight, dbias = _leading_sum(dy_wide * unit), _leading_sum(dy_wide)
    return dx.astype(x.dtype), dweight.astype(weight.dtype), dbias.astype(bias.dtype)


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)


@custom_vjp(0)
def _rms_norm(epsilon: float, x, weight):
    return _rms_norm_fwd(epsilon, x, weight)[0]


def _rms_norm_fwd(epsilon: float, x, weight):
    wide = _wide(x)
    inverse = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon)
    return (wide * inverse * weight).astype(x.dtype), (x, weight, inverse)


def _rms_norm_bwd(epsilon: float, residuals, dy):
    x, weight, inverse = residuals
    dy_wide = _wide(dy)
    unit = _wide(x) * inverse
    scaled = dy_wide * weight
    dx = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdims=True))
    return dx.astype(x.dtype), _leading_sum(dy_wide * unit).astype(weight.dtype)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def _check(name: str, x, **vectors) -> None:
    for what, vector in vectors.items():
        if x.ndim < 1 or vector.shape != x.shape[-1:]:
            raise ShapeError(f"{name}: {what} {list(vector.shape)} does not fit x {list(x.shape)}; needs its last dim")
