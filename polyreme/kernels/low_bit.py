"""Weights of few bits: how they are rounded and stored, and the product with one that is decoded inside it.

A weight [in, out] is stored as codes, int8 [out, in], of 4 bits as [out / 2, in]: byte j has channel 2 j in its low
half and 2 j + 1 in its high one; those of fp8 are its bits, so that nothing takes them for numbers to be cast. scale:
[out], or [in / group_size rounded up, out] for groups of inputs. value = code * scale.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from polyreme.kernels import select

# quantiles of a normal distribution, 0 among them. Source: arXiv:2305.14314, appendix E
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
LARGEST = {"int8": 127.0, "int4": 7.0, "nf4": 1.0, "fp8": 448.0}
"""Kinds of codes, and the largest value of each before it is scaled: fp8 is float8_e4m3fn, nf4 a table of 16 values."""
HALVES = ("int4", "nf4")
"""Kinds of which two are one byte."""
_BLOCK = 1 << 21
"""Numbers of a weight that are decoded at once on a CPU, 8 MB in float32: about what a core's caches hold."""


def encode(weight: jax.Array, kind: str, group_size: int = -1) -> tuple[jax.Array, jax.Array]:
    """Codes and float32 scales of a weight [in, out], each group's largest number being the largest code.

    >>> [part.shape for part in encode(jnp.ones((8, 6)), "int4", 4)]
    [(3, 8), (2, 6)]
    """
    inputs, outputs = weight.shape
    group = inputs if group_size == -1 else group_size
    groups = -(-inputs // group)
    weight = weight.astype(jnp.float32)
    padded = jnp.pad(weight, [(0, groups * group - inputs), (0, 0)]).reshape(groups, group, outputs)
    scale = jnp.abs(padded).max(1) / LARGEST[kind]
    scale = scale[0] if group_size == -1 else scale
    return encode_scaled(weight, scale, kind, group_size), scale


def encode_scaled(weight: jax.Array, scale: jax.Array, kind: str, group_size: int = -1) -> jax.Array:
    """Codes of a weight [in, out] under these scales, each the nearest one."""
    spread = _spread(scale, weight.shape[0], group_size)
    scaled = weight.T.astype(jnp.float32) / jnp.where(spread == 0, 1, spread)
    if kind == "fp8":
        # a quotient that rounding brings over the largest number would be NaN
        rounded = jnp.clip(scaled, -LARGEST[kind], LARGEST[kind]).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(rounded, jnp.int8)
    if kind == "nf4":
        table = jnp.asarray(NF4, jnp.float32)
        codes = jnp.searchsorted((table[1:] + table[:-1]) / 2, scaled).astype(jnp.int8)
    else:
        codes = jnp.clip(jnp.round(scaled), -LARGEST[kind], LARGEST[kind]).astype(jnp.int8)
    return pack(codes) if kind in HALVES else codes


def pack(codes: jax.Array) -> jax.Array:
    """Codes of 4 bits, int8 [out, in], two in a byte: [out / 2, in]."""
    pairs = codes.reshape(-1, 2, codes.shape[-1]).astype(jnp.uint8) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).astype(jnp.int8)


def unpack(packed: jax.Array, kind: str) -> jax.Array:
    """The inverse of pack: int8 [out, in], -8 to 7 of int4 and 0 to 15 of nf4."""
    low = (packed << 4) >> 4  # of int8 a shift to the right repeats the sign
    pairs = jnp.stack([low, packed >> 4], 1)
    pairs = pairs & 15 if kind == "nf4" else pairs
    return pairs.reshape(-1, packed.shape[-1])


def levels(codes: jax.Array, kind: str, dtype: jnp.dtype) -> jax.Array:
    """The values of stored codes before scaling, [out, in] in a dtype: exact in bfloat16, but for nf4."""
    codes = unpack(codes, kind) if kind in HALVES else codes
    if kind == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)
    return jnp.asarray(NF4, dtype)[codes] if kind == "nf4" else codes.astype(dtype)


def decode(codes: jax.Array, scale: jax.Array, kind: str, group_size: int, dtype: jnp.dtype) -> jax.Array:
    """The values of a stored weight, [out, in] in a dtype."""
    return levels(codes, kind, dtype) * _spread(scale, codes.shape[-1], group_size).astype(dtype)


def low_bit_linear(x: jax.Array, codes: jax.Array, scale: jax.Array, kind: str, group_size: int) -> jax.Array:
    """x [..., in] times a stored weight -> [..., out], in x's dtype.

    The weight is decoded for each product, in the backward again, so that no float copy of it outlives one: on a CPU in
    blocks of output channels where it is large.
    """
    outputs = scale.shape[-1]
    if all(isinstance(n, int) for n in x.shape):
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        blocks = _blocks(codes, outputs)
        if blocks > 1:
            y = _by_blocks(rows, codes, scale, kind, group_size, blocks)
        else:
            y = _product(rows, codes, scale, kind, group_size)
        return y.reshape(*x.shape[:-1], outputs)
    return _product(x, codes, scale, kind, group_size)


# recomputed behind a barrier: merged with the forward's, the decoded weight would live until the backward
@partial(jax.checkpoint, static_argnums=(3, 4))
def _product(x: jax.Array, codes: jax.Array, scale: jax.Array, kind: str, group_size: int) -> jax.Array:
    if scale.ndim == 1:
        return jnp.matmul(x, levels(codes, kind, x.dtype).T) * scale.astype(x.dtype)
    return jnp.matmul(x, decode(codes, scale, kind, group_size, x.dtype).T)


def _by_blocks(x: jax.Array, codes: jax.Array, scale: jax.Array, kind: str, group_size: int, blocks: int) -> jax.Array:
    parts = codes.reshape(blocks, -1, codes.shape[-1])
    scales = jnp.moveaxis(scale.reshape(*scale.shape[:-1], blocks, -1), -2, 0)
    y = jax.lax.map(lambda part: _product(x, *part, kind, group_size), (parts, scales))
    return jnp.moveaxis(y, 0, 1).reshape(x.shape[0], -1)


def _blocks(codes: jax.Array, outputs: int) -> int:
    """In how many equal parts of output channels a weight is decoded; 1 where a device has memory to fuse it in."""
    if select.backend() != "cpu":
        return 1
    least = -(-outputs * codes.shape[-1] // _BLOCK)
    per_byte = outputs // codes.shape[0]
    return next((n for n in range(least, 4 * least) if outputs % (n * per_byte) == 0), 1)


def _spread(scale: jax.Array, inputs: int, group_size: int) -> jax.Array:
    """The scale of each number of a weight, [out, in], or [out, 1] without groups."""
    if scale.ndim == 1:
        return scale[:, None]
    return jnp.repeat(scale.T, group_size, 1, total_repeat_length=scale.shape[0] * group_size)[:, :inputs]
