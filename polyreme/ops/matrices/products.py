"""Products of vectors and matrices: inner, outer, batched, Kronecker, cross, Einstein sums.

Half-precision inputs accumulate in float32. Sums over a dim whose sizes differ raise ShapeError naming it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dims
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor, Axes
from polyreme.core.dtype import promote
from polyreme.core.op import op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ShapeError
from polyreme.ops.creation import republish
from polyreme.ops.sharding import dim_names, last_two_swapped, matrix_product, permutes


def _wide(dtype: Any) -> Any:
    """The dtype that a product of this dtype accumulates in, if not in itself."""
    return jnp.float32 if dtype in (dtypes.bfloat16, dtypes.float16) else None


def _matmul(x: Array, y: Array) -> Array:
    x, y = promote(x, y)
    return jnp.matmul(x, y, preferred_element_type=_wide(x.dtype)).astype(x.dtype)


def _dot_rule(call: OpCall) -> ShardingRule:
    """[*b, k] x [*b, k] -> [*b]; the sum over a split k makes the result Partial."""
    batch = dim_names(call.shapes[0][:-1], "b")
    return ShardingRule(((*batch, "k"),) * 2, (batch,), reduce="sum", linear="alone", piecewise=True)


def _outer_rule(call: OpCall) -> ShardingRule | None:
    """[m] x [n] -> [m, n]."""
    if any(len(shape) != 1 for shape in call.shapes):
        return None
    return ShardingRule((("m",), ("n",)), (("m", "n"),), linear="alone", piecewise=True)


def _einsum_rule(call: OpCall) -> ShardingRule | None:
    """The letters of the equation, if each stands once in a term and no dims are left to an ellipsis."""
    equation = str(call.attrs["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(t)) != len(t) for t in [*terms, right]):
        return None
    if any(len(t) != len(s) for t, s in zip(terms, call.shapes, strict=True)):
        return None
    return ShardingRule(tuple(map(tuple, terms)), (tuple(right),), reduce="sum", linear="alone", piecewise=True)


@op(amp="low", rule=matrix_product)
def bmm(x: Array, y: Array) -> Array:
    """Matrix product of each pair in a batch: [b, m, k], [b, k, n] -> [b, m, n]."""
    dims.check("bmm", {"x": "b m k", "y": "b k n"}, {"x": x.shape, "y": y.shape})
    return _matmul(x, y)


@op(amp="low", rule=matrix_product)
def mm(input: Array, mat2: Array) -> Array:
    """Matrix product over the last two dims: [*b, m, k], [*b, k, n] -> [*b, m, n]."""
    dims.check("mm", {"input": "*_a m k", "mat2": "*_b k n"}, {"input": input.shape, "mat2": mat2.shape})
    return _matmul(input, mat2)


@op(amp="low", rule=matrix_product)
def mv(x: Array, vec: Array) -> Array:
    """Matrix times vector: [m, k], [k] -> [m]."""
    dims.check("mv", {"x": "m k", "vec": "k"}, {"x": x.shape, "vec": vec.shape})
    return _matmul(x, vec)


@op(amp="low", rule=_dot_rule)
def dot(x: Array, y: Array) -> Array:
    """Sum of x * y over the last dim, without conjugation: [k], [k] -> [] or [b, k], [b, k] -> [b]."""
    if x.ndim not in (1, 2):
        raise ShapeError(f"dot takes [k] or [batch, k], got shape {list(x.shape)}; use matmul or inner")
    dims.check("dot", {"x": "*b k", "y": "*b k"}, {"x": x.shape, "y": y.shape})
    return _einsum("...k,...k->...", x, y)


@op(amp="low", method=False)
def vecdot(x: Array, y: Array, axis: int = -1) -> Array:
    """Sum of conj(x) * y over one dim, int64 of integers; the others broadcast."""
    x, y = promote(x, y)
    own = x.dtype if dtypes.is_inexact(x.dtype) else dtypes.int64
    if own != x.dtype:
        x, y = x.astype(own), y.astype(own)
    return jnp.vecdot(x, y, axis=axis, preferred_element_type=_wide(own)).astype(own)


@op(amp="low")
def inner(x: Array, y: Array) -> Array:
    """Sum over the last dim of both: [*a, k], [*b, k] -> [*a, *b]; a 0-D operand multiplies the other."""
    x, y = promote(x, y)
    if x.ndim == 0 or y.ndim == 0:
        return x * y
    dims.check("inner", {"x": "*_a k", "y": "*_b k"}, {"x": x.shape, "y": y.shape})
    return jnp.inner(x, y, preferred_element_type=_wide(x.dtype)).astype(x.dtype)


@op(amp="low", rule=_outer_rule)
def outer(x: Array, y: Array) -> Array:
    """Every product of an element of x and one of y, both flattened: -> [x.size, y.size]."""
    x, y = promote(x, y)
    return jnp.outer(x, y)


@op(amp="low")
def kron(x: Array, y: Array) -> Array:
    """Kronecker product: every element of x times the whole of y, laid out in blocks."""
    return jnp.kron(*promote(x, y))


@op
def cross(x: Array, y: Array, axis: int = 9) -> Array:
    """Cross product over a dim of size 3; axis 9, the default, stands for the first dim of that size."""
    x, y = promote(x, y)
    if axis == 9:
        axis = next((d for d, size in enumerate(x.shape) if size == 3), 9)
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != 3 or x.shape != y.shape:
        raise ShapeError(
            f"cross: axis {axis} of x {list(x.shape)} and y {list(y.shape)}; give two of one shape with a dim of size 3"
        )
    return jnp.cross(x, y, axis=axis)


@op(amp="low", inplace=True)
def addmm(input: Array, x: Array, y: Array, beta: float = 1.0, alpha: float = 1.0) -> Array:
    """beta * input + alpha * (x @ y): x [m, k], y [k, n], input broadcasts to [m, n]."""
    dims.check("addmm", {"x": "m k", "y": "k n"}, {"x": x.shape, "y": y.shape})
    return _add_product(input, x, y, beta, alpha)


@op(amp="low", inplace=True)
def baddbmm(input: Array, x: Array, y: Array, beta: float = 1.0, alpha: float = 1.0) -> Array:
    """beta * input + alpha * (x @ y), matrix by matrix: x [b, m, k], y [b, k, n], input broadcasts to [b, m, n]."""
    dims.check("baddbmm", {"x": "b m k", "y": "b k n"}, {"x": x.shape, "y": y.shape})
    return _add_product(input, x, y, beta, alpha)


def _add_product(added: Array, x: Array, y: Array, beta: float, alpha: float) -> Array:
    x, y, added = promote(x, y, added)
    factors = (jnp.asarray(v, x.dtype) for v in (beta, alpha))
    return next(factors) * added + next(factors) * _matmul(x, y)


@op(rule=permutes(last_two_swapped))
def matrix_transpose(x: Array) -> Array:
    """The last two dims swapped: [*b, m, n] -> [*b, n, m]."""
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose takes matrices [*b, m, n], got shape {list(x.shape)}")
    return jnp.swapaxes(x, -1, -2)


@op
def trace(x: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """Sum of a diagonal of the matrices that axis1 and axis2 span, in x's dtype; of bool in int64."""
    return jnp.trace(x, offset, axis1, axis2, dtype=dtypes.int64 if x.dtype == dtypes.bool_ else x.dtype)


def _einsum(equation: str, *operands: Array) -> Array:
    operands = promote(*operands)
    kind = operands[0].dtype
    return jnp.einsum(equation, *operands, preferred_element_type=_wide(kind)).astype(kind)


@op(amp="low", method=False, rule=_einsum_rule)
def einsum(equation: str, operands: list[Array]) -> Array:
    """Products summed as the equation says: einsum("bik,bkj->bij", x, y) is bmm.

    A letter is a dim, "..." the dims not named; letters missing after -> are summed over. Without -> the result has the
    letters that occur once, in alphabetical order. The cheapest order of products is found first.
    """
    return _einsum(equation, *operands)


_einsum_op = einsum


def _variadic(equation: str, *operands: AnyTensor) -> AnyTensor:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    return _einsum_op(equation, list(given))


einsum = republish(_einsum_op, _variadic)


@op(amp="low")
def tensordot(x: Array, y: Array, axes: Axes = 2) -> Array:
    """Sum of products over several dims of both.

    axes: n, for the last n of x and the first n of y; a list of dims, the same in both; or two such lists.
    The rest of x's dims and then of y's are the result's.
    """
    x, y = promote(x, y)
    first, second = _dims_summed(axes, x.ndim)
    for a, b in zip(first, second, strict=True):
        if x.shape[a] != y.shape[b]:
            raise ShapeError(
                f"tensordot: dim {a} of x {list(x.shape)} and dim {b} of y {list(y.shape)} are summed, but differ"
            )
    return jnp.tensordot(x, y, (first, second), preferred_element_type=_wide(x.dtype)).astype(x.dtype)


def _dims_summed(axes: Any, ndim: int) -> tuple[list[int], list[int]]:
    if isinstance(axes, int):
        return list(range(ndim - axes, ndim)), list(range(axes))
    lists = [list(a) if isinstance(a, tuple) else a for a in axes]
    if not lists or isinstance(lists[0], int):
        return list(axes), list(axes)
    if len(lists) == 1:
        return lists[0], lists[0]
    first, second = lists
    # the shorter list goes on as the longer one does
    return first + second[len(first) :], second + first[len(second) :]


@op(amp="low")
def multi_dot(x: list[Array]) -> Array:
    """Product of two or more matrices in the order that costs least; the first and the last may be vectors."""
    if len(x) < 2:
        raise ShapeError(f"multi_dot takes at least two matrices, got {len(x)}")
    return jnp.linalg.multi_dot(promote(*x)) if len(x) > 2 else _matmul(*x)


@op
def vander(x: Array, n: int | None = None, increasing: bool = False) -> Array:
    """Powers of a vector as columns: [k] -> [k, n], from x^(n-1) to x^0, or from x^0 up if increasing.

    n is k if None.
    """
    if x.ndim != 1:
        raise ShapeError(f"vander takes a vector, got shape {list(x.shape)}")
    columns = x.shape[0] if n is None else n
    if columns < 0:
        raise ShapeError(f"vander: n={n}; give a number of columns >= 0")
    powers = jnp.cumprod(jnp.broadcast_to(x[:, None], (x.shape[0], max(columns - 1, 0))), 1, dtype=x.dtype)
    table = jnp.concatenate([jnp.ones((x.shape[0], 1), x.dtype), powers], 1)[:, :columns]
    return table if increasing else table[:, ::-1]


ALIASES = {"ger": "outer"}
"""Other public names of the same functions."""
