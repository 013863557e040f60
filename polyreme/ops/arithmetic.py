"""Binary arithmetic, comparison, logic and bit ops, and the cast: what Python's operators call.

Operands broadcast, and promote by Paddle's rules (core.dtype.promote).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import DTypeLike
from polyreme.core.dtype import promote, promote_floating
from polyreme.core.op import op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.bounds import preceded
from polyreme.ops.ids import check_none
from polyreme.ops.sharding import elementwise, elementwise_product, elementwise_sum, matrix_product


def _divide_rule(call: OpCall) -> ShardingRule:
    """Linear in the dividend, if nothing is rounded."""
    exact = all(map(dtypes.is_inexact, call.dtypes)) and call.attrs.get("rounding_mode") is None
    return dataclasses.replace(elementwise(call), linear="alone" if exact else "no", linear_in=(0,))


def _cast_rule(call: OpCall) -> ShardingRule:
    """Linear between floating dtypes."""
    floats = dtypes.is_inexact(call.dtypes[0]) and dtypes.is_inexact(call.out_dtypes[0])
    return elementwise_sum(call) if floats else elementwise(call)


@op(inplace=True, rule=elementwise_sum, integers="wrap")
def add(x: Array, y: Array, *, alpha: float = 1) -> Array:
    """x + alpha * y, elementwise."""
    x, y = promote(x, y)
    return jnp.add(x, y if alpha == 1 else y * jnp.asarray(alpha, y.dtype))


@op(inplace=True, rule=elementwise_sum, integers="wrap")
def subtract(x: Array, y: Array, *, alpha: float = 1) -> Array:
    """x - alpha * y, elementwise."""
    x, y = promote(x, y)
    return jnp.subtract(x, y if alpha == 1 else y * jnp.asarray(alpha, y.dtype))


@op(inplace=True, rule=elementwise_product, integers="wrap")
def multiply(x: Array, y: Array) -> Array:
    """x * y, elementwise; logical and for bool."""
    return jnp.multiply(*promote(x, y))


# integers by 0, and to powers below 0


def _gives_integers(x: Any, y: Any) -> bool:
    """Whether the results of an op of two Tensors or numbers that stays among integers are integers."""
    return not any(dtypes.is_inexact(v.dtype) if hasattr(v, "dtype") else isinstance(v, float) for v in (x, y))


def _divides(what: str) -> Callable[..., None]:
    """A step before a division: raises ZeroDivisionError for integers by 0; ops.ids says when."""

    def describe(_: int, at: tuple[int, ...]) -> Exception:
        return ZeroDivisionError(
            f"{what}: the integer at {list(at)} of the divisor is 0; mask it with where(), or divide floating numbers"
        )

    def check(x: Any, y: Any, *_: Any, **__: Any) -> None:
        if _gives_integers(x, y):
            check_none(lambda xp, y: y == 0, [y], describe)

    return check


def _check_divide(x: Any, y: Any, *_: Any, rounding_mode: str | None = None, **__: Any) -> None:
    if rounding_mode is not None and _gives_integers(x, y):
        for one, other in ((x, y), (y, x)):
            if hasattr(other, "dtype"):
                dtypes.check_holds("divide", other.dtype, one)
        _divides("divide")(x, y)


def _check_pow(x: Any, y: Any, *_: Any, **__: Any) -> None:
    def describe(value: int, at: tuple[int, ...]) -> Exception:
        return ConfigError(
            f"pow: an integer to the power {value}, as at {list(at)}, is a fraction; cast to a floating dtype"
        )

    if _gives_integers(x, y):
        check_none(lambda xp, y: y < 0, [y], describe)


def _divide(by: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    x, y = promote(x, y)
    if not dtypes.is_integer(x.dtype):
        return by(x, y)
    zero = y == 0
    return jnp.where(zero, dtypes.not_a_number(x.dtype), by(x, jnp.where(zero, 1, y)))


def _truncated_quotient(x: Array, y: Array) -> Array:
    if not dtypes.is_integer(x.dtype):
        return jnp.trunc(x / y)
    quotient = jnp.abs(x) // jnp.abs(y)
    return jnp.where((x < 0) != (y < 0), -quotient, quotient)


@preceded(_check_divide)
@op(inplace=True, rule=_divide_rule, integers="any")
def divide(x: Array, y: Array, *, rounding_mode: str | None = None) -> Array:
    """x / y, elementwise; integers divide to the default floating dtype.

    rounding_mode: None, "trunc" (toward zero) or "floor"; with one of these integers stay integers, and those by 0
    raise ZeroDivisionError.
    """
    if rounding_mode == "floor":
        return _divide(jnp.floor_divide, x, y)
    if rounding_mode == "trunc":
        return _divide(_truncated_quotient, x, y)
    if rounding_mode is not None:
        raise ValueError(f"rounding_mode={rounding_mode!r}; choose None, 'trunc' or 'floor'")
    return jnp.divide(*promote_floating(x, y))


@preceded(_divides("floor_divide"))
@op(inplace=True, rule=elementwise, real=True, constant=True)
def floor_divide(x: Array, y: Array) -> Array:
    """floor(x / y), elementwise; no gradient flows through. Raises ZeroDivisionError for integers by 0."""
    return _divide(jnp.floor_divide, x, y)


@preceded(_divides("remainder"))
@op(inplace=True, rule=elementwise, real=True)
def remainder(x: Array, y: Array) -> Array:
    """x - y * floor(x / y), elementwise; has the sign of y. Raises ZeroDivisionError for integers by 0."""
    return _divide(jnp.remainder, x, y)


@preceded(_check_pow)
@op(amp="fp32", inplace=True, rule=elementwise)
def pow(x: Array, y: Array) -> Array:  # the public name
    """x to the power y, elementwise. Raises ConfigError for integers to powers below 0, which are fractions."""
    x, y = promote(x, y)
    if not dtypes.is_integer(x.dtype):
        if dtypes.is_complex(x.dtype):
            # |0^y| = 0^real(y), where the exponential of y * log(0) is no number; no derivative unless real(y) > 1
            size = jnp.real(y)
            size = jnp.where(size > 1, size, size / 2).astype(y.dtype)
            y = jnp.where((x == 0) & (jnp.imag(y) != 0) & (jnp.real(y) > 0), size, y)
        # 0 * 0^-1 is no number, but the derivative of x^0 is 0 at 0 too
        both_zero = (x == 0) & (y == 0)
        elsewhere = jnp.power(jnp.where(both_zero, 1, x), jnp.where(both_zero, 1, y))
        return jnp.where(both_zero, jnp.power(jax.lax.stop_gradient(x), y), elsewhere)
    return jnp.where(y < 0, dtypes.not_a_number(x.dtype), jnp.power(x, jnp.maximum(y, 0)))


@op(inplace=True, rule=elementwise_sum)
def neg(x: Array) -> Array:
    """-x, elementwise."""
    return jnp.negative(x)


@op(amp="low", rule=matrix_product)
def matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    """Matrix product over the last two dims, [*b, m, k] and [*b, k, n] -> [*b, m, n]; leading dims broadcast.

    A 1-D operand is a row (x) or a column (y), as in NumPy. transpose_x and transpose_y swap the last two dims first.
    Half-precision inputs accumulate in float32.
    """
    x, y = promote(x, y)
    if transpose_x and x.ndim > 1:
        x = jnp.swapaxes(x, -1, -2)
    if transpose_y and y.ndim > 1:
        y = jnp.swapaxes(y, -1, -2)
    if x.ndim and y.ndim and x.shape[-1] != y.shape[0 if y.ndim == 1 else -2]:
        raise ShapeError(
            f"matmul: x {list(x.shape)} and y {list(y.shape)} do not fit; the last dim of x must equal the first of a "
            "1-D y, the last but one of others"
        )
    wide = jnp.float32 if x.dtype in (dtypes.bfloat16, dtypes.float16) else None
    if x.ndim > 2 and y.ndim == 2:
        # one 2-D product: its weight gradient is one fast matmul instead of a batched one
        rows = math.prod(x.shape[:-1])
        flat = kernels.tile_product(x.reshape(rows, x.shape[-1]), y, wide).astype(x.dtype)
        return flat.reshape(*x.shape[:-1], y.shape[-1])
    return jnp.matmul(x, y, preferred_element_type=wide).astype(x.dtype)


def _compare(relation: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """relation(x, y), where a Python integer need not be one of the other's dtype."""
    within = relation(*promote(x, y))
    for one, other in ((x, y), (y, x)):
        if one.weak_type and not other.weak_type and dtypes.is_integer(one.dtype) and dtypes.is_integer(other.dtype):
            limits, own = dtypes.iinfo(other.dtype), dtypes.iinfo(one.dtype)
            if limits.min <= own.min and limits.max >= own.max:
                continue
            outside = (one < max(limits.min, own.min)) | (one > min(limits.max, own.max))
            # every integer of the dtype, and so 0, lies on the same side of it
            return jnp.where(outside, relation(*(v if v is one else jnp.zeros_like(one) for v in (x, y))), within)
    return within


@op(inplace=True, rule=elementwise, integers="any")
def equal(x: Array, y: Array) -> Array:
    """x == y, elementwise -> bool."""
    return _compare(jnp.equal, x, y)


@op(inplace=True, rule=elementwise, integers="any")
def not_equal(x: Array, y: Array) -> Array:
    """x != y, elementwise -> bool."""
    return _compare(jnp.not_equal, x, y)


@op(inplace=True, rule=elementwise, integers="any")
def less_than(x: Array, y: Array) -> Array:
    """x < y, elementwise -> bool."""
    return _compare(jnp.less, x, y)


@op(inplace=True, rule=elementwise, integers="any")
def less_equal(x: Array, y: Array) -> Array:
    """x <= y, elementwise -> bool."""
    return _compare(jnp.less_equal, x, y)


@op(inplace=True, rule=elementwise, integers="any")
def greater_than(x: Array, y: Array) -> Array:
    """x > y, elementwise -> bool."""
    return _compare(jnp.greater, x, y)


@op(inplace=True, rule=elementwise, integers="any")
def greater_equal(x: Array, y: Array) -> Array:
    """x >= y, elementwise -> bool."""
    return _compare(jnp.greater_equal, x, y)


@op(inplace=True, rule=elementwise, integers="any")
def logical_and(x: Array, y: Array) -> Array:
    """True where both are nonzero."""
    return jnp.logical_and(x, y)


@op(inplace=True, rule=elementwise, integers="any")
def logical_or(x: Array, y: Array) -> Array:
    """True where either is nonzero."""
    return jnp.logical_or(x, y)


@op(inplace=True, rule=elementwise, integers="any")
def logical_xor(x: Array, y: Array) -> Array:
    """True where exactly one is nonzero."""
    return jnp.logical_xor(x, y)


@op(inplace=True, rule=elementwise)
def logical_not(x: Array) -> Array:
    """True where x is zero."""
    return jnp.logical_not(x)


@op(inplace=True, rule=elementwise, integers="wrap")
def bitwise_and(x: Array, y: Array) -> Array:
    """Bits set in both; logical and for bool."""
    return jnp.bitwise_and(*promote(x, y))


@op(inplace=True, rule=elementwise, integers="wrap")
def bitwise_or(x: Array, y: Array) -> Array:
    """Bits set in either; logical or for bool."""
    return jnp.bitwise_or(*promote(x, y))


@op(inplace=True, rule=elementwise, integers="wrap")
def bitwise_xor(x: Array, y: Array) -> Array:
    """Bits set in exactly one; logical xor for bool."""
    return jnp.bitwise_xor(*promote(x, y))


@op(inplace=True, rule=elementwise)
def bitwise_not(x: Array) -> Array:
    """Every bit flipped; logical not for bool."""
    return jnp.bitwise_not(x)


@op(rule=_cast_rule)
def cast(x: Array, dtype: DTypeLike) -> Array:
    """x in another dtype; floating to integer truncates toward zero, complex to real keeps the real part.

    NaN and what int32 or int64 does not hold becomes the lowest of them; narrower integers get its lowest bits.
    """
    return dtypes.convert(x, dtypes.as_dtype(dtype))


ALIASES = {
    "bitwise_invert": "bitwise_not",
    "div": "divide",
    "eq": "equal",
    "floor_mod": "remainder",
    "ge": "greater_equal",
    "greater": "greater_than",
    "gt": "greater_than",
    "le": "less_equal",
    "less": "less_than",
    "lt": "less_than",
    "mod": "remainder",
    "mul": "multiply",
    "ne": "not_equal",
    "negative": "neg",
    "sub": "subtract",
    "true_divide": "divide",
}
"""Public second names -> the op they name."""
