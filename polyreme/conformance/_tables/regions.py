"""Contract rows of ops/detection/regions.py and ops/windows/deformable.py: the oracles walk bins, samples and taps one by one."""

import math

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError

# images of two channels a bin, 5 x 6; boxes that reach outside, are tiny, and are larger than the image
BOXES = np.array([[0.3, 0.2, 4.7, 3.1], [-2.0, 1.0, 5.0, 8.5], [2.0, 2.0, 2.2, 2.3], [1.0, 0.5, 9.5, 7.5]], "float32")
REGIONS = {"boxes": BOXES, "boxes_num": np.array([1, 3], "int32")}
IMAGE_OF = (0, 1, 1, 1)


def images(channels):
    # distinct by much more than the step of finite differences, so that no maximum changes hands
    size = 2 * channels * 30
    return lambda rng: (rng.permutation(np.linspace(-2, 2, size)).reshape(2, channels, 5, 6).astype("float32"),)


def bilinear(image, row, column):
    """image [C, H, W] at a real place; 0 more than one pixel outside, the edge if nearer."""
    height, width = image.shape[1:]
    if not (-1 <= row <= height and -1 <= column <= width):
        return np.zeros(len(image))
    row, column = min(max(row, 0), height - 1), min(max(column, 0), width - 1)
    total = np.zeros(len(image))
    for r in (math.floor(row), math.floor(row) + 1):
        for c in (math.floor(column), math.floor(column) + 1):
            if r < height and c < width:
                total += (1 - abs(row - r)) * (1 - abs(column - c)) * image[:, r, c]
    return total


def roi_align(x, output_size, spatial_scale, boxes, boxes_num, sampling_ratio=-1, aligned=True):
    out = np.zeros((len(boxes), x.shape[1], *output_size))
    for k, box in enumerate(boxes.astype("float64") * spatial_scale - (0.5 if aligned else 0)):
        low, size = box[1::-1], (box[2:] - box[:2])[::-1]
        step = (size if aligned else np.maximum(size, 1)) / output_size
        counts = [sampling_ratio if sampling_ratio > 0 else max(math.ceil(s), 1) for s in step]
        for at in np.ndindex(*output_size):
            points = [[low[d] + (at[d] + (i + 0.5) / counts[d]) * step[d] for i in range(counts[d])] for d in (0, 1)]
            out[(k, slice(None), *at)] = np.mean(
                [bilinear(x[IMAGE_OF[k]], r, c) for r in points[0] for c in points[1]], 0
            )
    return out


def half_up(value):
    return math.floor(abs(value) + 0.5) * (1 if value >= 0 else -1)


def in_bins(x, low, size, output_size):
    """(bin, the part of the image [C, ...] inside it)."""
    for index in np.ndindex(*output_size):
        ends = []
        for d in (0, 1):
            step, limit = np.float32(size[d] / output_size[d]), x.shape[1 + d]
            ends.append(
                [
                    min(max(v, 0), limit)
                    for v in (math.floor(low[d] + index[d] * step), math.ceil(low[d] + (index[d] + 1) * step))
                ]
            )
        yield index, x[:, ends[0][0] : ends[0][1], ends[1][0] : ends[1][1]]


def roi_pool(x, output_size, spatial_scale, boxes, boxes_num):
    out = np.zeros((len(boxes), x.shape[1], *output_size))
    for k, box in enumerate(boxes):
        x1, y1, x2, y2 = (half_up(np.float32(v) * np.float32(spatial_scale)) for v in box)
        for at, part in in_bins(x[IMAGE_OF[k]], (y1, x1), (max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1)), output_size):
            out[(k, slice(None), *at)] = part.max((1, 2)) if part.size else 0
    return out


def psroi_pool(x, output_size, spatial_scale, boxes, boxes_num):
    bins = output_size[0] * output_size[1]
    out = np.zeros((len(boxes), x.shape[1] // bins, *output_size))
    for k, box in enumerate(boxes):
        x1, y1, x2, y2 = (half_up(v) for v in box)
        low = (y1 * spatial_scale, x1 * spatial_scale)
        size = [max((b + 1 - a) * spatial_scale, 0.1) for a, b in ((y1, y2), (x1, x2))]
        for (i, j), part in in_bins(x[IMAGE_OF[k]], low, size, output_size):
            if part.size:
                out[k, :, i, j] = part.mean((1, 2))[i * output_size[1] + j :: bins]
    return out


def deform(rng):
    return tuple(
        rng.uniform(-1, 1, shape).astype("float32") * spread
        for shape, spread in (((1, 4, 4, 5), 1), ((1, 2 * 2 * 6, 2, 4), 1.7), ((4, 2, 3, 2), 1), ((4,), 1))
    )


MASK = np.random.default_rng(0).uniform(0, 1, (1, 12, 2, 4)).astype("float32")
SETTINGS = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 1), "deformable_groups": 2, "groups": 2}


def deform_conv2d(x, offset, weight, bias, stride, padding, dilation, deformable_groups, groups, mask=None):
    kernel, (height, width) = weight.shape[2:], x.shape[2:]
    y = np.zeros((1, 4, *offset.shape[2:]))
    # zeros around, so that a place less than one pixel outside is interpolated with them
    padded = np.pad(x[0].astype("float64"), ((0, 0), (1, 1), (1, 1)))
    for o, i, j in np.ndindex(*y.shape[1:]):
        y[0, o, i, j] = bias[o]
        for c, a, b in np.ndindex(*weight.shape[1:]):
            channel = o // 2 * 2 + c
            tap = channel // 2 * 6 + a * kernel[1] + b
            row = i * stride[0] - padding[0] + a * dilation[0] + offset[0, 2 * tap, i, j]
            column = j * stride[1] - padding[1] + b * dilation[1] + offset[0, 2 * tap + 1, i, j]
            inside = -1 < row < height and -1 < column < width
            value = bilinear(padded[channel][None], row + 1, column + 1)[0] if inside else 0
            y[0, o, i, j] += weight[o, c, a, b] * value * (1 if mask is None else mask[0, tap, i, j])
    return y


def fixed(fn):
    """fn with its arguments in the order of the op."""
    return lambda x, boxes, boxes_num, output_size, spatial_scale, **rest: fn(
        x, output_size, spatial_scale, boxes, boxes_num, **rest
    )


CASES = [
    Case("roi_align", images(2), fixed(roi_align), {**REGIONS, "output_size": (2, 3), "spatial_scale": 0.7}, terms=64,
         bad=((np.zeros((3, 2, 5, 6), "float32"),), ShapeError, r"x \[3, 2, 5, 6\], boxes \[4, 4\], boxes_num \[2\]")),
    Case("roi_align", images(2), fixed(roi_align), {**REGIONS, "output_size": (2, 1), "spatial_scale": 1.0, "sampling_ratio": 2, "aligned": False}, tag="two samples a bin, whole pixels", terms=32),
    Case("roi_pool", images(2), fixed(roi_pool), {**REGIONS, "output_size": (2, 3), "spatial_scale": 0.7},
         bad=((np.zeros((2, 5, 6), "float32"),), ShapeError, r"roi_pool: x \[2, 5, 6\]")),
    Case("psroi_pool", images(8), fixed(psroi_pool), {**REGIONS, "output_size": (2, 2), "spatial_scale": 0.7}, terms=16,
         bad=((np.zeros((2, 6, 5, 6), "float32"),), ShapeError, "6 channels; needs a multiple of 4")),
    Case("deform_conv2d", deform, deform_conv2d, {**SETTINGS, "mask": MASK}, terms=48,
         bad=((np.zeros((1, 4, 4, 5), "float32"), np.zeros((1, 24, 2, 3), "float32"), np.zeros((4, 2, 3, 2), "float32")), ShapeError, r"offset \[1, 24, 2, 3\]; needs \[1, 24, 2, 4\]")),
    Case("deform_conv2d", deform, deform_conv2d, SETTINGS, tag="no mask", terms=48),
]  # fmt: skip
