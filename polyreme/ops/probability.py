"""Ops for the families of polyreme.distribution: products with logs, draws, entropies by sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import special

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import DRAWN, Key, op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.sharding import elementwise


@op(amp="fp32", method=False, rule=elementwise)
def xlogy(x: Array, y: Array) -> Array:
    """x * log(y), and 0 where x = 0, whatever y is; by x its derivative there is log(y) if that is finite."""
    return _xlogy(*promote_floating(x, y))


@op(amp="fp32", method=False, rule=elementwise)
def xlog1py(x: Array, y: Array) -> Array:
    """x * log(1 + y), and 0 where x = 0, as xlogy is."""
    x, y = promote_floating(x, y)
    return x * jnp.log1p(jnp.where((x == 0) & ~((y > -1) & jnp.isfinite(y)), 0, y))


_LOG_DENSITIES: dict[str, Callable[[Array], Array]] = {
    "normal": lambda z: -0.5 * (z * z + math.log(2 * math.pi)),
    "laplace": lambda z: -jnp.abs(z) - math.log(2),
    "cauchy": lambda z: -jnp.log1p(z * z) - math.log(math.pi),
    "gumbel": lambda z: -z - jnp.exp(-z),
}


@op(amp="fp32", method=False)
def location_scale_log_density(value: Array, loc: Array, scale: Array, family: str) -> Array:
    """Log density at value of loc + scale * a standard draw of a family: "normal", "laplace", "cauchy" or "gumbel"."""
    if family not in _LOG_DENSITIES:
        raise ConfigError(f"location_scale_log_density: family={family!r}; give one of {', '.join(_LOG_DENSITIES)}")
    value, loc, scale = promote_floating(value, loc, scale)
    return _LOG_DENSITIES[family]((value - loc) / scale) - jnp.log(scale)


@op(method=False, rule=elementwise)
def gumbel_like(x: Array, key: Key = DRAWN) -> Array:
    """Standard Gumbel numbers (distribution function exp(-exp(-v))), in x's shape and dtype."""
    return jax.random.gumbel(key, x.shape, floating(x).dtype)


@op(method=False, rule=elementwise)
def standard_log_gamma(x: Array, key: Key = DRAWN) -> Array:
    """Logs of Gamma numbers with shape parameters x and scale 1; gradients flow to x (arXiv:1805.08498).

    Where x is small the numbers themselves would round to 0.
    """
    x = floating(x)
    return jax.random.loggamma(key, x, dtype=x.dtype)


@op(method=False, rule="*b [k] -> *b [k]")
def multinomial_counts(probs: Array, total_count: int, key: Key = DRAWN) -> Array:
    """The number of times that each of k outcomes comes up in total_count trials: probs [*b, k], normalised -> [*b, k],
    its dtype."""
    probs = floating(probs)
    return jax.random.multinomial(key, total_count, probs, dtype=probs.dtype)


@op(amp="fp32", method=False)
def multinomial_entropy(total_count: Array, probs: Array, most: int) -> Array:
    """Entropy of multinomial counts, nats: total_count [*b] of at most `most` trials, probs [*b, k] -> [*b].

    A sum over every count of every outcome: takes memory of most + 1 times that of probs.
    """
    if most < 0:
        raise ShapeError(f"multinomial_entropy: most={most}; give a largest count of at least 0")
    n, p = promote_floating(total_count, probs)
    dtype = p.dtype
    # float32 would lose all digits in differences of log factorials of many trials
    n, p = n.astype(dtypes.float64)[..., None], p.astype(dtypes.float64)
    # entropy = -log n! - n sum p log p + sum over outcomes of E[log x!], x binomial
    k = jnp.arange(most + 1, dtype=p.dtype).reshape((-1,) + (1,) * p.ndim)
    fits = k <= n
    left = jnp.where(fits, n - k, 0)
    choices = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(left + 1)
    mass = jnp.where(fits, jnp.exp(choices + _xlogy(k, p) + _xlogy(left, 1 - p)), 0)
    log_factorial = jnp.sum(mass * special.gammaln(k + 1), 0)
    entropy = jnp.sum(log_factorial - n * _xlogy(p, p), -1) - special.gammaln(n[..., 0] + 1)
    return entropy.astype(dtype)


# Poisson(64) is above 200 with probability 1e-41; the series leaves 40 / rate^8, 1.4e-13 at 64
_SUMMED, _COUNTS = 64.0, 201
_SERIES = (1 / 12, 1 / 24, 19 / 360, 9 / 80, 863 / 2520, 1375 / 1008, 33953 / 5040)


@op(amp="fp32", method=False)
def poisson_entropy(rate: Array) -> Array:
    """Entropy of Poisson counts, nats, elementwise: summed over counts up to rate 64, by an asymptotic series above.

    log(2 pi e r) / 2 - 1 / (12 r) - 1 / (24 r^2) - 19 / (360 r^3) - ..., Evans and Boersma 1988.
    """
    dtype = floating(rate).dtype
    rate = rate.astype(dtypes.float64)
    small = rate <= _SUMMED
    r = jnp.where(small, rate, 1.0)
    k = jnp.arange(_COUNTS, dtype=rate.dtype).reshape((-1,) + (1,) * rate.ndim)
    logs = _xlogy(k, r) - r - special.gammaln(k + 1)
    summed = -jnp.sum(jnp.exp(logs) * jnp.where(jnp.isneginf(logs), 0, logs), 0)
    inverse = 1 / jnp.where(small, _SUMMED, rate)
    tail = jnp.zeros_like(inverse)
    for term in reversed(_SERIES):
        tail = inverse * (term + tail)
    return jnp.where(small, summed, 0.5 * (1 + math.log(2 * math.pi) - jnp.log(inverse)) - tail).astype(dtype)


def _xlogy(x: Array, y: Array) -> Array:
    return x * jnp.log(jnp.where((x == 0) & ~((y > 0) & jnp.isfinite(y)), 1, y))
