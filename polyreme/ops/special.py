"""Special functions, elementwise: error function, gamma and its relatives, Bessel functions, the logit.

Integers become the default dtype; half precision is computed in float32 under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import special

from polyreme.core.dtype import floating, promote
from polyreme.core.op import op
from polyreme.ops.math import magnitude
from polyreme.ops.sharding import elementwise


@op(amp="fp32", inplace=True, rule=elementwise)
def erf(x: Array) -> Array:
    """2 / sqrt(pi) * integral of e^(-t^2) from 0 to x."""
    return special.erf(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def erfinv(x: Array) -> Array:
    """The y with erf(y) = x; infinite at -1 and 1, NaN outside."""
    return special.erfinv(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def lgamma(x: Array) -> Array:
    """log |gamma(x)|; its derivative at 0 is digamma's limit there."""
    return _at_zero(special.gammaln, lambda zero: -jnp.log(zero), floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def gammaln(x: Array) -> Array:
    """log |gamma(x)|; its derivative at 0 is digamma's limit there."""
    return _at_zero(special.gammaln, lambda zero: -jnp.log(zero), floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def digamma(x: Array) -> Array:
    """Derivative of log gamma(x); -inf at 0 and inf at -0.0, the limits there; its own derivative there is inf."""
    return _at_zero(special.digamma, lambda zero: -1 / zero, floating(x))


def _at_zero(fn: Callable[[Array], Array], limit: Callable[[Array], Array], x: Array) -> Array:
    """fn(x), and limit(x) where x is 0 or -0.0: each branch, and its gradient, sees no entry of the other's."""
    zero = x == 0
    return jnp.where(zero, limit(jnp.where(zero, x, 1)), fn(jnp.where(zero, 1, x)))


@op(amp="fp32", inplace=True, rule=elementwise)
def polygamma(x: Array, n: int) -> Array:
    """n-th derivative of digamma(x), n >= 0."""
    if not isinstance(n, int) or n < 0:
        raise ValueError(f"n={n!r} needs an integer >= 0")
    x = floating(x)
    return special.digamma(x) if n == 0 else special.polygamma(n, x)


@op(amp="fp32", inplace=True, rule=elementwise)
def multigammaln(x: Array, p: int) -> Array:
    """log of the p-variate gamma function, for x > (p - 1) / 2.

    p (p - 1) / 4 * log(pi) + sum over i < p of lgamma(x - i / 2).
    """
    if p < 1:
        raise ValueError(f"p={p} needs an integer >= 1")
    x = floating(x)
    shifted = x[..., None] - jnp.arange(p, dtype=x.dtype) / 2
    return p * (p - 1) / 4 * math.log(math.pi) + jnp.sum(special.gammaln(shifted), -1)


@op(amp="fp32", inplace=True, rule=elementwise)
def gammainc(x: Array, y: Array) -> Array:
    """Regularized lower incomplete gamma function P(x, y): integral of t^(x-1) e^(-t) from 0 to y, over gamma(x)."""
    return special.gammainc(*_pair(x, y))


@op(amp="fp32", inplace=True, rule=elementwise)
def gammaincc(x: Array, y: Array) -> Array:
    """Regularized upper incomplete gamma function, 1 - gammainc(x, y)."""
    return special.gammaincc(*_pair(x, y))


def _pair(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = promote(x, y)
    return floating(x), floating(y)


@op(amp="fp32", inplace=True, rule=elementwise)
def i0(x: Array) -> Array:
    """Modified Bessel function of the first kind, order 0."""
    x = floating(x)
    return jnp.exp(magnitude(x)) * special.i0e(x)


@op(amp="fp32", rule=elementwise)
def i0e(x: Array) -> Array:
    """i0(x) * e^-|x|."""
    return special.i0e(floating(x))


@op(amp="fp32", rule=elementwise)
def i1(x: Array) -> Array:
    """Modified Bessel function of the first kind, order 1."""
    return special.i1(floating(x))


@op(amp="fp32", rule=elementwise)
def i1e(x: Array) -> Array:
    """i1(x) * e^-|x|."""
    return special.i1e(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def logit(x: Array, eps: float | None = None) -> Array:
    """log(x / (1 - x)); x is first kept in [eps, 1 - eps] if eps is given.

    If not, it is NaN outside [0, 1], and so is its derivative.
    """
    x = floating(x)
    if eps is not None:
        x = jnp.clip(x, eps, 1 - eps)
    else:
        x = x * jnp.where((x >= 0) & (x <= 1), 1, jnp.nan).astype(x.dtype)
    return jnp.log(x) - jax.lax.log1p(-x)
