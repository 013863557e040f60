"""Boxes of detectors: those to start from, overlaps, offsets, cutting to an image.

A box is (x1, y1, x2, y2). "Not normalized" ones are in whole pixels, both ends inside: one wider and higher than the
difference of their corners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core.op import recorded
from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.creation import ones_like
from polyreme.ops.detection import boxes as bx
from polyreme.ops.detection import yolo
from polyreme.ops.indices.gather import take_along_axis
from polyreme.ops.manipulation import concat, reshape
from polyreme.ops.scan import cumsum
from polyreme.ops.search import argmax
from polyreme.sequences import lod as lods


@layer
def prior_box(
    input: Any, image: Any, min_sizes: Any, max_sizes: Any = None, aspect_ratios: Any = (1.0,),
    variance: Any = (0.1, 0.1, 0.2, 0.2), flip: bool = False, clip: bool = False, steps: Any = (0.0, 0.0),
    offset: float = 0.5, name: str | None = None, min_max_aspect_ratios_order: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(boxes to start from at each place of a feature map, their variances), [h, w, boxes, 4]: vision.ops.prior_box."""
    return bx.prior_box(
        input, image, min_sizes, max_sizes, aspect_ratios, variance, flip, clip, steps, offset,
        min_max_aspect_ratios_order,
    )  # fmt: skip


@layer
def density_prior_box(
    input: Any, image: Any, densities: Any = None, fixed_sizes: Any = None, fixed_ratios: Any = None,
    variance: Any = (0.1, 0.1, 0.2, 0.2), clip: bool = False, steps: Any = (0.0, 0.0), offset: float = 0.5,
    flatten_to_2d: bool = False, name: str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(boxes, their variances) of fixed sizes, density^2 around each place: [h, w, boxes, 4], or [boxes, 4] flat.

    For each of fixed_sizes with its density, and each of fixed_ratios, density x density centres divide the step from
    place to place evenly. Boxes are fractions of the image and kept inside, whatever clip says, as in 1.7.
    Source: Zhang et al., 2017, arXiv:1708.05234, section 3.2. Raises ConfigError unless there is one density a size.
    """
    if not densities or not fixed_sizes or not fixed_ratios or len(densities) != len(fixed_sizes):
        raise ConfigError(
            f"fluid.layers.density_prior_box: densities={densities}, fixed_sizes={fixed_sizes}, "
            f"fixed_ratios={fixed_ratios}; give ratios, and one density a size"
        )
    settings = (list(densities), list(fixed_sizes), list(fixed_ratios), list(variance), list(steps), float(offset))
    found = dense_boxes(input, image, *settings)
    return tuple(reshape(v, [-1, 4]) for v in found) if flatten_to_2d else found  # type: ignore[return-value]


@recorded
def dense_boxes(
    input: Any, image: Any, densities: Any, sizes: Any, ratios: Any, variance: Any, steps: Any, offset: float
) -> tuple[Any, Any]:
    """density_prior_box of the sizes of input and image."""
    places, full = (np.array([v.shape[3], v.shape[2]]) for v in (input, image))
    step = np.array([s or z / p for s, z, p in zip(steps, full, places, strict=True)])
    between = int(step.mean())
    moves, halves = [], []
    for density, size in zip(densities, sizes, strict=True):
        shift = between // density
        move = (np.arange(density) + 0.5) * shift - between / 2
        for ratio in ratios:
            moves += [(right, down) for down in move for right in move]
            halves += [(size * ratio**0.5 / 2, size / ratio**0.5 / 2)] * density**2
    centre = _centres(places, offset, step)[:, :, None] + np.array(moves)
    corners = [centre - np.array(halves), centre + np.array(halves)]
    return _constant(np.clip(np.concatenate(corners, -1) / np.tile(full, 2), 0, 1), variance, input.dtype)


def _centres(places: np.ndarray, offset: float, step: np.ndarray) -> np.ndarray:
    """(x, y) of each place of a map, [h, w, 2]."""
    return np.stack(np.meshgrid(*((np.arange(p) + offset) * s for p, s in zip(places, step, strict=True))), -1)


def _constant(boxes: np.ndarray, variance: Any, dtype: Any) -> tuple[Any, Any]:
    return OPS["cast"](boxes, dtype), OPS["cast"](np.broadcast_to(np.array(variance), boxes.shape), dtype)


@layer
def anchor_generator(
    input: Any, anchor_sizes: Any = None, aspect_ratios: Any = None, variance: Any = (0.1, 0.1, 0.2, 0.2),
    stride: Any = None, offset: float = 0.5, name: str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(anchors in pixels at each place of a feature map, their variances), [h, w, ratios * sizes, 4].

    aspect_ratios: heights over widths; sizes are square roots of areas. stride: (x, y) pixels from place to place.
    Anchors are whole at scale 1, as in Ren et al., 2015, arXiv:1506.01497. Raises ConfigError without the three.
    """
    sizes, ratios = (list(v) if isinstance(v, (list, tuple)) else [v] for v in (anchor_sizes, aspect_ratios))
    if anchor_sizes is None or aspect_ratios is None or not isinstance(stride, (list, tuple)) or len(stride) != 2:
        raise ConfigError("fluid.layers.anchor_generator: give anchor_sizes, aspect_ratios and stride (x, y)")
    return anchors_of(input, sizes, ratios, list(variance), list(stride), float(offset))


@recorded
def anchors_of(input: Any, sizes: Any, ratios: Any, variance: Any, stride: Any, offset: float) -> tuple[Any, Any]:
    """anchor_generator of input's size."""
    step, places = np.array(stride, float), np.array([input.shape[3], input.shape[2]])
    halves = []
    for ratio in ratios:
        width = np.floor(np.sqrt(step.prod() / ratio) + 0.5)
        base = np.array([width, np.floor(width * ratio + 0.5)])
        halves += [(size / step * base - 1) / 2 for size in sizes]
    centre = (_centres(places, 0.0, step) + offset * (step - 1))[:, :, None]
    boxes = np.concatenate([centre - np.array(halves), centre + np.array(halves)], -1)
    return _constant(boxes, variance, input.dtype)


@layer
def box_coder(
    prior_box: Any, prior_box_var: Any, target_box: Any, code_type: str = "encode_center_size",
    box_normalized: bool = True, name: str | None = None, axis: int = 0,
) -> Any:  # fmt: skip
    """Boxes as offsets from priors, or back; see vision.ops.box_coder. prior_box_var may be four numbers."""
    if isinstance(prior_box_var, (list, tuple)):
        prior_box_var = OPS["cast"](np.asarray(prior_box_var, "float32"), prior_box.dtype)
    found = bx.box_coder(prior_box, prior_box_var, target_box, code_type, box_normalized, axis)
    return _as_rows(found, target_box)


def _as_rows(value: Any, of: Any) -> Any:
    """value with the sequences of a Variable that has as many rows."""
    lod = lods.lod_of(of)
    return lods.divided(value, lod) if lod else value


@layer
def iou_similarity(x: Any, y: Any, box_normalized: bool = True, name: str | None = None) -> Any:
    """Intersection over union of each box of x [n, 4] with each of y [m, 4]: -> [n, m], with x's sequences."""
    return _as_rows(_overlaps(x, y, 0.0 if box_normalized else 1.0), x)


def _overlaps(x: Any, y: Any, extra: float) -> Any:
    a, b = reshape(x, [-1, 1, 4]), reshape(y, [1, -1, 4])
    low, high = mt.maximum(a[..., :2], b[..., :2]), mt.minimum(a[..., 2:], b[..., 2:])
    sides = mt.maximum(mt.scale(ar.subtract(high, low), 1.0, extra), 0.0)
    both = ar.multiply(sides[..., 0], sides[..., 1])
    areas = []
    for v in (a, b):
        wide = mt.scale(ar.subtract(v[..., 2:], v[..., :2]), 1.0, extra)
        areas.append(ar.multiply(wide[..., 0], wide[..., 1]))
    union = ar.subtract(ar.add(*areas), both)
    empty = ar.less_equal(union, 0.0)
    return ar.divide(both, ar.add(union, ar.cast(empty, union.dtype)))


@layer
def box_clip(input: Any, im_info: Any, name: str | None = None) -> Any:
    """Boxes cut to their image: input [..., 4] with sequences, one for each row (height, width, scale) of im_info.

    An image is round(height / scale) high; coordinates go up to one less.
    """
    boxes, lod = lods.sequences("fluid.layers.box_clip", input)
    image = mt.scale(mt.floor(mt.scale(ar.divide(im_info[:, :2], im_info[:, 2:3]), 1.0, 0.5)), 1.0, -1.0)
    most = OPS["sequence_expand_as"](concat([image[:, 1:], image[:, :1]] * 2, 1), lods.inner(lod), lods.rows(boxes))
    most = reshape(most, [0, *[1] * (boxes.ndim - 2), 4])
    return lods.divided(mt.maximum(mt.minimum(boxes, most), 0.0), lod)


@layer
def polygon_box_transform(input: Any, name: str | None = None) -> Any:
    """Offsets of corners as places in the image, of a map a quarter of its size: [n, 2 corners, h, w], x and y in turn.

    4 * column - input in even channels, 4 * row - input in odd ones.
    """
    if input.ndim != 4 or input.shape[1] % 2:
        raise ShapeError(f"fluid.layers.polygon_box_transform: input {list(input.shape)}; channels are x and y in turn")
    ones = ones_like(input)
    column, row = (mt.scale(cumsum(ones, axis), 4.0, -4.0) for axis in (3, 2))
    even = OPS["cast"](1 - np.arange(input.shape[1]).reshape(1, -1, 1, 1) % 2, input.dtype)
    place = ar.add(ar.multiply(column, even), ar.multiply(row, ar.subtract(1.0, even)))
    return ar.subtract(place, input)


@layer
def box_decoder_and_assign(
    prior_box: Any, prior_box_var: Any, target_box: Any, box_score: Any, box_clip: float, name: str | None = None
) -> tuple[Any, Any]:
    """(boxes of all classes [n, 4 classes], each row's box of the class with the highest score [n, 4]).

    prior_box [n, 4] in whole pixels, prior_box_var [4], target_box [n, 4 classes] offsets from them, whose logarithms
    of sizes are at most box_clip; box_score [n, classes], class 0 being the background, which is not chosen.
    """
    classes = box_score.shape[1]
    delta = ar.multiply(reshape(target_box, [-1, classes, 4]), reshape(prior_box_var, [1, 1, 4]))
    prior = reshape(prior_box, [-1, 1, 4])
    size = mt.scale(ar.subtract(prior[..., 2:], prior[..., :2]), 1.0, 1.0)
    middle = ar.add(ar.add(prior[..., :2], mt.scale(size, 0.5)), ar.multiply(delta[..., :2], size))
    half = mt.scale(ar.multiply(mt.exp(mt.minimum(delta[..., 2:], float(box_clip))), size), 0.5)
    boxes = concat([ar.subtract(middle, half), mt.scale(ar.add(middle, half), 1.0, -1.0)], -1)
    if classes < 2:
        raise ShapeError(
            f"fluid.layers.box_decoder_and_assign: box_score {list(box_score.shape)}; class 0 is background"
        )
    best = mt.scale(argmax(box_score[:, 1:], 1), 1, 1)
    chosen = take_along_axis(boxes, reshape(best, [-1, 1, 1]), 1)
    return _as_rows(reshape(boxes, [-1, 4 * classes]), prior_box), _as_rows(reshape(chosen, [-1, 4]), prior_box)


@layer
def yolo_box(
    x: Any, img_size: Any, anchors: Any, class_num: int, conf_thresh: float, downsample_ratio: int,
    clip_bbox: bool = True, name: str | None = None, scale_x_y: float = 1.0,
) -> tuple[Any, Any]:  # fmt: skip
    """(boxes [n, places, 4], scores [n, places, class_num]) of a YOLOv3 head; see vision.ops.yolo_box. scale_x_y is of
    1.8."""
    return yolo.yolo_box(x, img_size, anchors, class_num, conf_thresh, downsample_ratio, clip_bbox, scale_x_y=scale_x_y)


@layer
def yolov3_loss(
    x: Any, gt_box: Any, gt_label: Any, anchors: Sequence[int], anchor_mask: Sequence[int], class_num: int,
    ignore_thresh: float, downsample_ratio: int, gt_score: Any = None, use_label_smooth: bool = True,
    name: str | None = None, scale_x_y: float = 1.0,
) -> Any:  # fmt: skip
    """Loss of a YOLOv3 head, [n]; see vision.ops.yolo_loss. scale_x_y is of 1.8."""
    return yolo.yolo_loss(
        x, gt_box, gt_label, anchors, anchor_mask, class_num, ignore_thresh, downsample_ratio, gt_score,
        use_label_smooth, scale_x_y=scale_x_y,
    )  # fmt: skip


__all__ = [
    "anchor_generator", "box_clip", "box_coder", "box_decoder_and_assign", "density_prior_box", "iou_similarity",
    "polygon_box_transform", "prior_box", "yolo_box", "yolov3_loss",
]  # fmt: skip
