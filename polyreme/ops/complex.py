"""Complex numbers: parts, angle, conjugate, and the same data seen as pairs of real numbers.

Gradients follow the convention dL/dx + i dL/dy.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import op
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.sharding import elementwise, elementwise_sum


@op(rule=elementwise_sum)
def real(x: Array) -> Array:
    """The real part; a real x is copied."""
    return jnp.real(x) if dtypes.is_complex(x.dtype) else jnp.copy(x)


@op(rule=elementwise_sum)
def imag(x: Array) -> Array:
    """The imaginary part; zeros for a real x."""
    return jnp.imag(x)


@op(rule=elementwise_sum)
def conj(x: Array) -> Array:
    """The conjugate, a - ib for a + ib; a real x is copied."""
    return jnp.conj(x) if dtypes.is_complex(x.dtype) else jnp.copy(x)


@op(rule=elementwise)
def angle(x: Array) -> Array:
    """Angle from the positive real axis, radians in (-pi, pi]; of a real x 0 or pi, with gradient 0, as at 0."""
    if dtypes.is_complex(x.dtype):
        real, imag, zero = jnp.real(x), jnp.imag(x), x == 0
        # arctan2 has no derivative there
        at_zero = lax.stop_gradient(jnp.arctan2(imag, real))
        return jnp.where(zero, at_zero, jnp.arctan2(imag, jnp.where(zero, 1, real)))
    x = floating(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0).astype(x.dtype))


@op(rule=elementwise)
def isreal(x: Array) -> Array:
    """True where the imaginary part is 0 -> bool."""
    return jnp.isreal(x)


@op(rule=elementwise)
def sgn(x: Array) -> Array:
    """x / |x|, 0 at 0: the sign of a real x, the direction of a complex one."""
    if not dtypes.is_complex(x.dtype):
        return jnp.sign(x)
    zero = x == 0
    return jnp.where(zero, 0, x / jnp.where(zero, 1, jnp.abs(jnp.where(zero, 1, x))))


@op
def as_complex(x: Array) -> Array:
    """[*b, 2] floating -> [*b] complex: pairs of real and imaginary part."""
    if x.ndim == 0 or x.shape[-1] != 2:
        raise ShapeError(f"as_complex takes a last dim of size 2, got shape {list(x.shape)}")
    if x.dtype not in (dtypes.float32, dtypes.float64):
        raise DTypeError(f"as_complex takes float32 or float64, got {x.dtype.name}; use astype")
    return lax.complex(x[..., 0], x[..., 1])


@op
def as_real(x: Array) -> Array:
    """[*b] complex -> [*b, 2]: real and imaginary part side by side."""
    if not dtypes.is_complex(x.dtype):
        raise DTypeError(f"as_real takes complex numbers, got {x.dtype.name}")
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


@op(rule=elementwise)
def polar(abs: Array, angle: Array) -> Array:
    """abs * (cos(angle) + i sin(angle)), angle in radians; float32 gives complex64, float64 complex128."""
    abs, angle = promote_floating(abs, angle)
    return lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


ALIASES = {"view_as_complex": "as_complex", "view_as_real": "as_real"}
"""Other public names of the same functions."""
