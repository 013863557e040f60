"""Arrays of values on the host, made without compiling anything."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_ALIGN = 64  # bytes
_LARGE = 1 << 20  # bytes; each takes one of the mappings that Linux allows a process
_COLLIDING = 1024  # bytes
_COLUMNS = 16  # of float32, what one line of a cache holds; 8 and 32 are slower


def from_host(data: np.ndarray | np.generic, to: np.dtype | None = None) -> jax.Array:
    """An array with a copy of data, in dtype `to` if given; it compiles nothing."""
    # copied: jax may otherwise keep looking at the caller's memory, which the caller may change
    # not jnp.asarray, which compiles a copy for each new shape and dtype (some 30 ms), to save 9 us a call
    return jax.device_put(aligned_copy(data if to is None else np.asarray(data).astype(to, copy=False)))


def full_from_host(shape: Sequence[int], value: float, dtype: np.dtype) -> jax.Array:
    """An array with the value everywhere; it compiles nothing, and zeros take no memory before they are read."""
    if value == 0:
        return jax.device_put(aligned_zeros(shape, dtype))
    data = _aligned(np.empty, shape, dtype)
    data.fill(value)
    return jax.device_put(data)


def aligned_copy(array: np.ndarray | np.generic) -> np.ndarray:
    """A private copy on a 64-byte address: jax on CPU uses such memory as it is, other memory it copies again."""
    copy = _aligned(np.empty, array.shape, array.dtype)
    _copy_into(copy, np.asarray(array))
    return copy


def in_c_order(array: np.ndarray) -> np.ndarray:
    """The array, copied where its last dim is not the one whose numbers lie side by side."""
    return array if array.flags.c_contiguous else aligned_copy(array)


def _copy_into(copy: np.ndarray, array: np.ndarray) -> None:
    """np.copyto, of some large transposed matrices by columns.

    numpy takes a number of each row in memory, one after the other. Where rows are a multiple of some power of two
    apart, a cache has few places for them: 0.5 GB/s for 4096 x 4096 float32, and 3 by columns; where they are not, it
    is the faster (benchmarks/transposed_copy.py).
    """
    is_transposed = array.ndim == 2 and 0 < array.strides[0] < array.strides[1]
    if array.nbytes < _LARGE or not is_transposed or array.strides[1] % _COLLIDING:
        np.copyto(copy, array)
        return
    for first in range(0, array.shape[1], _COLUMNS):
        np.copyto(copy[:, first : first + _COLUMNS], array[:, first : first + _COLUMNS])


def aligned_zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros on a 64-byte address, which take memory only where they are read or written."""
    return _aligned(_zeros, shape, dtype)


def _zeros(nbytes: int, dtype: type) -> np.ndarray:
    """numpy.zeros, large ones of pages that the system clears when they are read first.

    numpy asks glibc, which keeps what was freed (core/engine/host_memory.py) and clears it at once.
    """
    if nbytes < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(nbytes, dtype)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), dtype)


def _aligned(allocate: Callable[..., np.ndarray], shape: Sequence[int], dtype: Any) -> np.ndarray:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = allocate(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes].view(dtype).reshape(shape)
