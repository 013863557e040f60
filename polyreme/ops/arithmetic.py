"""Binary arithmetic, comparison, logic and bit ops, and the cast: what Python's operators call.

Operands broadcast, and promote by Paddle's rules (core.dtype.promote).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import promote
from polyreme.core.op import op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.ops.sharding import elementwise, elementwise_product, elementwise_sum, matrix_product


def _divide_rule(call: OpCall) -> ShardingRule:
    """Linear in the dividend, if nothing is rounded."""
    exact = all(map(dtypes.is_inexact, call.dtypes)) and call.attrs.get("rounding_mode") is None
    return dataclasses.replace(elementwise(call), linear="alone" if exact else "no", linear_in=(0,))


def _cast_rule(call: OpCall) -> ShardingRule:
    """Linear between floating dtypes."""
    floats = dtypes.is_inexact(call.dtypes[0]) and dtypes.is_inexact(call.out_dtypes[0])
    return elementwise_sum(call) if floats else elementwise(call)


@op(inplace=True, rule=elementwise_sum)
def add(x: Array, y: Array, alpha: float = 1) -> Array:
    """x + alpha * y, elementwise."""
    x, y = promote(x, y)
    return jnp.add(x, y if alpha == 1 else y * jnp.asarray(alpha, y.dtype))


@op(inplace=True, rule=elementwise_sum)
def subtract(x: Array, y: Array, alpha: float = 1) -> Array:
    """x - alpha * y, elementwise."""
    x, y = promote(x, y)
    return jnp.subtract(x, y if alpha == 1 else y * jnp.asarray(alpha, y.dtype))


@op(inplace=True, rule=elementwise_product)
def multiply(x: Array, y: Array) -> Array:
    """x * y, elementwise; logical and for bool."""
    return jnp.multiply(*promote(x, y))


@op(inplace=True, rule=_divide_rule)
def divide(x: Array, y: Array, rounding_mode: str | None = None) -> Array:
    """x / y, elementwise; integers divide to the default floating dtype.

    rounding_mode: None, "trunc" (toward zero) or "floor"; with one of these integers stay integers.
    """
    if rounding_mode == "floor":
        return jnp.floor_divide(*promote(x, y))
    if rounding_mode == "trunc":
        x, y = promote(x, y)
        if dtypes.is_integer(x.dtype):
            quotient = jnp.abs(x) // jnp.abs(y)
            return jnp.where((x < 0) != (y < 0), -quotient, quotient)
        return jnp.trunc(x / y)
    if rounding_mode is not None:
        raise ValueError(f"rounding_mode={rounding_mode!r}; choose None, 'trunc' or 'floor'")
    x, y = promote(x, y)
    return jnp.divide(dtypes.floating(x), dtypes.floating(y))


@op(inplace=True, rule=elementwise)
def floor_divide(x: Array, y: Array) -> Array:
    """floor(x / y), elementwise."""
    return jnp.floor_divide(*promote(x, y))


@op(inplace=True, rule=elementwise)
def remainder(x: Array, y: Array) -> Array:
    """x - y * floor(x / y), elementwise; has the sign of y."""
    return jnp.remainder(*promote(x, y))


@op(amp="fp32", inplace=True, rule=elementwise)
def pow(x: Array, y: Array) -> Array:  # the public name
    """x to the power y, elementwise."""
    return jnp.power(*promote(x, y))


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
    wide = jnp.float32 if x.dtype in (dtypes.bfloat16, dtypes.float16) else None
    if x.ndim > 2 and y.ndim == 2:
        # one 2-D product: its weight gradient is one fast matmul instead of a batched one
        flat = jnp.matmul(x.reshape(-1, x.shape[-1]), y, preferred_element_type=wide).astype(x.dtype)
        return flat.reshape(*x.shape[:-1], y.shape[-1])
    return jnp.matmul(x, y, preferred_element_type=wide).astype(x.dtype)


@op(inplace=True, rule=elementwise)
def equal(x: Array, y: Array) -> Array:
    """x == y, elementwise -> bool."""
    return jnp.equal(*promote(x, y))


@op(inplace=True, rule=elementwise)
def not_equal(x: Array, y: Array) -> Array:
    """x != y, elementwise -> bool."""
    return jnp.not_equal(*promote(x, y))


@op(inplace=True, rule=elementwise)
def less_than(x: Array, y: Array) -> Array:
    """x < y, elementwise -> bool."""
    return jnp.less(*promote(x, y))


@op(inplace=True, rule=elementwise)
def less_equal(x: Array, y: Array) -> Array:
    """x <= y, elementwise -> bool."""
    return jnp.less_equal(*promote(x, y))


@op(inplace=True, rule=elementwise)
def greater_than(x: Array, y: Array) -> Array:
    """x > y, elementwise -> bool."""
    return jnp.greater(*promote(x, y))


@op(inplace=True, rule=elementwise)
def greater_equal(x: Array, y: Array) -> Array:
    """x >= y, elementwise -> bool."""
    return jnp.greater_equal(*promote(x, y))


@op(inplace=True, rule=elementwise)
def logical_and(x: Array, y: Array) -> Array:
    """True where both are nonzero."""
    return jnp.logical_and(x, y)


@op(inplace=True, rule=elementwise)
def logical_or(x: Array, y: Array) -> Array:
    """True where either is nonzero."""
    return jnp.logical_or(x, y)


@op(inplace=True, rule=elementwise)
def logical_xor(x: Array, y: Array) -> Array:
    """True where exactly one is nonzero."""
    return jnp.logical_xor(x, y)


@op(inplace=True, rule=elementwise)
def logical_not(x: Array) -> Array:
    """True where x is zero."""
    return jnp.logical_not(x)


@op(inplace=True, rule=elementwise)
def bitwise_and(x: Array, y: Array) -> Array:
    """Bits set in both; logical and for bool."""
    return jnp.bitwise_and(*promote(x, y))


@op(inplace=True, rule=elementwise)
def bitwise_or(x: Array, y: Array) -> Array:
    """Bits set in either; logical or for bool."""
    return jnp.bitwise_or(*promote(x, y))


@op(inplace=True, rule=elementwise)
def bitwise_xor(x: Array, y: Array) -> Array:
    """Bits set in exactly one; logical xor for bool."""
    return jnp.bitwise_xor(*promote(x, y))


@op(inplace=True, rule=elementwise)
def bitwise_not(x: Array) -> Array:
    """Every bit flipped; logical not for bool."""
    return jnp.bitwise_not(x)


@op(rule=_cast_rule)
def cast(x: Array, dtype: Any) -> Array:
    """x in another dtype; floating to integer truncates toward zero, complex to real keeps the real part."""
    to = dtypes.as_dtype(dtype)
    if dtypes.is_complex(x.dtype) and not dtypes.is_complex(to):
        x = jnp.real(x)
    return x.astype(to)


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
