"""Random arrays of any shape from one compiled program a distribution: initial values that compile nothing.

The numbers are those of `jax.random` for the same key and shape. Its bits depend on a number's place in the flat array
alone (`jax_threefry_partitionable`), so an array is drawn in blocks of one size, each starting where the last ended.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry2x32_p

from polyreme.core import state
from polyreme.core.compiled import DRAWS, ProgramAlone

_LOG_BLOCK = 16
_BLOCK = 1 << _LOG_BLOCK


def normal(key: Any, shape: Sequence[int]) -> Any:
    """Standard normal numbers, float32: a NumPy array, or a traced one if key is traced."""
    return _draw(jax.random.normal, key, shape)


def uniform(key: Any, shape: Sequence[int], low: float, high: float) -> Any:
    """Uniform numbers in [low, high), float32: a NumPy array, or a traced one if key is traced."""
    return _draw(jax.random.uniform, key, shape, minval=low, maxval=high)


def truncated_normal(key: Any, shape: Sequence[int], low: float, high: float) -> Any:
    """Standard normal numbers in (low, high), float32: a NumPy array, or a traced one if key is traced."""
    return _draw(jax.random.truncated_normal, key, shape, lower=low, upper=high)


def _draw(sampler: Callable[..., Any], key: Any, shape: Sequence[int], **bounds: float) -> Any:
    if isinstance(key, state.Tracer):
        return sampler(key, shape=tuple(shape), dtype=jnp.float32, **bounds)
    block = _block(sampler)
    words, limits = np.asarray(key), {name: np.float32(bound) for name, bound in bounds.items()}
    flat = np.empty(math.prod(shape), np.float32)
    for number, start in enumerate(range(0, flat.size, _BLOCK)):
        part = flat[start : start + _BLOCK]
        part[:] = np.asarray(block(np.array([*words, number], np.uint32), limits))[: part.size]
    return flat.reshape(shape)


@functools.cache
def _block(sampler: Callable[..., Any]) -> Callable[..., jax.Array]:
    """(key and the block's number uint32 [3], bounds by name) -> the numbers of that block, float32."""

    def draw(words: jax.Array, bounds: dict[str, jax.Array]) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl=_BLOCKWISE)
        return sampler(key, shape=(_BLOCK,), dtype=jnp.float32, **bounds)

    return ProgramAlone(draw, DRAWS)


def _bits(words: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each place of the block, as jax draws them there: Threefry of the place, halves combined."""
    assert (width, shape) == (32, (_BLOCK,))
    low = jnp.arange(_BLOCK, dtype=jnp.uint32) | (words[2] << _LOG_BLOCK)
    high = jnp.full(_BLOCK, words[2] >> (32 - _LOG_BLOCK))
    first, second = threefry2x32_p.bind(words[0], words[1], high, low)
    return first ^ second


def _unused(*_: Any) -> Any:
    raise NotImplementedError("the key of a block of random numbers only draws")


_BLOCKWISE = define_prng_impl(
    key_shape=(3,), seed=_unused, split=_unused, fold_in=_unused, random_bits=_bits, name="threefry2x32_blockwise"
)
