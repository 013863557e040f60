"""Random numbers: each op takes a key, filled in from the default generator.

The numbers depend on the seed and on the order of calls, never on how an array is laid out over devices.
A seed other than 0 given to an op fixes that call's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import DTypeLike, ShapeLike
from polyreme.core.dtype import promote_floating
from polyreme.core.op import DRAWN, Key, op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.bounds import at_hand, preceded
from polyreme.ops.creation import as_float, as_shape, creator, republish
from polyreme.ops.sharding import elementwise


def _key(key: Array, seed: int) -> Array:
    return jax.random.PRNGKey(seed) if seed else key


def _floating(dtype: Any, what: str) -> Any:
    found = as_float(dtype)
    if not dtypes.is_floating(found):
        instead = "complex(real, imag) joins two draws" if dtypes.is_complex(found) else "use randint for integers"
        raise DTypeError(f"{what} draws floating numbers, got dtype {found.name}; {instead}")
    return found


def _normal(key: Array, shape: Any, dtype: Any, what: str) -> Array:
    """Standard normal numbers. Complex ones have parts of variance 1/2 each, so that the mean of |z|^2 is 1."""
    found = as_float(dtype)
    if not dtypes.is_inexact(found):
        raise DTypeError(f"{what} draws floating or complex numbers, got dtype {found.name}; use randint for integers")
    return jax.random.normal(key, as_shape(shape, what), found)


@creator
def rand(shape: ShapeLike, dtype: DTypeLike | None = None, key: Key = DRAWN) -> Array:
    """Uniform in [0, 1)."""
    return jax.random.uniform(key, as_shape(shape, "rand"), _floating(dtype, "rand"))


@creator
def randn(shape: ShapeLike, dtype: DTypeLike | None = None, key: Key = DRAWN) -> Array:
    """Normal with mean 0 and variance 1; of a complex dtype circular, each part of variance 1/2."""
    return _normal(key, shape, dtype, "randn")


@creator
def standard_normal(shape: ShapeLike, dtype: DTypeLike | None = None, key: Key = DRAWN) -> Array:
    """Normal with mean 0 and variance 1; of a complex dtype circular, each part of variance 1/2."""
    return _normal(key, shape, dtype, "standard_normal")


@creator(rule=elementwise)
def rand_like(input: Array, *, dtype: DTypeLike | None = None, key: Key = DRAWN) -> Array:
    """Uniform in [0, 1), in input's shape and, unless one is given, input's dtype."""
    return jax.random.uniform(key, input.shape, _floating(input.dtype if dtype is None else dtype, "rand_like"))


@creator(rule=elementwise)
def randn_like(x: Array, dtype: DTypeLike | None = None, key: Key = DRAWN) -> Array:
    """Normal with mean 0 and variance 1, in x's shape and, unless one is given, x's dtype."""
    return _normal(key, x.shape, x.dtype if dtype is None else dtype, "randn_like")


def _ordered(what: str, min: Any, max: Any) -> None:
    """Raise ConfigError where min, if both are at hand, is above max."""
    low, high = at_hand(min), at_hand(max)
    if low is not None and high is not None and np.any(low > high):
        raise ConfigError(f"{what}: {min=}, {max=}; numbers are drawn from min up to max, give min <= max")


@preceded(lambda shape, dtype=None, min=0, max=1.0, *_, **__: _ordered("uniform", min, max))
@creator
def uniform(
    shape: ShapeLike,
    dtype: DTypeLike | None = None,
    min: Array | float = 0,
    max: Array | float = 1.0,
    seed: int = 0,
    key: Key = DRAWN,
) -> Array:
    """Uniform in [min, max)."""
    return _between(_key(key, seed), as_shape(shape, "uniform"), _floating(dtype, "uniform"), min, max)


def _between(key: Array, shape: tuple, dtype: Any, min: Any, max: Any) -> Array:
    low, high = jnp.astype(min, dtype), jnp.astype(max, dtype)
    return _nan_where_impossible(jax.random.uniform(key, shape, dtype, low, high), low <= high)


def _checks_std(what: str, at: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put before an op: look at its argument std, number `at`. ConfigError if negative, DTypeError if complex."""

    def check(*args: Any, std: Any = 0.0, **_: Any) -> None:
        given = args[at] if len(args) > at else std
        if isinstance(given, complex) or dtypes.is_complex(getattr(given, "dtype", dtypes.bool_)):
            raise DTypeError(f"{what}: std is complex; a standard deviation is real, of complex numbers too")
        seen = given if isinstance(given, (int, float)) else at_hand(given)
        if seen is not None and np.any(np.less(seen, 0)):
            raise ConfigError(f"{what}: std={seen}; a standard deviation is at least 0")

    return preceded(check)


def _move(drawn: Array, mean: Array | float, std: Array | float, what: str) -> Array:
    """drawn * std + mean, in drawn's dtype."""
    if dtypes.is_complex(jnp.result_type(mean)) and not dtypes.is_complex(drawn.dtype):
        raise DTypeError(f"{what}: mean is complex, the numbers are {drawn.dtype.name}; ask for a complex dtype")
    return drawn * jnp.astype(std, drawn.dtype) + jnp.astype(mean, drawn.dtype)


@_checks_std("gaussian", 2)
@op(method=False)
def gaussian(
    shape: ShapeLike,
    mean: Array | float = 0.0,
    std: Array | float = 1.0,
    seed: int = 0,
    dtype: DTypeLike | None = None,
    key: Key = DRAWN,
) -> Array:
    """Normal with a mean and a standard deviation."""
    return _move(_normal(_key(key, seed), shape, dtype, "gaussian"), mean, std, "gaussian")


@_checks_std("normal", 1)
@op(method=False)
def normal(
    mean: Array | float = 0.0, std: Array | float = 1.0, shape: ShapeLike | None = None, key: Key = DRAWN
) -> Array:
    """Normal with a mean and a standard deviation, each a number or a Tensor; gradients flow to both.

    The result has the shape the two broadcast to, or `shape` where both are numbers. A complex mean gives complex
    numbers, each part of variance std^2 / 2.
    """
    center, spread = promote_floating(mean, std)
    common = jnp.broadcast_shapes(center.shape, spread.shape)
    if shape is not None and common != ():
        raise ShapeError(f"normal: shape={shape!r} with a mean and std of shape {list(common)}; leave shape out")
    return center + spread * _normal(key, common if shape is None else shape, center.dtype, "normal")


@_checks_std("log_normal", 1)
@op(method=False)
def log_normal(
    mean: Array | float = 1.0, std: Array | float = 2.0, shape: ShapeLike | None = None, key: Key = DRAWN
) -> Array:
    """exp of a normal with a mean and a standard deviation, arguments as for normal."""
    center, spread = promote_floating(mean, std)
    common = jnp.broadcast_shapes(center.shape, spread.shape)
    _floating(center.dtype, "log_normal")
    if shape is not None and common != ():
        raise ShapeError(f"log_normal: shape={shape!r} with a mean and std of shape {list(common)}; leave shape out")
    return jnp.exp(center + spread * _normal(key, common if shape is None else shape, center.dtype, "log_normal"))


@op(method=False)
def randint(
    low: int = 0, high: int | None = None, shape: ShapeLike = (1,), dtype: DTypeLike | None = None, key: Key = DRAWN
) -> Array:
    """Integers from low up to but not including high, all equally likely; from 0 to low if high is None.

    int64 unless a dtype is given. Raises ShapeError (a ValueError) for an empty range.
    """
    low, high = _range(low, high, "randint")
    to = dtypes.int64 if dtype is None else dtypes.as_dtype(dtype)
    return _integers(key, as_shape(shape, "randint"), low, high, to)


@op(method=False, rule=elementwise, constant=True)
def randint_like(
    x: Array, low: int = 0, high: int | None = None, dtype: DTypeLike | None = None, key: Key = DRAWN
) -> Array:
    """Integers from low up to but not including high, in x's shape and, unless one is given, x's dtype."""
    low, high = _range(low, high, "randint_like")
    return _integers(key, x.shape, low, high, x.dtype if dtype is None else dtypes.as_dtype(dtype))


def _range(low: int, high: int | None, what: str) -> tuple[int, int]:
    if high is None:
        low, high = 0, low
    if low >= high:
        raise ShapeError(f"{what}: no integer is at least {low} and below {high}; give low < high")
    return low, high


def _integers(key: Array, shape: tuple, low: int, high: int, to: Any) -> Array:
    _check_range(low, high, to)
    return jax.random.randint(key, shape, low, high, dtypes.int64).astype(to)


def _check_range(low: int, high: int, dtype: Any) -> None:
    for end in (low, high - 1):
        dtypes.check_holds("a range of random integers", dtype, end)


@creator
def randperm(n: int, dtype: DTypeLike = "int64", key: Key = DRAWN) -> Array:
    """The integers 0 .. n - 1 in random order -> [n]."""
    if n < 1:
        raise ShapeError(f"randperm: n={n}; ask for at least 1")
    return jax.random.permutation(key, n).astype(dtypes.as_dtype(dtype))


def _within(what: str, values: Any, high: float = np.inf) -> None:
    """Raise ConfigError where values, if at hand, are NaN, below 0 or above high."""
    seen = at_hand(values)
    if seen is None or not seen.size or (seen.min() >= 0 and seen.max() <= high):
        return
    # NaN is the smallest where there is any
    wrong = seen.max() if seen.min() >= 0 else seen.min()
    raise ConfigError(
        f"{what}: got {wrong}; give values of at least 0{'' if high == np.inf else f' and at most {high}'}"
    )


def _nan_where_impossible(numbers: Array, possible: Array) -> Array:
    """numbers, and what stands for NaN where they could not be drawn and nobody could be told."""
    return jnp.where(possible, numbers, jnp.asarray(dtypes.not_a_number(numbers.dtype), numbers.dtype))


def _is_chance(p: Array) -> Array:
    return (p >= 0) & (p <= 1)


@preceded(lambda x, p=None, **_: _within("bernoulli", x if p is None else p, 1))
@op(method=False, rule=elementwise, constant=True)
def bernoulli(x: Array, p: float | None = None, key: Key = DRAWN) -> Array:
    """1 with probability x (or p, for every element), else 0, in x's shape and dtype."""
    chance = dtypes.floating(x) if p is None else jnp.full(x.shape, p, dtypes.float32)
    return _nan_where_impossible(jax.random.bernoulli(key, chance).astype(x.dtype), _is_chance(chance))


def _check_multinomial(x: Any, num_samples: int = 1, replacement: bool = False, *_: Any, **__: Any) -> None:
    _within("multinomial", x)
    seen = at_hand(x)
    if seen is None or not seen.ndim:
        return
    if seen.size and np.isinf(seen.max()):
        raise ConfigError("multinomial: got inf; give finite values")
    fewest = int((seen > 0).sum(-1).min()) if seen.size else num_samples
    need = 1 if replacement else num_samples
    if fewest < need <= seen.shape[-1]:
        raise ConfigError(
            f"multinomial: num_samples={num_samples}, {replacement=} needs {need} categories of probability above 0; x "
            f"has {fewest}"
        )


@preceded(_check_multinomial)
@op(rule="*b [n] -> *b draws")
def multinomial(x: Array, num_samples: int = 1, replacement: bool = False, key: Key = DRAWN) -> Array:
    """Indices of the last dim drawn with probability proportional to x: [*b, n] -> [*b, num_samples], int64.

    Without replacement no index is drawn twice. Raises ShapeError if more are asked for than there are, ConfigError for
    values that are no probabilities and for more than are above 0.
    """
    if x.ndim not in (1, 2):
        raise ShapeError(f"multinomial takes [n] or [batch, n], got shape {list(x.shape)}")
    if num_samples < 1 or (not replacement and num_samples > x.shape[-1]):
        raise ShapeError(
            f"multinomial: num_samples={num_samples} from {x.shape[-1]} categories without replacement; "
            "ask for fewer (at least 1), or pass replacement=True"
        )
    logits = jnp.log(dtypes.floating(x))
    room = jnp.where(jnp.all((x >= 0) & (x < jnp.inf), -1), jnp.sum(x > 0, -1), 0)[..., None]
    if replacement:
        drawn = jax.random.categorical(key, logits, shape=(num_samples, *x.shape[:-1]))
        return _nan_where_impossible(jnp.moveaxis(drawn, 0, -1).astype(dtypes.int64), room > 0)
    # the largest of logits + Gumbel noise are a draw without replacement (arXiv:1903.06059)
    noise = jax.random.gumbel(key, x.shape, logits.dtype)
    drawn = jax.lax.top_k(logits + noise, num_samples)[1].astype(dtypes.int64)
    return _nan_where_impossible(drawn, jnp.arange(num_samples) < room)


@preceded(lambda x, **_: _within("poisson", x))
@op(method=False, rule=elementwise, real=True)
def poisson(x: Array, key: Key = DRAWN) -> Array:
    """Poisson counts with rates x, in x's shape and dtype."""
    return _nan_where_impossible(jax.random.poisson(key, x, x.shape, dtypes.int64).astype(x.dtype), x >= 0)


@preceded(lambda x, **_: _within("standard_gamma", x))
@op(method=False, rule=elementwise)
def standard_gamma(x: Array, key: Key = DRAWN) -> Array:
    """Gamma numbers with shape parameters x and scale 1, in x's shape; gradients flow to x (arXiv:1805.08498)."""
    x = dtypes.floating(x)
    return jax.random.gamma(key, x, dtype=x.dtype)


def _ready_for_binomial(count: Any, prob: Any, **_: Any) -> None:
    _within("binomial: count", count)
    _within("binomial: prob", prob, 1)


@preceded(_ready_for_binomial)
@op(method=False, rule=elementwise)
def binomial(count: Array, prob: Array, key: Key = DRAWN) -> Array:
    """Number of successes in count trials of probability prob, elementwise, int64; count and prob broadcast."""
    shape = jnp.broadcast_shapes(count.shape, prob.shape)
    drawn = jax.random.binomial(key, count.astype(dtypes.float64), prob.astype(dtypes.float64), shape, dtypes.float64)
    return _nan_where_impossible(drawn.astype(dtypes.int64), _is_chance(prob) & (count >= 0))


def _filling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Declare an op whose public function writes the numbers it draws into its first argument, which it returns."""
    declared = op(fn, rule=elementwise)

    def public(x: Any, *args: Any, **kwargs: Any) -> Any:
        return declared(x, *args, **kwargs, out=x)

    return republish(declared, public)


@preceded(lambda x, min=0, max=1.0, *_, **__: _ordered("uniform_", min, max))
@_filling
def uniform_(x: Array, min: Array | float = 0, max: Array | float = 1.0, seed: int = 0, key: Key = DRAWN) -> Array:
    """Fill x with uniform numbers in [min, max)."""
    return _between(_key(key, seed), x.shape, _floating(x.dtype, "uniform_"), min, max)


@_filling
def random_(x: Array, from_: int = 0, to: int | None = None, generator: Any = None, key: Key = DRAWN) -> Array:
    """Fill x with integers from from_ up to but not including to, all equally likely; random_(n) draws below n.

    Without bounds: up to the largest integer of x's dtype, of a floating one up to 2 ** its mantissa's bits, below
    which it holds every integer. Raises ShapeError for an empty range, ConfigError for a generator of one's own.
    """
    if generator is not None:
        raise ConfigError("random_: draws from the default generator; seed it with polyreme.seed")
    if to is None and from_ != 0:
        from_, to = 0, from_
    low, high = _range(from_, _most(x.dtype) if to is None else to, "random_")
    _check_range(low, high, x.dtype)
    return jax.random.randint(key, x.shape, low, high, dtypes.int64).astype(x.dtype)


def _most(dtype: Any) -> int:
    if dtype == dtypes.bool_:
        return 2
    if dtypes.is_floating(dtype):
        return 2 ** (jnp.finfo(dtype).nmant + 1)
    return min(int(jnp.iinfo(dtype).max) + 1, 2**63 - 1)  # the generator counts in int64


@_checks_std("normal_", 2)
@_filling
def normal_(x: Array, mean: Array | float = 0.0, std: Array | float = 1.0, key: Key = DRAWN) -> Array:
    """Fill x with normal numbers of a mean and a standard deviation."""
    return _move(_normal(key, x.shape, x.dtype, "normal_"), mean, std, "normal_")


@_checks_std("log_normal_", 2)
@_filling
def log_normal_(x: Array, mean: Array | float = 1.0, std: Array | float = 2.0, key: Key = DRAWN) -> Array:
    """Fill x with exp of normal numbers of a mean and a standard deviation."""
    _floating(x.dtype, "log_normal_")
    return jnp.exp(jnp.astype(mean, x.dtype) + jnp.astype(std, x.dtype) * _normal(key, x.shape, x.dtype, "log_normal_"))


@preceded(lambda x, lam=1.0, *_, **__: _within("exponential_", lam))
@_filling
def exponential_(x: Array, lam: Array | float = 1.0, key: Key = DRAWN) -> Array:
    """Fill x with exponential numbers of rate lam (mean 1 / lam)."""
    drawn = jax.random.exponential(key, x.shape, _floating(x.dtype, "exponential_")) / jnp.astype(lam, x.dtype)
    return _nan_where_impossible(drawn, jnp.astype(lam, x.dtype) >= 0)


@preceded(lambda x, p=0.5, *_, **__: _within("bernoulli_", p, 1))
@_filling
def bernoulli_(x: Array, p: Array | float = 0.5, key: Key = DRAWN) -> Array:
    """Fill x with 1 (probability p, a number or a Tensor) and 0."""
    chance = jnp.broadcast_to(dtypes.floating(p), x.shape)
    return _nan_where_impossible(jax.random.bernoulli(key, chance).astype(x.dtype), _is_chance(chance))


@preceded(lambda x, loc=0, scale=1, *_, **__: _within("cauchy_: scale", scale))
@_filling
def cauchy_(x: Array, loc: Array | float = 0, scale: Array | float = 1, key: Key = DRAWN) -> Array:
    """Fill x with Cauchy numbers: loc + scale * tan(pi * (u - 1/2)), u uniform."""
    drawn, spread = jax.random.cauchy(key, x.shape, _floating(x.dtype, "cauchy_")), jnp.astype(scale, x.dtype)
    return _nan_where_impossible(jnp.astype(loc, x.dtype) + spread * drawn, spread >= 0)


@preceded(lambda x, probs, *_, **__: _within("geometric_", probs, 1))
@_filling
def geometric_(x: Array, probs: Array, key: Key = DRAWN) -> Array:
    """Fill x with the number of trials up to and including the first success of probability probs."""
    to = _floating(x.dtype, "geometric_")
    u = jax.random.uniform(key, x.shape, dtypes.float64, jnp.finfo(dtypes.float64).tiny)
    return jnp.ceil(jnp.log(u) / jnp.log1p(-probs.astype(dtypes.float64))).astype(to)
