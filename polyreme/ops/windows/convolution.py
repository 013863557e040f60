"""Convolutions, transposed convolutions, and windows laid out as columns.

Weights are [out, in / groups, *kernel] ([in, out / groups, *kernel] transposed) in every data format.
padding: an int, one int or one (before, after) pair a spatial dim, "SAME" or "VALID".
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyreme.core.annotations import Padding, Sizes
from polyreme.core.dtype import promote_floating
from polyreme.core.op import op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ShapeError
from polyreme.kernels import select
from polyreme.ops.sharding import by_batch
from polyreme.ops.windows.depthwise import Windows, depthwise
from polyreme.ops.windows.geometry import (
    Pads,
    check_sizes,
    entries,
    is_channels_last,
    is_negative,
    per_dim,
    resolve_pads,
    spatial,
)

_MOST_TAPS = 49  # of a depthwise window that is summed entry by entry
_MOST_ROWS = 9  # input channels times window of a convolution that is taken as one product
_LETTERS = {1: "W", 2: "HW", 3: "DHW"}


def _numbers(n: int, last: bool) -> Any:
    s = _LETTERS[n]
    layout = f"N{s}C" if last else f"NC{s}"
    return (layout, f"OI{s}", layout)


def _with_bias(y: Array, bias: Array | None, last: bool, what: str) -> Array:
    if bias is None:
        return y
    channels = y.shape[-1 if last else 1]
    if bias.size not in (1, channels):
        raise ShapeError(f"{what}: bias {list(bias.shape)}; needs [{channels}], one an output channel, or [1]")
    return y + bias.astype(y.dtype).reshape([-1] + [1] * (0 if last else y.ndim - 2))


def _check_weight(x: Array, weight: Array, n: int, last: bool, what: str) -> int:
    """Number of channels of x."""
    spatial(x.shape, n, last, what)
    if weight.ndim != n + 2:
        raise ShapeError(f"{what}: weight {list(weight.shape)} has {weight.ndim} dims, needs {n + 2}")
    return x.shape[-1 if last else 1]


def _with_open_pads(x: Array, pads: Pads, last: bool) -> tuple[Array, Pads]:
    """x with zeros around it where "SAME" pads by an open size, which a convolution does not take, and pads left."""
    if all(isinstance(p, int) for pair in pads for p in pair):
        return x, pads
    whole = [(0, 0), *pads, (0, 0)] if last else [(0, 0), (0, 0), *pads]
    return jnp.pad(x, whole), [(0, 0)] * len(pads)


def _conv(
    n: int, x: Array, weight: Array, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, data_format: str
) -> Array:
    what = f"conv{n}d"
    last = is_channels_last(data_format, n, what)
    x, weight = promote_floating(x, weight)
    channels = _check_weight(x, weight, n, last, what)
    if groups < 1 or channels != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ShapeError(
            f"{what}: x {list(x.shape)} has {channels} channels, weight {list(weight.shape)} with groups={groups} "
            f"needs {weight.shape[1] * groups}, and groups must divide the {weight.shape[0]} output channels"
        )
    stride, dilation = per_dim(stride, n, f"{what}: stride"), per_dim(dilation, n, f"{what}: dilation")
    kernel, sizes = weight.shape[2:], spatial(x.shape, n, last, what)
    pads = resolve_pads(padding, sizes, kernel, stride, dilation, last, what)
    _check_window(sizes, kernel, dilation, pads, what)
    x, pads = _with_open_pads(x, pads, last)
    is_depthwise = 1 < groups == channels == weight.shape[0] and math.prod(kernel) <= _MOST_TAPS
    if is_depthwise and select.backend() == "cpu":
        windows = Windows(spatial(x.shape, n, last, what), kernel, stride, tuple(map(tuple, pads)), dilation, last)
        return _with_bias(depthwise(windows, x, weight), bias, last, what)
    if groups == 1 and x.dtype in (jnp.float32, jnp.float64) and select.backend() == "cpu":
        if not last and _is_pointwise(weight, stride, pads) and all(isinstance(size, int) for size in x.shape[2:]):
            return _with_bias(_by_places(x, weight), bias, last, what)
        if _is_narrow(weight):
            return _with_bias(_by_columns(x, weight, stride, pads, dilation, last), bias, last, what)
    y = lax.conv_general_dilated(
        x, weight, stride, pads, rhs_dilation=dilation, dimension_numbers=_numbers(n, last), feature_group_count=groups
    )
    return _with_bias(y, bias, last, what)


def _is_opaque(
    x: Array, weight: Array, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, data_format: str
) -> bool:
    """Whether XLA computes such a convolution and its gradients as convolutions: not as loops that its fusion makes.

    Where a window has one entry, or there is one window, it makes a product of one of them, and, without fusion, loses
    how that product's arguments are laid out: the numbers would be wrong. So some dim has windows of several entries,
    and several of them whatever the padding.
    """
    if groups != 1 or _is_narrow(weight) or x.dtype not in (jnp.float32, jnp.float64):
        return False
    sizes = x.shape[1:-1] if str(data_format).endswith("C") else x.shape[2:]
    # what else stands there is refused when it is computed
    largest_step = max((v for v in jax.tree.leaves((stride, dilation)) if isinstance(v, int)), default=1)
    return any(k > 1 and size > k * largest_step for k, size in zip(weight.shape[2:], sizes, strict=False))


def _is_narrow(weight: Array) -> bool:
    return math.prod(weight.shape[1:]) <= _MOST_ROWS


def _is_pointwise(weight: Array, stride: tuple, pads: Pads) -> bool:
    """Whether each entry of x is a window."""
    return math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and all(pair == (0, 0) for pair in map(tuple, pads))


def _by_places(x: Array, weight: Array) -> Array:
    """A pointwise convolution of channels first as products of [O, C] by [C, places].

    One for each image, where the weights once for each image are no more numbers than the images and the result: then
    nothing changes its layout. Else one for all. XLA's convolution on processors has the channels last, three copies
    beside it, and takes 1.1 to 8 times as long (benchmarks/pointwise_convolution.py).
    """
    matrix, (images, channels, *sizes) = weight.reshape(weight.shape[:2]), x.shape
    outs, places = matrix.shape[0], math.prod(sizes)
    flat = x.reshape(images, channels, places)
    if places == 1:
        y = flat[:, :, 0] @ matrix.T
    elif matrix.size <= (outs + channels) * places:
        y = jnp.broadcast_to(matrix, (images, *matrix.shape)) @ flat
    else:
        y = jnp.einsum("oc,ncp->nop", matrix, flat)
    return y.reshape(images, outs, *sizes)


def _by_columns(x: Array, weight: Array, stride: tuple, pads: Pads, dilation: tuple, last: bool) -> Array:
    """A convolution of few channels as one product: [O, C K] by the columns, [C K, N prod(o)].

    For 3 x 3 of one channel XLA's convolution on processors takes 2 to 6 times as long; for larger windows or more
    channels it is the faster one again in the gradient of the weight.
    """
    v = jnp.moveaxis(x, -1 if last else 1, 0)
    columns = jnp.stack([e for _, e in entries(v, weight.shape[2:], stride, pads, dilation, 2)], 1)
    y = weight.reshape(weight.shape[0], -1) @ columns.reshape(weight[0].size, -1)
    return jnp.moveaxis(y.reshape(weight.shape[0], *columns.shape[2:]), 0, -1 if last else 1)


def _check_window(sizes: tuple, kernel: tuple, dilation: tuple, pads: Pads, what: str) -> None:
    for size, k, d, pair in zip(sizes, kernel, dilation, pads, strict=True):
        if is_negative(size + sum(pair) - d * (k - 1) - 1):
            raise ShapeError(
                f"{what}: a window of {d * (k - 1) + 1} does not fit in size {size} padded by {pair}; pad more"
            )


def _conv_rule(call: OpCall) -> ShardingRule:
    """Batch and output channels go through, a sum over split input channels is joined at once; places are whole."""
    last = not str(call.attrs["data_format"]).startswith("NC")
    places = (None,) * (len(call.shapes[0]) - 2)
    channels, filters = ("c", "o") if call.attrs["groups"] == 1 else (None, None)
    x = ("b", *places, channels) if last else ("b", channels, *places)
    out = ("b", *places, filters) if last else ("b", filters, *places)
    inputs = call.inputs(x=x, weight=(filters, channels, *places), bias=(filters,))
    return ShardingRule(inputs, (out,), laid_out=True)


def _transposed_conv_rule(call: OpCall) -> ShardingRule:
    """The batch goes through."""
    return dataclasses.replace(by_batch(call), laid_out=True)


@op(amp="low", method=False, rule=_conv_rule, opaque=_is_opaque)
def conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    data_format: str = "NCL",
) -> Array:
    """Cross-correlation over one dim: [N, C, L], [O, C / groups, k] -> [N, O, L'].

    L' = (L + pads - dilation * (k - 1) - 1) // stride + 1. Raises ShapeError when channels, groups or sizes do not fit.
    """
    return _conv(1, x, weight, bias, stride, padding, dilation, groups, data_format)


@op(amp="low", method=False, rule=_conv_rule, opaque=_is_opaque)
def conv2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    data_format: str = "NCHW",
) -> Array:
    """Cross-correlation over two dims: [N, C, H, W], [O, C / groups, kh, kw] -> [N, O, H', W'].

    "SAME" keeps ceil(size / stride), dilation included. Raises ShapeError when channels, groups or sizes do not fit.
    """
    return _conv(2, x, weight, bias, stride, padding, dilation, groups, data_format)


@op(amp="low", method=False, rule=_conv_rule, opaque=_is_opaque)
def conv3d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    data_format: str = "NCDHW",
) -> Array:
    """Cross-correlation over three dims: [N, C, D, H, W], [O, C / groups, kd, kh, kw] -> [N, O, D', H', W'].

    Raises ShapeError when channels, groups or sizes do not fit.
    """
    return _conv(3, x, weight, bias, stride, padding, dilation, groups, data_format)


def _extra(output_padding: Any, output_size: Any, natural: tuple, stride: tuple, dilation: tuple, what: str) -> tuple:
    """Rows added after each dim of a transposed convolution's result."""
    n = len(natural)
    extra = per_dim(output_padding, n, f"{what}: output_padding", low=0)
    if output_size is not None:
        if any(extra):
            raise ShapeError(
                f"{what}: output_padding={output_padding!r} and output_size={output_size!r}; give one of them"
            )
        wanted = per_dim(output_size, n, f"{what}: output_size")
        extra = tuple(w - have for w, have in zip(wanted, natural, strict=True))
    for e, s, d in zip(extra, stride, dilation, strict=True):
        if not 0 <= e < max(s, d):
            raise ShapeError(
                f"{what}: output_padding={output_padding!r}, output_size={output_size!r} adds {list(extra)} to the "
                f"sizes {list(natural)}; needs at least 0 and less than the larger of stride {stride} and "
                f"dilation {dilation}"
            )
    return extra


def _grouped_kernel(weight: Array, groups: int) -> Array:
    """[in, out / groups, *k] -> [out, in / groups, *k], flipped."""
    ins, outs, *kernel = weight.shape
    split = jnp.swapaxes(weight.reshape(groups, ins // groups, outs, *kernel), 1, 2)
    return jnp.flip(split.reshape(groups * outs, ins // groups, *kernel), range(2, 2 + len(kernel)))


def _conv_transpose(
    n: int,
    x: Array,
    weight: Array,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
    output_size: Any,
    data_format: str,
) -> Array:
    what = f"conv{n}d_transpose"
    last = is_channels_last(data_format, n, what)
    x, weight = promote_floating(x, weight)
    channels = _check_weight(x, weight, n, last, what)
    if groups < 1 or channels != weight.shape[0] or channels % groups:
        raise ShapeError(
            f"{what}: x {list(x.shape)} has {channels} channels, weight {list(weight.shape)} takes {weight.shape[0]}, "
            f"and groups={groups} must divide them"
        )
    stride, dilation = per_dim(stride, n, f"{what}: stride"), per_dim(dilation, n, f"{what}: dilation")
    kernel, sizes = weight.shape[2:], spatial(x.shape, n, last, what)
    pads = resolve_pads(padding, sizes, kernel, stride, dilation, last, what)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    natural = tuple((z - 1) * s + r + 1 - sum(p) for z, s, r, p in zip(sizes, stride, reach, pads, strict=True))
    if any(is_negative(size - 1) for size in natural):
        raise ShapeError(f"{what}: padding={padding!r} leaves sizes {list(natural)}; pad less")
    check_sizes(natural, f"{what}: the result")
    extra = _extra(output_padding, output_size, natural, stride, dilation, what)
    # "SAME" of an open size cuts by a number that a convolution does not take: what it would cut is cut afterwards
    cuts = pads if not all(isinstance(p, int) for pair in pads for p in pair) else None
    pads = [(0, 0)] * n if cuts else pads
    y = lax.conv_general_dilated(
        x,
        _grouped_kernel(weight, groups),
        (1,) * n,
        [(r - p[0], r - p[1] + e) for r, p, e in zip(reach, pads, extra, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_numbers(n, last),
        feature_group_count=groups,
    )
    for dim, (before, size, e) in enumerate(zip([p[0] for p in cuts or ()], natural, extra, strict=False)):
        y = lax.dynamic_slice_in_dim(y, before, size + e, dim + (1 if last else 2))
    return _with_bias(y, bias, last, what)


@op(amp="low", method=False, rule=_transposed_conv_rule)
def conv1d_transpose(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    output_size: Sizes | None = None,
    data_format: str = "NCL",
) -> Array:
    """The transpose of conv1d's map: [N, C, L], [C, O / groups, k] -> [N, O, L'].

    L' = (L - 1) * stride - pads + dilation * (k - 1) + 1. output_padding adds that many entries at the end;
    output_size states the size instead. Raises ShapeError when they are out of reach (0 to stride - 1 more), or
    when channels and groups do not fit.
    """
    return _conv_transpose(
        1, x, weight, bias, stride, padding, output_padding, groups, dilation, output_size, data_format
    )


@op(amp="low", method=False, rule=_transposed_conv_rule)
def conv2d_transpose(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    output_size: Sizes | None = None,
    data_format: str = "NCHW",
) -> Array:
    """The transpose of conv2d's map, [N, C, H, W], [C, O / groups, kh, kw] -> [N, O, H', W'].

    Sizes and errors as for conv1d_transpose.
    """
    return _conv_transpose(
        2, x, weight, bias, stride, padding, output_padding, groups, dilation, output_size, data_format
    )


@op(amp="low", method=False, rule=_transposed_conv_rule)
def conv3d_transpose(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    output_size: Sizes | None = None,
    data_format: str = "NCDHW",
) -> Array:
    """The transpose of conv3d's map, [N, C, D, H, W], [C, O / groups, kd, kh, kw] -> [N, O, D', H', W'].

    Sizes and errors as for conv1d_transpose.
    """
    return _conv_transpose(
        3, x, weight, bias, stride, padding, output_padding, groups, dilation, output_size, data_format
    )


def _corner_pads(paddings: Any, what: str) -> Pads:
    """An int, (vertical, horizontal) or (top, left, bottom, right)."""
    if not isinstance(paddings, int) and len(paddings) == 4:
        top, left, bottom, right = per_dim(paddings, 4, f"{what}: paddings", low=0)
        return [(top, bottom), (left, right)]
    return [(p, p) for p in per_dim(paddings, 2, f"{what}: paddings", low=0)]


def _columns(x: Array, kernel: tuple, stride: tuple, pads: Pads, dilation: tuple, what: str) -> Array:
    _check_window(x.shape[2:], kernel, dilation, pads, what)
    check_sizes([z + sum(p) for z, p in zip(x.shape[2:], pads, strict=True)], f"{what}: padded by {pads}, the image")
    x = jnp.pad(x, [(0, 0), (0, 0), *pads])
    counts = [(z - d * (k - 1) - 1) // s + 1 for z, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    parts = []
    for at in itertools.product(*map(range, kernel)):
        start = [a * d for a, d in zip(at, dilation, strict=True)]
        stop = [b + (c - 1) * s + 1 for b, c, s in zip(start, counts, stride, strict=True)]
        parts.append(x[(..., *map(slice, start, stop, stride))])
    return jnp.stack(parts, 2).reshape(x.shape[0], x.shape[1] * len(parts), math.prod(counts))


@op(method=False)
def image_to_columns(
    x: Array, kernel_sizes: Sizes, strides: Sizes = 1, paddings: Padding = 0, dilations: Sizes = 1
) -> Array:
    """Every window of an image as a column: [N, C, H, W] -> [N, C * kh * kw, windows]; public as nn.functional.unfold.

    paddings: an int, [vertical, horizontal] or [top, left, bottom, right]. Raises ShapeError when no window fits.
    """
    spatial(x.shape, 2, False, "unfold")
    kernel, stride, dilation = _window_of(kernel_sizes, strides, dilations, "unfold")
    return _columns(x, kernel, stride, _corner_pads(paddings, "unfold"), dilation, "unfold")


@op(method=False)
def fold(
    x: Array, output_sizes: Sizes, kernel_sizes: Sizes, strides: Sizes = 1, paddings: Padding = 0, dilations: Sizes = 1
) -> Array:
    """Columns summed back into an image, [N, C * kh * kw, windows] -> [N, C, H, W]: the transpose of unfold.

    Raises ShapeError when x does not hold the windows of an image of output_sizes.
    """
    kernel, stride, dilation = _window_of(kernel_sizes, strides, dilations, "fold")
    sizes, pads = per_dim(output_sizes, 2, "fold: output_sizes"), _corner_pads(paddings, "fold")
    area = kernel[0] * kernel[1]
    if x.ndim != 3 or x.shape[1] % area:
        raise ShapeError(
            f"fold: x {list(x.shape)} needs 3 dims, the second a multiple of the {area} entries of a window"
        )
    image = jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // area, *sizes), x.dtype)
    spread = lambda v: _columns(v, kernel, stride, pads, dilation, "fold")
    windows = jax.eval_shape(spread, image).shape
    if windows != x.shape:
        raise ShapeError(f"fold: x {list(x.shape)} for an image of {list(sizes)}; needs {list(windows)}")
    return jax.linear_transpose(spread, image)(x)[0]


def _window_of(kernel_sizes: Any, strides: Any, dilations: Any, what: str) -> tuple[tuple, tuple, tuple]:
    return (
        per_dim(kernel_sizes, 2, f"{what}: kernel_sizes"),
        per_dim(strides, 2, f"{what}: strides"),
        per_dim(dilations, 2, f"{what}: dilations"),
    )


ALIASES: dict[str, str] = {}
# names in nn.functional only: Tensor.unfold is another function
FUNCTIONAL_ALIASES = {"unfold": "image_to_columns"}
