"""Norms of vectors and matrices, and distances between points.

The gradient of a norm at 0 is 0. p-norm: (sum |x|^p)^(1/p); p inf, -inf and 0 mean the largest |x|, the
smallest, and the number of nonzero elements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyreme.core import dims
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import Axes, DTypeLike
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import op
from polyreme.errors import ShapeError
from polyreme.ops.math import magnitude
from polyreme.ops.reduce import dims_of
from polyreme.ops.sharding import reduction


def _root(x: Array, p: float) -> Array:
    """x to the power 1/p, with gradient 0 where x is 0."""
    zero = x == 0
    safe = jnp.where(zero, 1, x)
    return jnp.where(zero, 0, jnp.sqrt(safe) if p == 2 else jnp.power(safe, 1 / p))


def p_norm(x: Array, p: float, over: int | tuple[int, ...], keepdim: bool = False) -> Array:
    """(sum of |x|^p)^(1 / p) over dims; the largest |x| for p = inf, the smallest for -inf, how many are not 0 for 0.

    The gradient where the norm is 0 is 0, and never NaN.
    """
    size = magnitude(x)
    if p == 0:
        return jnp.sum((x != 0).astype(size.dtype), over, keepdims=keepdim)
    if math.isinf(p) and dtypes.is_complex(x.dtype):
        return _complex_extreme(x, over, keepdim, p > 0)
    if math.isinf(p):
        return _real_extreme(size, over, keepdim, p > 0)
    if p == 1:
        return jnp.sum(size, over, keepdims=keepdim)
    if p == 2:
        return _root(jnp.sum(jnp.real(x * jnp.conj(x)), over, keepdims=keepdim), 2)
    if p < 0:
        # a zero element makes the norm 0
        return jnp.sum(size**p, over, keepdims=keepdim) ** (1 / p)
    zero = size == 0
    powers = jnp.where(zero, 0, jnp.where(zero, 1, size) ** p)
    return _root(jnp.sum(powers, over, keepdims=keepdim), p)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _real_extreme(size: Array, over: int | tuple[int, ...], keepdim: bool, largest: bool) -> Array:
    """The largest or smallest over dims. Every element that ties has the whole gradient, as Paddle has it."""
    return (jnp.max if largest else jnp.min)(size, over, keepdims=keepdim)


@_real_extreme.defjvp
def _real_extreme_jvp(over: Any, keepdim: bool, largest: bool, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (size,), (slope,) = primals, tangents
    found = _real_extreme(size, over, True, largest)
    out = found if keepdim else jnp.squeeze(found, over)
    return out, jnp.sum(jnp.where(size == found, slope, 0), over, keepdims=keepdim)


def _extreme(x: Array, size: Array, largest: bool) -> Array:
    """The element of x's last dim where size is extreme, the first of several.

    It is looked for by place: a gradient that compares values with the extreme one finds none where a compiler has
    computed size twice and rounded differently.
    """
    at = (jnp.argmax if largest else jnp.argmin)(lax.stop_gradient(size), -1, keepdims=True)
    return jnp.take_along_axis(x, at, -1)[..., 0]


def _complex_extreme(x: Array, over: int | tuple[int, ...], keepdim: bool, largest: bool) -> Array:
    """The largest or smallest |x| over dims."""
    dims = tuple(d % x.ndim for d in (over if isinstance(over, tuple) else (over,)))
    kept = [n for d, n in enumerate(x.shape) if d not in dims]
    flat = jnp.moveaxis(x, dims, range(len(kept), x.ndim)).reshape(*kept, -1)
    found = magnitude(_extreme(flat, magnitude(flat), largest))
    return jnp.expand_dims(found, dims) if keepdim else found


def _number(p: Any, what: str) -> float:
    if isinstance(p, str) or p is None:
        raise ShapeError(f"{what}: p={p!r}; give a number, inf or -inf")
    return float(p)


def _real(x: Array, dtype: Any) -> Array:
    return floating(x) if dtype is None else x.astype(dtypes.as_dtype(dtype))


@op(amp="fp32", method=False, rule=reduction())
def vector_norm(
    x: Array, p: float = 2.0, axis: Axes | None = None, keepdim: bool = False, *, dtype: DTypeLike | None = None
) -> Array:
    """p-norm of the elements over axis (all dims if None)."""
    return p_norm(_real(x, dtype), _number(p, "vector_norm"), dims_of(x, axis, "vector_norm"), keepdim)


@op(amp="fp32", method=False)
def matrix_norm(x: Array, p: Any = "fro", axis: Axes = (-2, -1), keepdim: bool = False) -> Array:
    """Norm of the matrices that two dims span.

    p: "fro" (square root of the sum of squares), "nuc" (sum of singular values), 2 and -2 (largest and smallest
    singular value), 1 and -1 (largest and smallest sum of a column's |x|), inf and -inf (of a row's).
    """
    return _matrix_norm(floating(x), p, dims_of(x, axis, "matrix_norm"), keepdim, "matrix_norm")


def _matrix_norm(x: Array, p: Any, over: tuple[int, ...], keepdim: bool, what: str) -> Array:
    if len(over) != 2:
        raise ShapeError(f"{what}: a matrix spans 2 dims, axis names {list(over)} of shape {list(x.shape)}")
    if p == "fro":
        return p_norm(x, 2, over, keepdim)
    matrices = jnp.moveaxis(x, over, (-2, -1))
    if p in ("nuc", 2, -2):
        values = jnp.linalg.svd(matrices, compute_uv=False)
        result = jnp.sum(values, -1) if p == "nuc" else values[..., 0] if p == 2 else values[..., -1]
    elif p in (1, -1, math.inf, -math.inf):
        sums = jnp.sum(magnitude(matrices), -2 if abs(p) == 1 else -1)
        result = _extreme(sums, sums, p > 0)
    else:
        raise ShapeError(f"{what}: p={p!r}; choose 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return jnp.expand_dims(result, over) if keepdim else result


@op(amp="fp32", rule=reduction())
def norm(
    x: Array, p: Any = None, axis: Axes | None = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    """Norm of a vector, of matrices, or of all elements.

    Where axis names two dims, matrix_norm of the matrices that they span; "nuc" needs such. Else the p-norm of the
    elements over axis, "fro" being 2. p None is 2, and so over two dims the largest singular value.
    """
    x = _real(x, dtype)
    over = dims_of(x, axis, "norm")
    p = 2.0 if p is None else p
    if p == "nuc" or (axis is not None and len(over) == 2):
        return _matrix_norm(x, p, over, keepdim, "norm")
    return p_norm(x, 2.0 if p == "fro" else _number(p, "norm"), over, keepdim)


@op(amp="fp32")
def dist(x: Array, y: Array, p: float = 2) -> Array:
    """p-norm of x - y over all elements, broadcast -> []."""
    x, y = promote_floating(x, y)
    difference = x - y
    return p_norm(difference, _number(p, "dist"), tuple(range(difference.ndim)), False)


_COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": lambda rows: rows > 25,  # below it the product costs more than it saves
    "use_mm_for_euclid_dist": lambda rows: True,
    "donot_use_mm_for_euclid_dist": lambda rows: False,
}


@op(amp="fp32")
def cdist(x: Array, y: Array, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Array:
    """p-norm distance of every row of x from every row of y: [*b, m, k], [*b, n, k] -> [*b, m, n].

    compute_mode: whether p=2 goes by |x|^2 + |y|^2 - 2 x.y, which needs less memory and loses digits for near points;
    "..._if_necessary" does so from 26 rows up.
    """
    dims.check("cdist", {"x": "*_a m k", "y": "*_b n k"}, {"x": x.shape, "y": y.shape})
    if compute_mode not in _COMPUTE_MODES:
        raise ShapeError(f"cdist: compute_mode={compute_mode!r}; choose one of {', '.join(_COMPUTE_MODES)}")
    p = _number(p, "cdist")
    if p < 0:
        raise ShapeError(f"cdist: p={p}; give p >= 0")
    x, y = promote_floating(x, y)
    if p == 2 and _COMPUTE_MODES[compute_mode](max(x.shape[-2], y.shape[-2])):
        squares = jnp.sum(x * x, -1)[..., :, None] + jnp.sum(y * y, -1)[..., None, :]
        return _root(jnp.maximum(squares - 2 * jnp.matmul(x, jnp.swapaxes(y, -1, -2)), 0), 2)
    return p_norm(x[..., :, None, :] - y[..., None, :, :], p, (-1,), False)


@op(amp="fp32", method=False)
def pdist(x: Array, p: float = 2.0) -> Array:
    """p-norm distances of each pair of rows, the first before the second: [n, k] -> [n (n - 1) / 2]."""
    dims.check("pdist", {"x": "n k"}, {"x": x.shape})
    first, second = jnp.triu_indices(x.shape[0], 1)
    x = floating(x)
    return p_norm(x[first] - x[second], _number(p, "pdist"), (-1,), False)


@op(amp="fp32", inplace=True)
def renorm(x: Array, p: float, axis: int, max_norm: float) -> Array:
    """x with each slice along axis whose p-norm exceeds max_norm scaled down to it."""
    at = dims_of(x, axis, "renorm")[0]
    if p <= 0 or max_norm < 0:
        raise ShapeError(f"renorm: p={p}, max_norm={max_norm}; give p > 0 and max_norm >= 0")
    x = floating(x)
    sizes = p_norm(x, float(p), tuple(d for d in range(x.ndim) if d != at), True)
    over = sizes > max_norm
    return jnp.where(over, x * (max_norm / jnp.where(over, sizes, 1)), x)
