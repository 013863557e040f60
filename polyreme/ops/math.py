"""Elementwise functions of one or more Tensors.

Operands broadcast and promote (core.dtype.promote). Integers given to a function with real values become the
default dtype. Where two operands tie, the gradient goes where Paddle sends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import floating, promote, promote_floating
from polyreme.core.op import OPS, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.bounds import check_index, preceded
from polyreme.ops.by_index import bounded, read
from polyreme.ops.creation import republish
from polyreme.ops.sharding import elementwise, elementwise_sum


@op(inplace=True, rule=elementwise)
def abs(x: Array) -> Array:
    """|x|; of a complex x its magnitude, real. The gradient at 0 is 0."""
    return magnitude(x)


def magnitude(x: Array) -> Array:
    """|x| of an array, with gradient 0 at 0."""
    # jnp.abs has gradient 1 at 0
    return x * jnp.sign(x) if dtypes.is_floating(x.dtype) else jnp.abs(x)


@op(amp="fp32", inplace=True, rule=elementwise)
def exp(x: Array) -> Array:
    """e to the x."""
    return jnp.exp(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def expm1(x: Array) -> Array:
    """e^x - 1, accurate near 0."""
    return jnp.expm1(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def log(x: Array) -> Array:
    """Natural logarithm; -inf at 0, NaN below."""
    return jnp.log(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def log2(x: Array) -> Array:
    """Logarithm to base 2."""
    return jnp.log2(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def log10(x: Array) -> Array:
    """Logarithm to base 10."""
    return jnp.log10(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def log1p(x: Array) -> Array:
    """log(1 + x), accurate near 0."""
    return jnp.log1p(floating(x))


@op(inplace=True, rule=elementwise)
def sqrt(x: Array) -> Array:
    """Square root; NaN below 0."""
    return jnp.sqrt(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def rsqrt(x: Array) -> Array:
    """1 / sqrt(x)."""
    return lax.rsqrt(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def square(x: Array) -> Array:
    """x * x."""
    return jnp.square(x)


@op(inplace=True, rule=elementwise)
def reciprocal(x: Array) -> Array:
    """1 / x."""
    return jnp.reciprocal(floating(x))


@op(inplace=True, rule=elementwise)
def sin(x: Array) -> Array:
    """Sine of x radians."""
    return jnp.sin(floating(x))


@op(inplace=True, rule=elementwise)
def cos(x: Array) -> Array:
    """Cosine of x radians."""
    return jnp.cos(floating(x))


@op(inplace=True, rule=elementwise)
def tan(x: Array) -> Array:
    """Tangent of x radians."""
    return jnp.tan(floating(x))


@op(inplace=True, rule=elementwise)
def asin(x: Array) -> Array:
    """Inverse sine, radians in [-pi/2, pi/2]; NaN outside [-1, 1]."""
    return jnp.arcsin(floating(x))


@op(inplace=True, rule=elementwise)
def acos(x: Array) -> Array:
    """Inverse cosine, radians in [0, pi]; NaN outside [-1, 1]."""
    return jnp.arccos(floating(x))


@op(inplace=True, rule=elementwise)
def atan(x: Array) -> Array:
    """Inverse tangent, radians in (-pi/2, pi/2)."""
    return jnp.arctan(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def sinh(x: Array) -> Array:
    """Hyperbolic sine."""
    return jnp.sinh(floating(x))


@op(amp="fp32", inplace=True, rule=elementwise)
def cosh(x: Array) -> Array:
    """Hyperbolic cosine."""
    return jnp.cosh(floating(x))


@op(inplace=True, rule=elementwise)
def tanh(x: Array) -> Array:
    """Hyperbolic tangent."""
    return jnp.tanh(floating(x))


@op(inplace=True, rule=elementwise)
def asinh(x: Array) -> Array:
    """Inverse hyperbolic sine."""
    return jnp.arcsinh(floating(x))


@jax.custom_jvp
def _complex_acosh(x: Array) -> Array:
    return jnp.arccosh(x)


# jax takes 1 / sqrt(x^2 - 1), which has the wrong sign left of the imaginary axis
_complex_acosh.defjvps(lambda slope, _, x: slope / (jnp.sqrt(x - 1) * jnp.sqrt(x + 1)))


@op(inplace=True, rule=elementwise)
def acosh(x: Array) -> Array:
    """Inverse hyperbolic cosine; NaN for real numbers below 1."""
    x = floating(x)
    return _complex_acosh(x) if dtypes.is_complex(x.dtype) else jnp.arccosh(x)


@op(inplace=True, rule=elementwise)
def atanh(x: Array) -> Array:
    """Inverse hyperbolic tangent; NaN outside [-1, 1]."""
    return jnp.arctanh(floating(x))


@op(inplace=True, rule=elementwise)
def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    return jax.nn.sigmoid(floating(x))


@op(rule=elementwise_sum)
def deg2rad(x: Array) -> Array:
    """Degrees to radians: x * pi / 180."""
    return jnp.deg2rad(floating(x))


@op(rule=elementwise_sum)
def rad2deg(x: Array) -> Array:
    """Radians to degrees: x * 180 / pi."""
    return jnp.rad2deg(floating(x))


@op(inplace=True, rule=elementwise)
def sinc(x: Array) -> Array:
    """sin(pi x) / (pi x), 1 at 0."""
    return jnp.sinc(floating(x))


@op(inplace=True, rule=elementwise)
def ceil(x: Array) -> Array:
    """Smallest integer >= x, in x's dtype; its gradient is 0."""
    return _round(jnp.ceil, x)


@op(inplace=True, rule=elementwise)
def floor(x: Array) -> Array:
    """Largest integer <= x, in x's dtype; its gradient is 0."""
    return _round(jnp.floor, x)


def _round(fn: Any, x: Array) -> Array:
    return fn(x) if dtypes.is_inexact(x.dtype) else x


@op(inplace=True, rule=elementwise)
def trunc(input: Array) -> Array:
    """The integer part, toward zero, in x's dtype; its gradient is 0."""
    return _round(jnp.trunc, input)


@op(inplace=True, rule=elementwise)
def frac(x: Array) -> Array:
    """x - trunc(x); has the sign of x."""
    return x - _round(jnp.trunc, x)


@op(inplace=True, rule=elementwise)
def round(x: Array, decimals: int = 0) -> Array:
    """Nearest value with so many decimals, halves to even; its gradient is 0. decimals < 0 rounds to tens, hundreds."""
    return jnp.round(x, decimals)


@op(rule=elementwise)
def sign(x: Array) -> Array:
    """-1, 0 or 1 as x is negative, zero or positive; of a complex number x / |x|. Its gradient is 0 for real x."""
    return jnp.sign(x)


@op(rule=elementwise, real=True)
def signbit(x: Array) -> Array:
    """True where the sign is minus, -0.0 included -> bool."""
    return jnp.signbit(x) if dtypes.is_floating(x.dtype) else x < 0


@op(method=False, rule=elementwise_sum)
def positive(x: Array) -> Array:
    """x itself."""
    return jnp.copy(x)


def _scale_rule(call: OpCall) -> ShardingRule:
    """Linear in x without bias and activation."""
    plain = "bias" not in call.params and call.attrs.get("bias") == 0 and call.attrs.get("act") is None
    linear = plain and all(map(dtypes.is_inexact, call.dtypes))
    return dataclasses.replace(elementwise(call), linear="alone" if linear else "no", linear_in=(0,))


def _with_whole_factors(x: Any, scale: Any = 1, bias: Any = 0, *rest: Any, **options: Any) -> Any:
    # 2.0 is written for 2: PaddlePaddle's own default is 1.0; what int64 does not hold is no integer
    factors = (scale, bias)
    whole = [int(f) if f.__class__ is float and f.is_integer() and -(2**63) <= f < 2**63 else f for f in factors]
    if any(w is not f for w, f in zip(whole, factors, strict=True)) and dtypes.is_integer(getattr(x, "dtype", object)):
        return OPS["scale"](x, *whole, *rest, **options)
    return None


@preceded(_with_whole_factors)
@op(inplace=True, rule=_scale_rule, integers="wrap")
def scale(
    x: Array, scale: Array | float = 1, bias: Array | float = 0, bias_after_scale: bool = True, act: Any = None
) -> Array:
    """scale * x + bias, or scale * (x + bias) with bias_after_scale=False; scale and bias are numbers or one element.

    act: None, "relu", "sigmoid" or "tanh", applied to the result. Integers stay integers unless scale or bias
    has a fraction or is a floating Tensor.
    """
    activations = {None: lambda v: v, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh}
    if act not in activations:
        raise ValueError(f"act={act!r}; choose None, 'relu', 'sigmoid' or 'tanh'")
    x, factor, shift = promote(x, jnp.reshape(scale, ()), jnp.reshape(bias, ()))
    return activations[act](x * factor + shift if bias_after_scale else (x + shift) * factor)


@op(rule=elementwise)
def stanh(x: Array, scale_a: float = 0.67, scale_b: float = 1.7159) -> Array:
    """scale_b * tanh(scale_a * x)."""
    return scale_b * jnp.tanh(scale_a * floating(x))


def _check_clip(x: Any, min: Any = None, max: Any = None, *_: Any, **__: Any) -> None:
    # the result may be outside of x's dtype only if it is a bound
    if min.__class__ is int and not dtypes.holds(x.dtype, min) and min > 0:
        dtypes.check_holds("clip: min", x.dtype, min)
    if max.__class__ is int and not dtypes.holds(x.dtype, max) and max < 0:
        dtypes.check_holds("clip: max", x.dtype, max)
    if isinstance(min, (int, float)) and isinstance(max, (int, float)) and min > max:
        raise ConfigError(f"clip: min={min} is above max={max}; give bounds with something between them")


@preceded(_check_clip)
@op(inplace=True, rule=elementwise, integers="any", real=True)
def clip(x: Array, min: Array | None = None, max: Array | None = None) -> Array:
    """x kept between min and max, each a number, a Tensor or None (no bound), in x's dtype.

    A floating bound makes integers floating. The gradient is 0 outside the bounds. Raises ConfigError for a number
    that x's dtype does not hold and the result would be, and for numbers of which min is above max.
    """
    if dtypes.is_integer(x.dtype) and any(b is not None and dtypes.is_floating(b.dtype) for b in (min, max)):
        x = promote(x, *(b for b in (min, max) if b is not None))[0]
    if min is not None:
        low = _nearest(min, x.dtype)
        x = jnp.where(x < low, low, x)
    if max is not None:
        high = _nearest(max, x.dtype)
        x = jnp.where(x > high, high, x)
    return x


def _nearest(bound: Array, dtype: np.dtype) -> Array:
    """bound in another dtype: of integers the nearest that it holds."""
    if dtypes.is_integer(bound.dtype) and dtypes.is_integer(dtype):
        to, own = dtypes.iinfo(dtype), dtypes.iinfo(bound.dtype)
        bound = jnp.clip(bound, max(to.min, own.min), min(to.max, own.max))
    return bound.astype(dtype)


@op(inplace=True, rule=elementwise)
def nan_to_num(x: Array, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Array:
    """NaN, inf and -inf replaced; by default with 0 and the largest and smallest finite numbers of the dtype."""
    return jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


@op(rule=elementwise)
def isfinite(x: Array) -> Array:
    """True where x is neither NaN nor infinite -> bool."""
    return jnp.isfinite(x)


@op(rule=elementwise)
def isinf(x: Array) -> Array:
    """True where x is inf or -inf -> bool."""
    return jnp.isinf(x)


@op(rule=elementwise)
def isnan(x: Array) -> Array:
    """True where x is NaN -> bool."""
    return jnp.isnan(x)


@op(rule=elementwise)
def isposinf(x: Array) -> Array:
    """True where x is inf -> bool; x is real."""
    return _is(x, jnp.inf, "isposinf")


@op(rule=elementwise)
def isneginf(x: Array) -> Array:
    """True where x is -inf -> bool; x is real."""
    return _is(x, -jnp.inf, "isneginf")


def _is(x: Array, value: float, what: str) -> Array:
    if dtypes.is_complex(x.dtype):
        raise DTypeError(f"{what} takes real numbers, got {x.dtype.name}; ask for x.real() and x.imag()")
    return x == value if dtypes.is_floating(x.dtype) else jnp.zeros(x.shape, bool)


@op(rule=elementwise, real=True)
def maximum(x: Array, y: Array) -> Array:
    """The larger of x and y, NaN if either is; at a tie each gets half the gradient."""
    return jnp.maximum(*promote(x, y))


@op(rule=elementwise, real=True)
def minimum(x: Array, y: Array) -> Array:
    """The smaller of x and y, NaN if either is; at a tie each gets half the gradient."""
    return jnp.minimum(*promote(x, y))


@op(rule=elementwise, real=True)
def fmax(x: Array, y: Array) -> Array:
    """The larger of x and y, the other one if one is NaN; at a tie the gradient goes to x."""
    x, y = promote(x, y)
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@op(rule=elementwise, real=True)
def fmin(x: Array, y: Array) -> Array:
    """The smaller of x and y, the other one if one is NaN; at a tie the gradient goes to x."""
    x, y = promote(x, y)
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


@op(rule=elementwise, integers="any", real=True)
def atan2(x: Array, y: Array) -> Array:
    """Angle of the point (y, x) from the positive y axis, that is of x / y with both signs told apart, in radians."""
    return jnp.arctan2(*promote_floating(x, y))


@op(inplace=True, rule=elementwise, integers="any")
def hypot(x: Array, y: Array) -> Array:
    """sqrt(x^2 + y^2) without overflow; the gradient at (0, 0) is 0."""
    x, y = promote_floating(x, y)
    size = lax.stop_gradient(jnp.maximum(jnp.abs(x), jnp.abs(y)))
    zero = size == 0
    # divided by a constant and multiplied by it again, which changes neither value nor gradient
    unit = jnp.where(zero | jnp.isinf(size), 1, size)
    squares = jnp.where(zero, 1, (x / unit) ** 2 + (y / unit) ** 2)
    return jnp.where(zero, 0, unit * jnp.sqrt(squares)).astype(x.dtype)


@op(inplace=True, rule=elementwise, integers="any")
def lerp(x: Array, y: Array, weight: Array) -> Array:
    """x + weight * (y - x): x at weight 0, y at 1."""
    x, y, weight = promote_floating(x, y, weight)
    return x + weight * (y - x)


@op(amp="fp32", rule=elementwise, integers="any", real=True)
def logaddexp(x: Array, y: Array) -> Array:
    """log(e^x + e^y) without overflow."""
    return jnp.logaddexp(*promote_floating(x, y))


@op(inplace=True, rule=elementwise)
def copysign(x: Array, y: Array) -> Array:
    """|x| with the sign of y; integers keep their dtype, in which -0 is 0."""
    if not (dtypes.is_inexact(x.dtype) or dtypes.is_inexact(y.dtype)):
        x, y = promote(x, y)
        if x.dtype == dtypes.bool_:
            return jnp.broadcast_arrays(x, y)[0]
        return jnp.where(y < 0, -jnp.abs(x), jnp.abs(x))
    return jnp.copysign(*promote_floating(x, y))


@op(rule=elementwise, integers="any", constant=True)
def nextafter(x: Array, y: Array) -> Array:
    """The number that follows x on the way to y; no gradient flows through."""
    return jnp.nextafter(*(lax.stop_gradient(v) for v in promote_floating(x, y)))  # jax knows no derivative of it


@op(inplace=True, rule=elementwise, integers="any")
def ldexp(x: Array, y: Array) -> Array:
    """x * 2^y; exact for an integer y."""
    if dtypes.is_inexact(y.dtype):
        x, y = promote_floating(x, y)
        return x * jnp.exp2(y)
    return _times_power_of_two(floating(x), y)


def _times_power_of_two(x: Array, y: Array) -> Array:
    # two factors, since 2^y alone may overflow where x * 2^y does not
    half = y // 2
    ones = jnp.ones((), x.dtype)
    return x * jnp.ldexp(ones, half) * jnp.ldexp(ones, y - half)


@op(rule=elementwise)
def frexp(x: Array) -> tuple[Array, Array]:
    """(m, e) with x = m * 2^e and 0.5 <= |m| < 1, both in x's dtype; (0, 0) of 0. The gradient of m is 2^-e."""
    x = floating(x)
    power = lax.stop_gradient(jnp.frexp(x)[1])
    return _times_power_of_two(x, -power), power.astype(x.dtype)


@op(rule=elementwise, real=True)
def heaviside(x: Array, y: Array) -> Array:
    """0 where x < 0, y where x == 0, 1 where x > 0."""
    x, y = promote(x, y)
    return jnp.where(x == 0, y, jnp.where(jnp.isnan(x), x, (x > 0).astype(x.dtype)))


@op(inplace=True, rule=elementwise)
def gcd(x: Array, y: Array) -> Array:
    """Greatest common divisor of integers, >= 0."""
    x, y = _integers("gcd", x, y)
    return jnp.gcd(_magnitude(x), _magnitude(y)).astype(x.dtype)


@op(inplace=True, rule=elementwise)
def lcm(x: Array, y: Array) -> Array:
    """Least common multiple of integers, >= 0."""
    x, y = _integers("lcm", x, y)
    return jnp.lcm(_magnitude(x), _magnitude(y)).astype(x.dtype)


def _magnitude(x: Array) -> Array:
    """|x| without a sign, which that of the lowest integer needs: the loop of jnp.gcd would not end on it."""
    return jnp.abs(x).astype(f"uint{8 * x.dtype.itemsize}")


def _integers(what: str, x: Array, y: Array) -> tuple:
    for v in (x, y):
        if not dtypes.is_integer(v.dtype):
            raise DTypeError(f"{what} takes integers, got {v.dtype.name}; use astype")
    return promote(x, y)


@op(inplace=True, rule=elementwise)
def bitwise_left_shift(x: Array, y: Array, is_arithmetic: bool = True) -> Array:
    """x with its bits moved left y places, zeros coming in; both kinds of shift are the same."""
    return jnp.left_shift(*_integers("bitwise_left_shift", x, y))


@op(inplace=True, rule=elementwise)
def bitwise_right_shift(x: Array, y: Array, is_arithmetic: bool = True) -> Array:
    """x with its bits moved right y places; copies of the sign bit come in, or zeros with is_arithmetic=False."""
    x, y = _integers("bitwise_right_shift", x, y)
    return jnp.right_shift(x, y) if is_arithmetic else lax.shift_right_logical(*jnp.broadcast_arrays(x, y))


@op(rule=elementwise_sum)
def add_n(inputs: list[Array]) -> Array:
    """Sum of Tensors of one shape; one Tensor alone is copied."""
    if not inputs:
        raise ShapeError("add_n needs at least one Tensor, got none")
    total = jnp.copy(inputs[0])
    for x in inputs[1:]:
        if x.shape != total.shape:
            raise ShapeError(f"add_n: shapes {list(total.shape)} and {list(x.shape)}; all must be the same")
        total = jnp.add(*promote(total, x))
    return total


_add_n = add_n


def _add_some(inputs: AnyTensor | Sequence[AnyTensor], name: str | None = None) -> AnyTensor:
    return _add_n(list(inputs) if isinstance(inputs, (list, tuple)) else [inputs])


add_n = republish(_add_n, _add_some)


@op(rule=elementwise)
def increment(x: Array, value: Array | float = 1.0) -> Array:
    """Add value to the one element of x, in place; returns x."""
    if x.size != 1:
        raise ShapeError(f"increment takes a Tensor with one element, got shape {list(x.shape)}; use x.add_(value)")
    return x + jnp.astype(value, x.dtype)


_increment = increment


def _increment_in_place(x: AnyTensor, value: float = 1.0, name: str | None = None) -> AnyTensor:
    return _increment(x, value, out=x)


increment = republish(_increment, _increment_in_place)


def _check_multiplex(inputs: Any, index: Any, **_: Any) -> None:
    check_index("multiplex", index, len(inputs), 0, negative=False)


@preceded(_check_multiplex)
@op
def multiplex(inputs: list[Array], index: Array) -> Array:
    """Row i of the result is row i of inputs[index[i]]: n Tensors [rows, ...], index [rows, 1] or [rows] integers.

    Raises IndexError for an index below 0 or not below n.
    """
    stacked = jnp.stack(promote(*inputs))
    rows = index.reshape(-1)
    if rows.shape[0] != stacked.shape[1]:
        raise ShapeError(f"multiplex: index of shape {list(index.shape)} for Tensors of {stacked.shape[1]} rows")
    rows = bounded(rows, stacked.shape[0], negative=False)
    return read(stacked, (rows, jnp.arange(rows.shape[0], dtype=dtypes.int32)))


ALIASES = {"clamp": "clip", "clamp_": "clip_"}
"""Other public names of the same functions."""
