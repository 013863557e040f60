"""Parts of a Tensor and room around it: slice, crop, pad, windows and views of its memory.

Views are copies as far as a user can see: they never share later writes. XLA removes the copies it can.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor, ShapeLike
from polyreme.core.op import composite, op
from polyreme.errors import ShapeError
from polyreme.ops.bounds import dim_of, dims_of, ints
from polyreme.ops.by_index import read
from polyreme.ops.manipulation import resolve_shape
from polyreme.ops.sharding import keeps_equal_dims, regroups


def slice_index(shape: Sequence[int], axes: Any, starts: Any, ends: Any, strides: Any, what: str) -> tuple[Any, ...]:
    """The index x[...] of a slice along each of axes; bounds past the ends are cut as Python's are."""
    dims = dims_of(axes, len(shape), what)
    limits = [ints(starts), ints(ends), ints(strides) if strides is not None else (1,) * len(dims)]
    if any(len(g) != len(dims) for g in limits):
        raise ShapeError(
            f"{what}: {len(dims)} axes need as many starts, ends and strides, got {[len(g) for g in limits]}"
        )
    if 0 in limits[2]:
        raise ShapeError(f"{what}: strides {list(limits[2])} must not be 0")
    index = [builtins.slice(None)] * len(shape)
    for dim, start, end, stride in zip(dims, *limits, strict=True):
        index[dim] = builtins.slice(start, end, stride)
    return tuple(index)


@op(rule=keeps_equal_dims("moves"))
def slice(input: Array, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Array:
    """input[starts:ends] along each of axes; bounds count from the end if negative, and are cut to the dim."""
    return input[slice_index(input.shape, axes, starts, ends, None, "slice")]


@op(rule=keeps_equal_dims("moves"))
def strided_slice(
    x: Array, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], strides: Sequence[int]
) -> Array:
    """x[starts:ends:strides] along each of axes, by Python's rules; a negative stride walks backward."""
    return x[slice_index(x.shape, axes, starts, ends, strides, "strided_slice")]


@op(rule=keeps_equal_dims("moves"))
def narrow(input: Array, dim: int, start: int, length: int) -> Array:
    """`length` slices of input along dim from start on, which may count from the end."""
    index = dim_of(dim, input.ndim, "narrow")
    size = input.shape[index]
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        raise ShapeError(f"narrow: start={start}, length={length} leaves dim {index} of {list(input.shape)}")
    return jax.lax.slice_in_dim(input, first, first + length, axis=index)


@op(rule=keeps_equal_dims("moves"))
def crop(x: Array, shape: ShapeLike | None = None, offsets: ShapeLike | None = None) -> Array:
    """The block of x of that shape that starts at offsets (0 by default); -1 in shape goes to the end of x."""
    first = (0,) * x.ndim if offsets is None else ints(offsets)
    sizes = x.shape if shape is None else ints(shape)
    if not len(first) == len(sizes) == x.ndim:
        raise ShapeError(
            f"crop: shape {list(sizes)} and offsets {list(first)} need {x.ndim} numbers for {list(x.shape)}"
        )
    last = [n if s == -1 else o + s for n, s, o in zip(x.shape, sizes, first, strict=True)]
    if any(not 0 <= a <= b <= n for a, b, n in zip(first, last, x.shape, strict=True)):
        raise ShapeError(f"crop: shape {list(sizes)} at offsets {list(first)} leaves {list(x.shape)}")
    return x[tuple(builtins.slice(a, b) for a, b in zip(first, last, strict=True))]


_FORMATS = {"NCL": 3, "NLC": 3, "NCHW": 4, "NHWC": 4, "NCDHW": 5, "NDHWC": 5}
_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad_widths(
    x: Array, pad: tuple[int, ...], mode: str, data_format: str | None, from_left: bool
) -> list[tuple[int, int]]:
    """(before, after) of every dim of x."""
    if len(pad) % 2 and mode == "constant" and len(pad) < 2 * x.ndim - 1:
        pad = (*pad, 0)
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ShapeError(f"pad: {len(pad)} numbers for {list(x.shape)}; give a (before, after) pair a dim")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    if mode == "constant" and len(pairs) == x.ndim:
        return pairs if from_left else pairs[::-1]
    if data_format is not None and _FORMATS.get(data_format) != x.ndim:
        raise ShapeError(f"pad: data_format={data_format!r} of {list(x.shape)}; one of {', '.join(_FORMATS)} fits")
    # constants may pad channels too: pairs that are not one for each dim of space begin at the last dim
    by_format = mode != "constant" or len(pairs) == x.ndim - 2
    last = x.ndim - 2 if by_format and data_format is not None and data_format.endswith("C") else x.ndim - 1
    if len(pairs) > last + 1:
        raise ShapeError(
            f"pad: {len(pairs)} pairs, but only {last + 1} dims of {list(x.shape)} come before the channels"
        )
    widths = [(0, 0)] * x.ndim
    for i, pair in enumerate(pairs):
        widths[last - i] = pair
    return widths


@op(method=False, rule=keeps_equal_dims())
def pad(
    x: Array,
    pad: Sequence[int],
    mode: str = "constant",
    value: float = 0.0,
    data_format: str | None = None,
    pad_from_left_axis: bool = True,
) -> Array:
    """x with elements added before and after its dims, or taken away where a number is negative (constant mode only).

    pad: pairs (before, after), the last spatial dim first: [left, right, top, bottom, front, back]; data_format NLC,
    NHWC or NDHWC puts the channels last; in constant mode a number that is missing at the end is 0. One pair for every
    dim of x in constant mode goes from dim 0 on, or from the last dim back with pad_from_left_axis=False. mode is
    constant (value), reflect, replicate or circular.
    Raises ShapeError for a reflection of a whole dim or more, or a circle of more than a dim.
    """
    if mode not in _MODES:
        raise ShapeError(f"pad: mode={mode!r}; choose one of {', '.join(_MODES)}")
    widths = _pad_widths(x, ints(pad), mode, data_format, pad_from_left_axis)
    if mode == "constant":
        return jax.lax.pad(x, jnp.asarray(value, x.dtype), [(a, b, 0) for a, b in widths])
    reach = {"reflect": -1, "circular": 0}.get(mode, math.inf)
    if any(min(w) < 0 or max(w) > n + reach for w, n in zip(widths, x.shape, strict=True) if any(w)):
        raise ShapeError(f"pad: {mode} by {widths} of {list(x.shape)} reaches too far, or is negative")
    return jnp.pad(x, widths, _MODES[mode])


@op(method=False, rule=keeps_equal_dims())
def zeropad2d(x: Array, padding: Sequence[int], data_format: str = "NCHW") -> Array:
    """A 4-D x with zeros around its two spatial dims; padding is [left, right, top, bottom] or one number for all."""
    widths = ints(padding) * 4 if len(ints(padding)) == 1 else ints(padding)
    if len(widths) != 4:
        raise ShapeError(f"zeropad2d: padding {list(widths)} must be [left, right, top, bottom]")
    return pad.op.fn(x, widths, "constant", 0.0, data_format, True)


@op
def unfold(x: Array, axis: int, size: int, step: int) -> Array:
    """Windows of `size` elements along axis, one every `step`: that dim counts them, a new last dim holds each."""
    dim = dim_of(axis, x.ndim, "unfold")
    if step < 1 or not 0 <= size <= x.shape[dim]:
        raise ShapeError(
            f"unfold: size={size}, step={step} on dim {dim} of {list(x.shape)}; the size must fit, step be >= 1"
        )
    starts = jnp.arange((x.shape[dim] - size) // step + 1) * step
    at = (builtins.slice(None),) * dim + (starts[:, None] + jnp.arange(size),)
    windows = read(x, at, mode="promise_in_bounds")
    return jnp.moveaxis(windows, dim + 1, -1)


@op
def as_strided(x: Array, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Array:
    """Element [i, j, ...] is the one at offset + i * stride[0] + j * stride[1] + ... of x's row-major memory.

    stride counts elements, offset bytes. Raises ShapeError if that leaves x's memory. Gradients of one element add.
    """
    sizes, steps = ints(shape), ints(stride)
    first, rest = divmod(offset, x.dtype.itemsize)
    if len(sizes) != len(steps) or rest:
        raise ShapeError(
            f"as_strided: shape {list(sizes)} and stride {list(steps)} need a number each dim, offset={offset} bytes "
            f"a multiple of the {x.dtype.itemsize} bytes of an item"
        )
    reach = [(n - 1) * s for n, s in zip(sizes, steps, strict=True)]
    low, high = first + sum(min(r, 0) for r in reach), first + sum(max(r, 0) for r in reach)
    if 0 not in sizes and not 0 <= low <= high < x.size:
        raise ShapeError(f"as_strided: would read elements {low} to {high} of {list(x.shape)}, which has {x.size}")
    at = jnp.full((), first)
    for n, s in zip(sizes, steps, strict=True):
        at = at[..., None] + jnp.arange(n) * s
    return read(x.reshape(-1), (at,), mode="promise_in_bounds")


@op(rule=regroups)
def view(x: Array, shape_or_dtype: Any) -> Array:
    """x under another shape (one -1 is inferred), or its bytes read as another dtype.

    With a dtype the last dim grows or shrinks as the items do: [3, 4] float32 -> [3, 8] int16. A bool is a byte, True
    where that is not 0. A dtype view has no gradient. Unlike a strided view it does not share later writes.
    """
    if isinstance(shape_or_dtype, int):
        shape_or_dtype = (shape_or_dtype,)
    if isinstance(shape_or_dtype, tuple):
        return jnp.reshape(x, resolve_shape(shape_or_dtype, x.shape, "view"))
    to = dtypes.as_dtype(shape_or_dtype)
    if to == x.dtype:
        return x
    if x.dtype == dtypes.bool_:  # a byte each, 0 or 1
        return view.op.fn(x.astype(dtypes.uint8), to)
    if to == dtypes.bool_:
        return view.op.fn(x, dtypes.uint8) != 0
    if dtypes.is_complex(x.dtype) and x.ndim:  # a complex number lies in memory as its real and its imaginary part
        parts = jnp.stack([x.real, x.imag], -1)
        return view.op.fn(parts.reshape(*x.shape[:-1], 2 * x.shape[-1]), to)
    if dtypes.is_complex(to):
        parts = view.op.fn(x, dtypes.float32 if to == dtypes.complex64 else dtypes.float64)
        if parts.ndim == 0 or parts.shape[-1] % 2:
            raise ShapeError(f"view: the last dim of {list(x.shape)} {x.dtype.name} does not fill items of {to.name}")
        return jax.lax.complex(parts[..., ::2], parts[..., 1::2])
    ratio = to.itemsize // x.dtype.itemsize
    if ratio > 1:
        if x.ndim == 0 or x.shape[-1] % ratio:
            raise ShapeError(
                f"view: the last dim of {list(x.shape)} does not fill items of {to.name}; needs a multiple of {ratio}"
            )
        x = x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio)
    elif to.itemsize < x.dtype.itemsize and x.ndim == 0:
        raise ShapeError(
            f"view: a 0-D {x.dtype.name} has no last dim to hold items of {to.name}; reshape it to [1] first"
        )
    parts = jax.lax.bitcast_convert_type(x, to)
    return parts.reshape(*parts.shape[:-2], -1) if to.itemsize < x.dtype.itemsize else parts


@composite
def view_as(x: AnyTensor, other: AnyTensor, name: str | None = None) -> AnyTensor:
    """x under the shape of other."""
    return view(x, other.shape)
