"""Pooling over regions of images, and deformable convolution.

Regions are rows (x1, y1, x2, y2) of a Variable with sequences: sequence i holds those of image i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.detection import regions as rg
from polyreme.ops.indices.gather import gather, where
from polyreme.ops.manipulation import concat, reshape, stack
from polyreme.ops.matrices.products import einsum
from polyreme.ops.windows import deformable
from polyreme.program.parameters import LayerParameters
from polyreme.sequences import lod as lods
from polyreme.static.nn.checks import channels


def _by_image(what: str, rois: Any) -> tuple[Any, Any]:
    """(regions, how many belong to each image)."""
    x, lod = lods.sequences(f"fluid.layers.{what}", rois)
    return x, lods.inner(lod)


@layer
def roi_pool(input: Any, rois: Any, pooled_height: int = 1, pooled_width: int = 1, spatial_scale: float = 1.0) -> Any:
    """Maxima over a grid of bins in each region: [n, c, h, w], [rows, 4] -> [rows, c, pooled_height, pooled_width]."""
    boxes, counts = _by_image("roi_pool", rois)
    return rg.roi_pool(input, boxes, counts, (pooled_height, pooled_width), spatial_scale)


@layer
def roi_align(
    input: Any, rois: Any, pooled_height: int = 1, pooled_width: int = 1, spatial_scale: float = 1.0,
    sampling_ratio: int = -1, name: str | None = None,
) -> Any:  # fmt: skip
    """Means of bilinear samples over a grid of bins in each region, whose pixel centres are at whole numbers.

    See vision.ops.roi_align with aligned=False.
    """
    boxes, counts = _by_image("roi_align", rois)
    size = (pooled_height, pooled_width)
    return rg.roi_align(input, boxes, counts, size, spatial_scale, sampling_ratio, aligned=False)


@layer
def psroi_pool(
    input: Any, rois: Any, output_channels: int, spatial_scale: float, pooled_height: int, pooled_width: int,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Position-sensitive means over a grid of bins in each region: input [n, output_channels * bins, h, w].

    Raises ShapeError where the channels are not output_channels * pooled_height * pooled_width.
    """
    boxes, counts = _by_image("psroi_pool", rois)
    _position_sensitive("psroi_pool", input, output_channels, (pooled_height, pooled_width))
    return rg.psroi_pool(input, boxes, counts, (pooled_height, pooled_width), spatial_scale)


def _position_sensitive(what: str, x: Any, outputs: int, grid: Sequence[int]) -> None:
    if x.shape[1] != outputs * grid[0] * grid[1]:
        raise ShapeError(
            f"fluid.layers.{what}: {x.shape[1]} channels of input {list(x.shape)}; needs {outputs} output channels for "
            f"each of {grid[0]} x {grid[1]} bins"
        )


def _images_of_rows(x: Any, counts: Any, rows: Any) -> Any:
    """The image of each region, [rows, c, h, w]."""
    index = mt.scale(OPS["cumsum"](OPS["ones_like"](counts), 0), 1, -1)
    return gather(x, OPS["sequence_expand_as"](index, counts, rows))


@layer
def prroi_pool(
    input: Any, rois: Any, spatial_scale: float = 1.0, pooled_height: int = 1, pooled_width: int = 1,
    batch_roi_nums: Any = None, name: str | None = None,
) -> Any:  # fmt: skip
    """The exact mean of the bilinear interpolation over each bin of each region, which is 0 outside of the image.

    batch_roi_nums [n]: how many regions belong to each image, in place of sequences. Gradients flow to the regions too.
    Source: Jiang et al., 2018, arXiv:1807.11590, section 3.3.
    """
    if batch_roi_nums is None:
        boxes, counts = _by_image("prroi_pool", rois)
    else:
        boxes, counts = rois, batch_roi_nums
    images = _images_of_rows(input, counts, lods.rows(boxes))
    corners = mt.scale(boxes, spatial_scale)
    rows, high = _hat_integrals(corners[:, 1], corners[:, 3], pooled_height, input.shape[2])
    columns, wide = _hat_integrals(corners[:, 0], corners[:, 2], pooled_width, input.shape[3])
    total = einsum("rchw,rih,rjw->rcij", images, rows, columns)
    area = reshape(ar.multiply(high, wide), [-1, 1, 1, 1])
    empty = ar.less_equal(area, 0.0)
    return where(empty, mt.scale(total, 0.0), ar.divide(total, where(empty, mt.scale(area, 0.0, 1.0), area)))


def _hat_integrals(low: Any, high: Any, bins: int, size: int) -> tuple[Any, Any]:
    """(integral over each bin of each pixel's share in a linear interpolation [rows, bins, size], a bin's length)."""
    length = mt.scale(mt.maximum(ar.subtract(high, low), 0.0), 1.0 / bins)
    edges = ar.add(reshape(low, [-1, 1]), ar.multiply(reshape(length, [-1, 1]), np.arange(bins + 1, dtype="float32")))
    u = mt.clip(ar.subtract(reshape(edges, [-1, bins + 1, 1]), np.arange(size, dtype="float32")), -1.0, 1.0)
    # the integral of max(0, 1 - |t|) from -1 to u
    upto = ar.subtract(mt.scale(u, 1.0, 0.5), mt.scale(ar.multiply(u, mt.abs(u)), 0.5))
    return ar.subtract(upto[:, 1:], upto[:, :-1]), length


@layer
def deformable_conv(
    input: Any, offset: Any, mask: Any, num_filters: int, filter_size: Any, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int | None = None, deformable_groups: int | None = None, im2col_step: int | None = None,
    param_attr: Any = None, bias_attr: Any = None, modulated: bool = True, name: str | None = None,
) -> Any:  # fmt: skip
    """Convolution at places moved by offset, with modulated multiplied by mask: [n, c, h, w] -> [n, f, h', w'].

    See vision.ops.deform_conv2d. im2col_step: how many images go together is the compiler's choice. Raises ConfigError
    where mask and modulated do not go together, or groups divide no channels.
    """
    if modulated is not (mask is not None):
        raise ConfigError(f"fluid.layers.deformable_conv: modulated={modulated} with mask={mask!r}; mask belongs to it")
    parts = LayerParameters("deformable_conv", name)
    have, groups = channels("fluid.layers.deformable_conv", input, "NCHW", [4]), groups or 1
    if have % groups or num_filters % groups:
        raise ConfigError(f"fluid.layers.deformable_conv: {have} channels, {num_filters} filters in {groups} groups")
    sizes = list(filter_size) if isinstance(filter_size, (list, tuple)) else [filter_size] * 2
    spread = (2.0 / (sizes[0] * sizes[1] * have)) ** 0.5
    weight = parts.parameter(param_attr, [num_filters, have // groups, *sizes], input.dtype, Normal(0.0, spread))
    bias = parts.bias(bias_attr, [num_filters], input.dtype)
    return deformable.deform_conv2d(
        input, offset, weight, bias, stride, padding, dilation, deformable_groups or 1, groups, mask
    )


@layer
def deformable_roi_pooling(
    input: Any, rois: Any, trans: Any, no_trans: bool = False, spatial_scale: float = 1.0, group_size: Any = (1, 1),
    pooled_height: int = 1, pooled_width: int = 1, part_size: Any = None, sample_per_part: int = 1,
    trans_std: float = 0.1, position_sensitive: bool = False, name: str | None = None,
) -> Any:  # fmt: skip
    """Means of bilinear samples over bins that are moved by trans: -> [rows, channels, pooled_height, pooled_width].

    input [n, c, h, w], rois [rows, 4] with sequences, in whole pixels, both ends inside. trans [rows, 2 * classes, ph,
    pw]: moves (right, down) of the part_size parts of a region, times trans_std and its height and width; no_trans
    leaves them out. sample_per_part: samples a bin and dim. With position_sensitive c holds an output channel for each
    of group_size's parts. Source: Dai et al., 2017, arXiv:1703.06211, sections 2.2 and 2.3. Raises ConfigError for
    sizes that do not fit.
    """
    grid = (pooled_height, pooled_width)
    group = list(group_size) if isinstance(group_size, (list, tuple)) else [group_size] * 2
    part = grid if part_size is None else part_size if isinstance(part_size, (list, tuple)) else [part_size] * 2
    if sample_per_part < 1 or (not position_sensitive and list(group) != [1, 1]):
        raise ConfigError(
            f"fluid.layers.deformable_roi_pooling: sample_per_part={sample_per_part}, group_size={group}, "
            f"position_sensitive={position_sensitive}; groups belong to position_sensitive, and a bin has a sample"
        )
    boxes, counts = _by_image("deformable_roi_pooling", rois)
    outputs = input.shape[1] // (group[0] * group[1]) if position_sensitive else input.shape[1]
    if position_sensitive:
        _position_sensitive("deformable_roi_pooling", input, outputs, group)
    images = _images_of_rows(input, counts, lods.rows(boxes))
    classes = 1 if no_trans else trans.shape[1] // 2
    if outputs % classes:
        raise ConfigError(f"fluid.layers.deformable_roi_pooling: {outputs} channels for {classes} classes of trans")
    points = [_samples(boxes, axis, grid[1 - axis], spatial_scale, sample_per_part) for axis in (1, 0)]
    whole = reshape(images, [0, classes, -1, *images.shape[2:]])
    found = []
    for c in range(classes):
        moves = None if no_trans else mt.scale(trans[:, 2 * c : 2 * c + 2], trans_std)
        found.append(_deformed(whole[:, c], points, moves, grid, part, sample_per_part))
    pooled = concat(found, 1)
    return _own_parts(pooled, outputs, grid, group) if position_sensitive else pooled


def _samples(boxes: Any, axis: int, bins: int, scale: float, samples: int) -> tuple[Any, Any]:
    """(places of each bin's samples along x (0) or y (1) [rows, bins, samples], a region's length [rows, 1, 1])."""
    # halves go away from zero, as C's round has them
    start, end = (
        ar.multiply(mt.sign(v), mt.floor(mt.scale(mt.abs(v), 1.0, 0.5))) for v in (boxes[:, axis], boxes[:, axis + 2])
    )
    start, end = mt.scale(start, scale, -0.5), mt.scale(mt.scale(end, 1.0, 1.0), scale, -0.5)
    length = mt.maximum(ar.subtract(end, start), 0.1)
    step = np.arange(bins)[:, None] / bins + np.arange(samples) / (bins * samples)
    start, length = (reshape(v, [-1, 1, 1]) for v in (start, length))
    return ar.add(start, ar.multiply(length, step.astype("float32"))), length


def _deformed(x: Any, points: Sequence[Any], moves: Any, grid: Sequence[int], part: Any, samples: int) -> Any:
    """Means over bins of x [rows, c, h, w] -> [rows, c, *grid]."""
    (y, high), (x_, wide) = points
    y, x_ = (reshape(y, [0, grid[0], 1, samples, 1]), reshape(x_, [0, 1, grid[1], 1, samples]))
    if moves is not None:
        rows, columns = (np.arange(n) * p // n for n, p in zip(grid, part, strict=True))
        mine = gather(gather(moves, rows, axis=2), columns, axis=3)
        right, down = (reshape(mine[:, i], [0, *grid, 1, 1]) for i in (0, 1))
        y = ar.add(y, ar.multiply(down, reshape(high, [0, 1, 1, 1, 1])))
        x_ = ar.add(x_, ar.multiply(right, reshape(wide, [0, 1, 1, 1, 1])))
    h, w = x.shape[2:]
    y, x_ = ar.add(y, mt.scale(x_, 0.0)), ar.add(x_, mt.scale(y, 0.0))
    inside = ar.logical_and(
        ar.logical_and(ar.greater_equal(y, -0.5), ar.less_equal(y, h - 0.5)),
        ar.logical_and(ar.greater_equal(x_, -0.5), ar.less_equal(x_, w - 0.5)),
    )
    count = ar.cast(inside, x.dtype)
    flat = [[0, grid[0] * samples, grid[1] * samples]] * 2
    ordered = [OPS["transpose"](v, [0, 1, 3, 2, 4]) for v in (y, x_, count)]
    sampled = _sampled(x, *(reshape(v, s) for v, s in zip(ordered[:2], flat, strict=True)))
    weighted = ar.multiply(sampled, reshape(ordered[2], [0, 1, *flat[0][1:]]))
    total = reshape(weighted, [0, -1, grid[0], samples, grid[1], samples]).sum([3, 5])
    number = reshape(count, [0, 1, *grid, samples, samples]).sum([4, 5])
    return ar.divide(total, mt.maximum(number, 1.0))


def _sampled(x: Any, y: Any, at: Any) -> Any:
    """Bilinear samples of x [rows, c, h, w] at rows y and columns at [rows, a, b], the edge's outside of it."""
    h, w = x.shape[2:]
    scaled = [mt.scale(v, 2.0 / max(n - 1, 1), -1.0) for v, n in ((at, w), (y, h))]
    return F.grid_sample(x, stack(scaled, -1), padding_mode="border", align_corners=True)


def _own_parts(x: Any, outputs: int, grid: Sequence[int], group: Sequence[int]) -> Any:
    """Of channels [outputs, *group] in each bin that of the part it lies in: -> [rows, outputs, *grid]."""
    parts = reshape(x, [0, outputs, *group, *grid])
    rows, columns = (np.arange(n) * g // n for n, g in zip(grid, group, strict=True))
    chosen = np.zeros((*group, *grid), "float32")
    chosen[rows[:, None], columns, np.arange(grid[0])[:, None], np.arange(grid[1])] = 1
    return einsum("rcabij,abij->rcij", parts, OPS["cast"](chosen, x.dtype))


@layer
def roi_perspective_transform(
    input: Any, rois: Any, transformed_height: int, transformed_width: int, spatial_scale: float = 1.0,
    name: str | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(quadrangles made upright [rows, c, h', w'], which pixels lie in one int32 [rows, 1, h', w'], maps [rows, 9]).

    rois [rows, 8] with sequences: corners (x, y) from top left on, clockwise. A map [3, 3] takes (column, row, 1) of
    the result to a place of input; what lies outside of the quadrangle or the image is 0. The result is filled from the
    left as far as the quadrangle's shape goes. Source: PaddlePaddle 1.7.
    """
    boxes, counts = _by_image("roi_perspective_transform", rois)
    if boxes.shape[1] != 8:
        raise ShapeError(f"fluid.layers.roi_perspective_transform: rois {list(boxes.shape)}; needs [rows, 8]")
    corners = mt.scale(boxes, spatial_scale)
    xs, ys = ([corners[:, 2 * i + d] for i in range(4)] for d in (0, 1))
    maps = _perspective(xs, ys, transformed_height, transformed_width)
    column, row = np.meshgrid(np.arange(transformed_width), np.arange(transformed_height))
    places = np.stack([column, row, np.ones_like(row)], -1).astype("float32")
    moved = einsum("rab,hwb->rahw", reshape(maps, [-1, 3, 3]), OPS["cast"](places, boxes.dtype))
    x, y = (ar.divide(moved[:, d], moved[:, 2]) for d in (0, 1))
    h, w = input.shape[2:]
    inside = _in_quadrangle(x, y, xs, ys)
    for value, size in ((x, w), (y, h)):
        inside = ar.logical_and(inside, ar.greater_equal(value, -0.5))
        inside = ar.logical_and(inside, ar.less_equal(value, size - 0.5))
    mask = reshape(inside, [0, 1, transformed_height, transformed_width])
    images = _images_of_rows(input, counts, lods.rows(boxes))
    out = ar.multiply(_sampled(images, y, x), ar.cast(mask, input.dtype))
    return out, ar.cast(mask, "int32"), maps


def _perspective(xs: Sequence[Any], ys: Sequence[Any], height: int, width: int) -> Any:
    """The maps [rows, 9] that take (0, 0), (width' - 1, 0), (width' - 1, height' - 1), (0, height' - 1) to the corners.

    height' is height, width' what keeps the quadrangle's shape, at most width.
    """
    sides = [
        mt.sqrt(ar.add(mt.square(ar.subtract(xs[a], xs[b])), mt.square(ar.subtract(ys[a], ys[b]))))
        for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))
    ]
    high = max(height, 2)
    ratio = ar.divide(ar.add(sides[0], sides[2]), ar.add(sides[1], sides[3]))
    wide = mt.clip(mt.scale(mt.floor(mt.scale(ratio, high - 1.0, 0.5)), 1.0, 1.0), 2.0, float(max(width, 2)))
    last = mt.scale(wide, 1.0, -1.0), high - 1.0
    (dx1, dx2, dx3), (dy1, dy2, dy3) = (
        (
            ar.subtract(v[1], v[2]), ar.subtract(v[3], v[2]),
            ar.subtract(ar.add(v[0], v[2]), ar.add(v[1], v[3])),
        )
        for v in (xs, ys)
    )  # fmt: skip
    # the small number keeps a quadrangle without area from dividing by 0
    below = mt.scale(ar.subtract(ar.multiply(dx1, dy2), ar.multiply(dx2, dy1)), 1.0, 1e-5)
    across = ar.divide(ar.divide(ar.subtract(ar.multiply(dx3, dy2), ar.multiply(dx2, dy3)), below), last[0])
    along = mt.scale(ar.divide(ar.subtract(ar.multiply(dx1, dy3), ar.multiply(dx3, dy1)), below), 1.0 / last[1])
    rows = []
    for v in (xs, ys):
        step = ar.divide(ar.add(ar.subtract(v[1], v[0]), ar.multiply(ar.multiply(across, last[0]), v[1])), last[0])
        down = mt.scale(ar.add(ar.subtract(v[3], v[0]), ar.multiply(mt.scale(along, last[1]), v[3])), 1.0 / last[1])
        rows += [step, down, v[0]]
    return stack([*rows, across, along, mt.scale(across, 0.0, 1.0)], 1)


def _in_quadrangle(x: Any, y: Any, xs: Sequence[Any], ys: Sequence[Any]) -> Any:
    """Whether places [rows, h, w] lie in convex quadrangles whose corners go clockwise, edges included."""
    inside = None
    for a, b in ((0, 1), (1, 2), (2, 3), (3, 0)):
        ax, ay, bx, by = (reshape(v, [-1, 1, 1]) for v in (xs[a], ys[a], xs[b], ys[b]))
        turn = ar.subtract(
            ar.multiply(ar.subtract(bx, ax), ar.subtract(y, ay)), ar.multiply(ar.subtract(by, ay), ar.subtract(x, ax))
        )
        # roundings of products of coordinates in pixels
        right = ar.greater_equal(turn, -1e-3)
        inside = right if inside is None else ar.logical_and(inside, right)
    return inside


__all__ = [
    "deformable_conv", "deformable_roi_pooling", "prroi_pool", "psroi_pool", "roi_align", "roi_perspective_transform",
    "roi_pool",
]  # fmt: skip
