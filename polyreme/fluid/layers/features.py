"""Layers on features of images, videos, sequences and advertisements."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from polyreme.core import dtype as dtypes
from polyreme.core.rng import fixed_key
from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.nn import functional as F
from polyreme.ops import OPS, resample
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.creation import arange, ones_like, zeros_like
from polyreme.ops.indices.gather import take_along_axis
from polyreme.ops.manipulation import concat, reshape, transpose, unsqueeze
from polyreme.ops.random import rand
from polyreme.ops.scan import cumsum
from polyreme.ops.search import argmax
from polyreme.program.activations import activate
from polyreme.sequences import lod as lods
from polyreme.static import host


@layer
def space_to_depth(x: Any, blocksize: int, name: str | None = None) -> Any:
    """Blocks of pixels as channels: [n, c, h, w] -> [n, c b^2, h / b, w / b] for b = blocksize.

    In 1.7's order, that of the reorg layer of Redmon and Farhadi, 2016, arXiv:1612.08242: channels are taken as b^2
    groups, whose pixels are laid in turn into images b times as large, which are then cut as they lie in memory. Raises
    ShapeError unless b^2 divides c, and b divides h and w.
    """
    c, h, w = x.shape[1:]
    b = blocksize
    if b < 1 or c % b**2 or h % b or w % b:
        raise ShapeError(f"fluid.layers.space_to_depth: blocksize={b} of x {list(x.shape)}; b^2 divides c, b h and w")
    return resample.space_to_depth(x, b)


@layer
def affine_channel(
    x: Any, scale: Any = None, bias: Any = None, data_layout: str = "NCHW", name: str | None = None,
    act: str | None = None,
) -> Any:  # fmt: skip
    """act(scale * x + bias), one number a channel: x [n, c, h, w], or [n, h, w, c] for "NHWC"; scale and bias [c].

    Raises ConfigError without scale or bias, or for another layout.
    """
    if scale is None or bias is None or data_layout not in ("NCHW", "NHWC"):
        raise ConfigError(
            f"fluid.layers.affine_channel: scale={scale!r}, bias={bias!r}, data_layout={data_layout!r}; give Variables "
            "[c], and 'NCHW' or 'NHWC'"
        )
    shape = [1, -1, *[1] * (x.ndim - 2)] if data_layout == "NCHW" else [-1]
    return activate(ar.add(ar.multiply(x, reshape(scale, shape)), reshape(bias, shape)), act)


@layer
def similarity_focus(input: Any, axis: int, indexes: Sequence[int], name: str | None = None) -> Any:
    """1 where a row or column of images is among the most alike, else 0: [n, a, b, c] -> the same shape.

    Each slice at one of indexes along axis (1, 2 or 3) is searched for its largest number, whose row and column are
    crossed out, and so on until rows or columns run out; where these stood, whatever the slice, is 1 along all of axis.
    Raises ConfigError for another axis or an index that is not there.
    """
    if axis not in (1, 2, 3) or not indexes or not all(0 <= i < input.shape[axis] for i in indexes):
        raise ConfigError(
            f"fluid.layers.similarity_focus: axis={axis}, indexes={indexes!r} of shape {list(input.shape)}; axis is 1, "
            "2 or 3, and indexes lie along it"
        )
    order = [0, axis, *(d for d in (1, 2, 3) if d != axis)]
    x = transpose(input, order)
    rows, columns = x.shape[2:]
    masks = [_crossed(x[:, i], rows, columns) for i in indexes]
    mask = masks[0] if len(masks) == 1 else rd.max(concat([unsqueeze(m, 0) for m in masks], 0), 0)
    full = ar.multiply(ones_like(x), unsqueeze(mask, 1))
    return transpose(full, builtins.list(np.argsort(order)))


def _crossed(part: Any, rows: int, columns: int) -> Any:
    """Where the largest number of what is left stands, again and again: [n, rows, columns]."""
    chosen, left = zeros_like(part), part
    for _ in range(min(rows, columns)):
        at = argmax(reshape(left, [-1, rows * columns]), 1)
        row, column = ar.floor_divide(at, columns), ar.remainder(at, columns)
        in_row = unsqueeze(ar.cast(F.one_hot(row, rows), part.dtype), 2)
        in_column = unsqueeze(ar.cast(F.one_hot(column, columns), part.dtype), 1)
        chosen = mt.maximum(chosen, ar.multiply(in_row, in_column))
        # far below whatever is left; of what is crossed out twice no more is taken than of the rest
        left = ar.subtract(left, mt.scale(mt.maximum(in_row, in_column), 1e30))
    return chosen


@layer
def temporal_shift(x: Any, seg_num: int, shift_ratio: float = 0.25, name: str | None = None) -> Any:
    """Channels of video frames moved in time; see nn.functional.temporal_shift. Source: arXiv:1811.08383."""
    return F.temporal_shift(x, seg_num, shift_ratio)


@layer
def fsp_matrix(x: Any, y: Any) -> Any:
    """Mean over pixels of products of channels: [n, a, h, w], [n, b, h, w] -> [n, a, b].

    Source: Yim et al., 2017, A gift from knowledge distillation, equation 1.
    """
    if x.shape[2:] != y.shape[2:]:
        raise ShapeError(f"fluid.layers.fsp_matrix: x {list(x.shape)}, y {list(y.shape)}; images have one size")
    a, b = (reshape(v, [0, v.shape[1], -1]) for v in (x, y))
    pixels = x.shape[2] * x.shape[3]
    return mt.scale(ar.matmul(a, transpose(b, [0, 2, 1])), 1.0 / pixels)


@layer
def random_crop(x: Any, shape: Sequence[int], seed: Any = None) -> Any:
    """A part of this shape, of the last dims, from a place of its own for each index of the dims before those.

    With a seed the same places in each run. Raises ShapeError where the part does not fit.
    """
    sizes, first = builtins.list(shape), x.ndim - len(shape)
    if first < 0 or any(have < want for have, want in zip(x.shape[first:], sizes, strict=True)):
        raise ShapeError(f"fluid.layers.random_crop: shape {sizes} of x {list(x.shape)}; known, larger sizes")
    part = reshape(x, [-1, *x.shape[first:]])
    for dim, (have, want) in enumerate(zip(x.shape[first:], sizes, strict=True), 1):
        start = mt.floor(
            mt.scale(rand([part.shape[0]], "float32", **fixed_key(seed and seed + dim)), float(have - want + 1))
        )
        index = ar.add(reshape(ar.cast(start, "int64"), [-1, 1]), arange(0, want, 1, "int64"))
        around = [1] * (part.ndim - 1)
        around[dim - 1] = want
        part = take_along_axis(part, reshape(index, [-1, *around]), dim)
    return reshape(part, [*x.shape[:first], *sizes])


@layer
def add_position_encoding(input: Any, alpha: float, beta: float, name: str | None = None) -> Any:
    """alpha * input + beta * (sine, then cosine of the position): [n, steps, d], or rows [rows, d] of sequences.

    Half of the d numbers are sin(position / 10000^(k / (d / 2 - 1))), the others cos of the same. Source: Vaswani et
    al., 2017, arXiv:1706.03762, section 3.5. Raises ShapeError for an odd d.
    """
    width = input.shape[-1]
    if width < 2 or width % 2:
        raise ShapeError(f"fluid.layers.add_position_encoding: input {list(input.shape)}; its last dim is even")
    half = width // 2
    rates = 10000.0 ** -(np.arange(half) / (half - 1)) if half > 1 else np.array([1e-4])
    lod = lods.lod_of(input)
    if lod:
        rows = mt.scale(cumsum(ones_like(input[:, :1]), 0), 1.0, -1.0)
        starts = OPS["sequence_expand_as"](lod[-1][:-1], lods.inner(lod), lods.rows(input))
        position = ar.subtract(rows, ar.cast(reshape(starts, [-1, 1]), input.dtype))
    else:
        position = mt.scale(cumsum(ones_like(input[:1, :, :1]), 1), 1.0, -1.0)
    angle = ar.multiply(position, OPS["cast"](rates.astype("float32"), input.dtype))
    wave = concat([mt.sin(angle), mt.cos(angle)], -1)
    made = ar.add(mt.scale(input, float(alpha)), mt.scale(wave, float(beta)))
    return lods.divided(made, lod) if lod else made


@layer
def continuous_value_model(input: Any, cvm: Any, use_cvm: bool = True) -> Any:
    """Features whose first two columns are shows and clicks: [n, d] -> [n, d] with log(shows + 1) and log(clicks + 1) -
    log(shows + 1) in them, or without use_cvm [n, d - 2].

    cvm [n, 2] is what 1.7's parameter servers take for the gradient of those two columns; here none flows to them.
    """
    if cvm.ndim != 2 or cvm.shape[1] != 2:
        raise ShapeError(f"fluid.layers.continuous_value_model: cvm {list(cvm.shape)}; needs [n, 2]")
    rest = input[:, 2:]
    if not use_cvm:
        return rest
    counts = input[:, :2].detach()
    shows = mt.log1p(counts[:, :1])
    return concat([shows, ar.subtract(mt.log1p(counts[:, 1:]), shows), rest], 1)


@layer
def hash(input: Any, hash_size: int, num_hash: int = 1, name: str | None = None) -> Any:
    """XXH64 of each row of integers with seeds 0 to num_hash - 1, modulo hash_size: [n, k] -> [n, num_hash, 1].

    Computed on the host.
    """
    if hash_size < 1 or num_hash < 1 or not dtypes.is_integer(input.dtype):
        raise ConfigError(f"fluid.layers.hash: hash_size={hash_size}, num_hash={num_hash} of {input.dtype.name} rows")

    def digests(rows: np.ndarray) -> np.ndarray:
        found = [
            [xxhash.xxh64_intdigest(np.ascontiguousarray(row).tobytes(), seed) % hash_size for seed in range(num_hash)]
            for row in rows
        ]
        return np.asarray(found, rows.dtype).reshape(len(rows), num_hash, 1)

    sizes = [input._array.shape[0], num_hash, 1]
    (made,) = host.called(digests, None, [], [(sizes, input.dtype.name)], [input])
    return lods.divided(made, lods.lod_of(input))


__all__ = [
    "add_position_encoding", "affine_channel", "continuous_value_model", "fsp_matrix", "hash", "random_crop",
    "similarity_focus", "space_to_depth", "temporal_shift",
]  # fmt: skip
