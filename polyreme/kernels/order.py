"""The order of elements along a dim, stable: by one sort of whole numbers where the backend does that best.

XLA on CPU sorts one array of integers by a built-in comparison and all else by calling a compiled one. So an element's
rank and its place share a 64-bit integer: the rank above, the place below, which also makes the order stable.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.kernels import select

_WORD = 32  # bits of a rank, and of a place
_LARGEST, _INFINITY = 0x7FFFFFFF, 0x7F800000  # as the bits of a float32: beyond infinity lie the NaNs


def stable_order(x: Array, dim: int, *, descending: bool = False) -> Array:
    """Indices along dim that put x [...] of any dtype in order, equal elements as they come; NaN counts as largest.

    Returns: integers in x's shape.

    >>> stable_order(jnp.array([2.0, 1.0, 2.0]), 0, descending=True).tolist()
    [0, 2, 1]
    """
    if select.backend() == "cpu" and _fits(x, dim):
        rank = _rank(x)
        place = jax.lax.broadcasted_iota(jnp.int64, x.shape, dim)
        words = ((~rank if descending else rank) << _WORD) | place
        return jax.lax.sort(words, dimension=dim, is_stable=False) & (2**_WORD - 1)
    return jnp.argsort(x, axis=dim, descending=descending, stable=True)


def _fits(x: Array, dim: int) -> bool:
    """Whether ranks and places take a word each, of integers that this process computes with."""
    real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
    return jax.config.read("jax_enable_x64") and real and x.dtype.itemsize * 8 <= _WORD and x.shape[dim] < 2**_WORD


def _rank(x: Array) -> Array:
    """int64 from -2^31 on below 2^31, ordered as x is: zeros of either sign have one rank, all NaNs the largest."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        rank = x.astype(jnp.int64)
        return rank - 2 ** (_WORD - 1) if x.dtype == jnp.uint32 else rank
    # by bits alone: comparisons of numbers take the smallest ones for zero
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    size = bits & _LARGEST
    rank = jnp.where(bits < 0, -size, size)
    return jnp.where(size > _INFINITY, _LARGEST, rank).astype(jnp.int64)
