"""Reading, writing and adding at indices: what every op that takes indices, ids or labels is made of.

jax cuts an index to 32 bits, so that 2**32 + 1 would name element 1; here an index of more bits is compared with the
dim first, and one out of range is the size of the dim, where a read gives NaN (see ops.bounds) and a write is dropped.
What adds up at one place, the gradient of a read included, adds up in float32 if it has 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes

_WIDE = frozenset((dtypes.int64, dtypes.uint64, dtypes.uint32))
_MOST = np.iinfo(np.int32).max


def bounded(index: Array, size: Any, *, negative: bool = True) -> Array:
    """index with what is outside of [-size, size), or of [0, size) without negative, at `size`, where there is nothing.

    int32 if that holds size. An index of so few bits that may be negative is as it was: jax tells what is out of range.
    """
    index = jnp.asarray(index)
    is_signed = jnp.issubdtype(index.dtype, jnp.signedinteger)
    if index.dtype not in _WIDE:
        index = index.astype(dtypes.int32)  # fewer bits may not hold size
        return jnp.where(index < 0, size, index) if is_signed and not negative else index
    outside = index >= size
    if is_signed:
        outside |= index < (-size if negative else 0)
    index = jnp.where(outside, size, index.astype(dtypes.int64))
    # a size that is open in an export is no int
    return index.astype(dtypes.int32) if isinstance(size, int) and size <= _MOST else index


def _bounded_entries(at: tuple, shape: tuple[int, ...], bound: Callable[[Array, Any], Array]) -> tuple:
    """An index expression over shape, of arrays, slices, None and Ellipsis, with its arrays bounded."""
    indexed = sum(entry is not None and entry is not Ellipsis for entry in at)
    entries, dim = [], 0
    for entry in at:
        if entry is None:
            entries.append(entry)
            continue
        if entry is Ellipsis:
            dim += len(shape) - indexed - 1
        elif not isinstance(entry, slice):
            entry = bound(entry, shape[dim])
        entries.append(entry)
        dim += 1
    return tuple(entries)


def _bounded_read(index: Array, size: Any) -> Array:
    """bounded; raises IndexError where there is nothing to read, which shapes alone tell."""
    if isinstance(size, int) and not size and np.size(index):
        raise IndexError(f"an index {list(np.shape(index))} into a dim of size 0, where every index is out of range")
    return bounded(index, size)


def _is_half(x: Array) -> bool:
    return x.dtype in (dtypes.float16, dtypes.bfloat16)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _half_read(get: Callable[..., Array], x: Array, *indices: Array) -> Array:
    return get(x, *indices)


@_half_read.defjvp
def _half_read_jvp(get: Callable[..., Array], primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, *indices = primals
    # linear in the tangent: transposed, it adds up in float32
    return get(x, *indices), get(tangents[0].astype(dtypes.float32), *indices).astype(x.dtype)


def _read(get: Callable[..., Array], x: Array, *indices: Array) -> Array:
    return _half_read(get, x, *indices) if _is_half(x) else get(x, *indices)


def read(x: Array, at: tuple[Any, ...], mode: str = "fill", fill_value: Any = None) -> Array:
    """x[at]; at: arrays, slices, None and Ellipsis. mode and fill_value are those of jax's `.at[].get`.

    By default NaN, the lowest signed or the highest unsigned integer, or True where an index is out of range. In
    another mode indices are those of the op itself, and are taken as they are.
    """
    entries = _bounded_entries(at, x.shape, _bounded_read) if mode == "fill" else at
    arrays = [entry for entry in entries if isinstance(entry, jax.Array)]
    spec = [None if isinstance(entry, jax.Array) else (entry,) for entry in entries]

    def get(x: Array, *arrays: Array) -> Array:
        rest = iter(arrays)
        return x.at[tuple(next(rest) if s is None else s[0] for s in spec)].get(mode=mode, fill_value=fill_value)

    return _read(get, x, *arrays)


def read_along(x: Array, index: Array, dim: int) -> Array:
    """Elements of x along dim at indices of as many dims, NaN or the lowest integer where one is out of range."""
    return _read(lambda x, index: jnp.take_along_axis(x, index, dim), x, _bounded_read(index, x.shape[dim]))


def write(x: Array, at: tuple[Any, ...], value: Array) -> Array:
    """x with x[at] = value; what is out of range is dropped."""
    return x.at[_bounded_entries(at, x.shape, bounded)].set(value)


def add(x: Array, at: tuple[Any, ...], value: Array) -> Array:
    """x with value added at x[at], as often as a place is named; what is out of range is dropped."""
    at = _bounded_entries(at, x.shape, bounded)
    if not _is_half(x):
        return x.at[at].add(value)
    return x.astype(dtypes.float32).at[at].add(value.astype(dtypes.float32)).astype(x.dtype)
