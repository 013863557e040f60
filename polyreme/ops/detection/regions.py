"""Pooling over regions of images (RoIs): align, max and position-sensitive average, all to one size.

Each bin of a region is a rectangle, so weights of a mean are an outer product of one vector a dim: a region
is averaged by one matrix [bins, size] for the rows and one for the columns. Regions are taken a few at a time, so that
the images are not copied for every one. Gradients flow to x, not to the boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from polyreme.core.annotations import Sizes
from polyreme.core.dtype import floating
from polyreme.core.op import op
from polyreme.core.symbol import DYNAMIC
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.bounds import at_hand, preceded
from polyreme.ops.by_index import read_along
from polyreme.ops.windows.geometry import per_dim

# regions pooled at once: a [32, channels, bins, width] array stays small beside the images
_AT_ONCE = 32
_FARTHEST = 2.0**40
"""Pixels from the origin beyond which a corner may as well be there: products with a number of bins stay exact."""
_INT32 = jnp.iinfo(jnp.int32)


def _fitting(what: str) -> Callable[..., None]:
    """A check that raises ShapeError where x, boxes and boxes_num do not fit each other."""

    def check(x: Any, boxes: Any, boxes_num: Any, *rest: Any, **settings: Any) -> None:
        image, region, number = (list(getattr(a, "shape", ())) for a in (x, boxes, boxes_num))
        fits = [len(dims) for dims in (image, region, number)] == [4, 2, 1]
        # DYNAMIC: a size of a Program that is known once it runs
        sizes = zip((*region[1:], *number), (4, *image[:1]), strict=True) if fits else ()
        if not fits or any(a != b and DYNAMIC not in (a, b) for a, b in sizes):
            raise ShapeError(
                f"{what}: x {list(image)}, boxes {list(region)}, boxes_num {list(number)}; needs "
                "[n, channels, height, width], [boxes, 4] and [n]"
            )
        count = at_hand(boxes_num)
        if count is not None and region[0] != DYNAMIC and (count.sum() != region[0] or count.min(initial=0) < 0):
            raise ShapeError(
                f"{what}: boxes_num={count.tolist()} adds up to {count.sum()}, but there are {region[0]} boxes"
            )

    return check


def _check_scale(what: str, spatial_scale: float) -> None:
    if not spatial_scale > 0:
        raise ConfigError(f"{what}: spatial_scale={spatial_scale}; it must be positive")


def _pool(pool: Callable[..., Array], x: Array, boxes_num: Array, *of_region: Array) -> Array:
    """pool(image [C, H, W], *parts of of_region) for every region, of the image it lies in."""
    image = jnp.repeat(jnp.arange(x.shape[0]), boxes_num, total_repeat_length=of_region[0].shape[0])
    return lax.map(lambda at: pool(x[at[0]], *at[1:]), (image, *of_region), batch_size=_AT_ONCE)


def _halves_up(value: Array) -> Array:
    """Rounded, halves away from zero."""
    return jnp.sign(value) * jnp.floor(jnp.abs(value) + 0.5)


def _bin_ends(start: Array, length: Array, bins: int, size: int) -> tuple[Array, Array]:
    """First row and end of each bin, int32 [..., bins]: floor(start + i length / bins), ceil of the next start.

    Exact for integers: 3 (14 / 3), rounded, is more than 14, and XLA divides by a constant as it multiplies.
    """
    bin_number, start, length = jnp.arange(bins), start[..., None], length[..., None]
    if jnp.issubdtype(start.dtype, jnp.integer):
        low, high = start + bin_number * length // bins, start - (-(bin_number + 1) * length // bins)
    else:
        step = length / bins
        low, high = jnp.floor(start + bin_number * step), jnp.ceil(start + (bin_number + 1) * step)
    return jnp.clip(low, 0, size).astype(jnp.int32), jnp.clip(high, 0, size).astype(jnp.int32)


def _in_bins(start: Array, length: Array, bins: int, size: int) -> Array:
    """Whether a row lies in a bin, [..., bins, size]."""
    low, high = _bin_ends(start, length, bins, size)
    rows = jnp.arange(size)
    return (rows >= low[..., None]) & (rows < high[..., None])


def _align_weights(start: Array, length: Array, bins: int, size: int, sampling_ratio: int) -> Array:
    """[regions, bins, size]: the mean, over sample points evenly in a bin, of linear interpolation between rows.

    A point more than one row outside counts as 0, one nearer takes the edge.
    """
    step = length / bins
    samples = jnp.ceil(step) if sampling_ratio <= 0 else jnp.full_like(step, sampling_ratio)
    samples = jnp.maximum(samples, 1)
    rows, at = jnp.arange(size, dtype=start.dtype), jnp.arange(bins, dtype=start.dtype)

    def add(i: Array, total: Array) -> Array:
        point = start[:, None] + (at + ((i + 0.5) / samples)[:, None]) * step[:, None]
        counts = (point >= -1) & (point <= size) & (i < samples)[:, None]
        near = jnp.clip(point, 0, size - 1)
        return total + jnp.maximum(1 - jnp.abs(rows - near[..., None]), 0) * counts[..., None]

    # how many samples there are is a value: a loop to the largest number, which nothing is differentiated through
    total = lax.fori_loop(0, jnp.max(samples).astype(jnp.int32), add, jnp.zeros((*step.shape, bins, size), start.dtype))
    return total / samples[:, None, None]


@preceded(_fitting("roi_align"))
@op(amp="fp32", method=False, real=True)
def roi_align(
    x: Array,
    boxes: Array,
    boxes_num: Array,
    output_size: Sizes,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = True,
) -> Array:
    """Means of bilinear samples over a grid of bins in each box: [n, C, H, W], [boxes, 4] -> [boxes, C, *output_size].

    boxes: (x1, y1, x2, y2), times spatial_scale in pixels of x; boxes_num [n]: how many belong to each image, in order.
    sampling_ratio: sample points a bin and dim; ceil(bin size) where it is not positive. aligned: pixel centres are at
    halves; without it boxes are at least 1 wide and high. Source: He et al., 2017, arXiv:1703.06870, section 3. Raises
    ShapeError where the numbers of boxes differ.
    """
    height, width = per_dim(output_size, 2, "roi_align: output_size")
    x = floating(x)
    if not boxes.shape[0]:
        return jnp.zeros((0, x.shape[1], height, width), x.dtype)
    _check_scale("roi_align", spatial_scale)
    corners = lax.stop_gradient(wide(boxes)) * spatial_scale - (0.5 if aligned else 0.0)
    low, length = corners[:, :2], corners[:, 2:4] - corners[:, :2]
    if not aligned:
        length = jnp.maximum(length, 1)
    rows = _align_weights(low[:, 1], length[:, 1], height, x.shape[2], sampling_ratio).astype(x.dtype)
    columns = _align_weights(low[:, 0], length[:, 0], width, x.shape[3], sampling_ratio).astype(x.dtype)
    return _pool(lambda v, r, c: jnp.einsum("chw,ih,jw->cij", v, r, c), x, boxes_num, rows, columns)


@preceded(_fitting("roi_pool"))
@op(amp="fp32", method=False, real=True)
def roi_pool(x: Array, boxes: Array, boxes_num: Array, output_size: Sizes, spatial_scale: float = 1.0) -> Array:
    """Maxima over a grid of bins in each box: [n, C, H, W], [boxes, 4] -> [boxes, C, *output_size].

    Corners (x1, y1, x2, y2) times spatial_scale are rounded to pixels, both ends inside; bins overlap by up to a pixel;
    an empty one gives 0. boxes_num [n]: how many boxes belong to each image, in order. Source: Girshick, 2015,
    arXiv:1504.08083, section 2.1. Raises ShapeError where the numbers of boxes differ.
    """
    height, width = per_dim(output_size, 2, "roi_pool: output_size")
    x = floating(x)
    if not boxes.shape[0]:
        return jnp.zeros((0, x.shape[1], height, width), x.dtype)
    _check_scale("roi_pool", spatial_scale)
    corners = _halves_up(lax.stop_gradient(wide(boxes)) * spatial_scale)
    corners = jnp.clip(corners, -_FARTHEST, _FARTHEST).astype(jnp.int64)
    low, length = corners[:, :2], jnp.maximum(corners[:, 2:4] - corners[:, :2] + 1, 1)
    rows = _bin_ends(low[:, 1], length[:, 1], height, x.shape[2])
    columns = _bin_ends(low[:, 0], length[:, 0], width, x.shape[3])
    # one row a pixel, so that what is gathered lies together
    pixels = jnp.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
    index = jnp.int32 if len(pixels) <= _INT32.max else jnp.int64
    images = jnp.arange(x.shape[0], dtype=index) * x.shape[2]
    image = jnp.repeat(images, boxes_num, total_repeat_length=boxes.shape[0])
    at, empty = _places_of_largest(lax.stop_gradient(pixels), image, rows, columns, x.shape[3])
    found = read_along(pixels, at.reshape(-1, x.shape[1]), 0).reshape(at.shape)
    return jnp.moveaxis(jnp.where(empty[..., None], 0, found), -1, 1)


def _places_of_largest(
    pixels: Array, image: Array, rows: tuple[Array, Array], columns: tuple[Array, Array], width: int
) -> tuple[Array, Array]:
    """(which pixel [images H W, C] is the largest of each bin and channel, which bins are empty); image: its first row.

    Pixels of all bins are walked together, the first of each, then the next ones: how many is a value, so nothing is
    differentiated through the loop.
    """
    (top, bottom), (left, right) = rows, columns
    high, across = jnp.max(bottom - top), jnp.max(right - left)
    shape = (top.shape[0], top.shape[1], left.shape[1])

    def step(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        row, column = top + i // across, left + i % across
        inside = (row < bottom)[:, :, None] & (column < right)[:, None, :]
        at = (image[:, None] + row)[:, :, None] * width + column[:, None, :]
        value = jnp.where(inside[..., None], pixels[jnp.where(inside, at, 0)], -jnp.inf)
        # NaN is the largest of all, once met
        larger = ~(value <= best[0]) & ~jnp.isnan(best[0])
        return jnp.where(larger, value, best[0]), jnp.where(larger, at[..., None], best[1])

    every = (*shape, pixels.shape[1])
    first = (image[:, None] + top)[:, :, None] * width + left[:, None, :]
    start = jnp.full(every, -jnp.inf, pixels.dtype), jnp.broadcast_to(first[..., None], every)
    _, place = lax.fori_loop(0, high * across, step, start)
    return place, ((bottom <= top)[:, :, None] | (right <= left)[:, None, :])


@preceded(_fitting("psroi_pool"))
@op(amp="fp32", method=False, real=True)
def psroi_pool(x: Array, boxes: Array, boxes_num: Array, output_size: Sizes, spatial_scale: float = 1.0) -> Array:
    """Means over a grid of bins, each of channels of its own: [n, C h w, H, W], [boxes, 4] -> [boxes, C, h, w].

    Output channel c of bin (i, j) averages input channel (c h + i) w + j. Corners are rounded, the far one included,
    then times spatial_scale. boxes_num [n]: how many boxes belong to each image, in order. Source: Dai et al., 2016,
    arXiv:1605.06409, equation 1. Raises ShapeError where channels do not divide into bins or numbers of boxes differ.
    """
    height, width = per_dim(output_size, 2, "psroi_pool: output_size")
    x = floating(x)
    if x.shape[1] % (height * width):
        raise ShapeError(
            f"psroi_pool: x {list(x.shape)} has {x.shape[1]} channels; needs a multiple of {height * width}"
        )
    channels = x.shape[1] // (height * width)
    if not boxes.shape[0]:
        return jnp.zeros((0, channels, height, width), x.dtype)
    corners = _halves_up(wide(boxes))
    _check_scale("psroi_pool", spatial_scale)
    low, high = corners[:, :2] * spatial_scale, (corners[:, 2:4] + 1) * spatial_scale
    # the paper's code keeps a box from being empty so
    length = jnp.maximum(high - low, 0.1)
    rows = _in_bins(low[:, 1], length[:, 1], height, x.shape[2]).astype(x.dtype)
    columns = _in_bins(low[:, 0], length[:, 0], width, x.shape[3]).astype(x.dtype)

    def pool(v: Array, r: Array, c: Array) -> Array:
        parts = v.reshape(channels, height, width, *v.shape[1:])
        pixels = r.sum(1)[:, None] * c.sum(1)
        return jnp.einsum("cijhw,ih,jw->cij", parts, r, c) / jnp.maximum(pixels, 1)

    return _pool(pool, x, boxes_num, rows, columns)


ALIASES: dict[str, str] = {}
