"""YOLO heads: boxes from what a network says, and the loss of it.

Sources: Redmon and Farhadi, 2018, arXiv:1804.02767, section 2; scale_x_y from Bochkovskiy et al., 2020,
arXiv:2004.10934, section 3.3. A head says, for each anchor and cell, (x, y, w, h, objectness, a score a class).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme.core.op import op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import wide


def _anchors(what: str, anchors: Any) -> np.ndarray:
    """[anchors, (width, height)] from a flat list."""
    flat = np.asarray(anchors, float)
    if flat.ndim != 1 or not flat.size or flat.size % 2 or (flat <= 0).any():
        raise ConfigError(f"{what}: anchors={anchors!r}; give width and height, in pixels, of each in one list")
    return flat.reshape(-1, 2)


def _head(what: str, x: Array, anchors: int, class_num: int, more: int = 0) -> Array:
    """x as [n, anchors, 5 + class_num, H, W]."""
    want = anchors * (5 + class_num + more)
    if x.ndim != 4 or class_num < 1 or x.shape[1] != want:
        raise ShapeError(
            f"{what}: x {list(x.shape)} with {anchors} anchors and {class_num} classes; needs [n, {want}, H, W]"
        )
    return x[:, anchors * more :].reshape(x.shape[0], anchors, 5 + class_num, *x.shape[2:])


def _boxes(head: Array, anchors: np.ndarray, inputs: np.ndarray, scale_x_y: float) -> tuple[Array, Array]:
    """Centres and sizes as fractions of the image, each [n, anchors, H, W, 2]; inputs: (width, height) in pixels."""
    height, width = head.shape[3:]
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1)
    said = jnp.moveaxis(head[:, :, :4], 2, -1)
    move = jax.nn.sigmoid(said[..., :2]) * scale_x_y - 0.5 * (scale_x_y - 1)
    size = jnp.exp(said[..., 2:]) * jnp.asarray(anchors / inputs, said.dtype)[:, None, None]
    return (move + cells) / np.array([width, height], said.dtype), size


@op(amp="fp32", method=False, real=True)
def yolo_box(
    x: Array,
    img_size: Array,
    anchors: Any,
    class_num: int,
    conf_thresh: float,
    downsample_ratio: int,
    clip_bbox: bool = True,
    name: str | None = None,
    scale_x_y: float = 1.0,
    iou_aware: bool = False,
    iou_aware_factor: float = 0.5,
) -> tuple[Array, Array]:
    """Boxes and class scores of a YOLO head: [n, anchors (5 + classes), H, W] -> [n, boxes, 4], [n, boxes, classes].

    img_size [n, 2]: (height, width) of each image in pixels, in which boxes (x1, y1, x2, y2) are given, kept inside by
    clip_bbox. anchors: widths and heights in a row, in pixels of the network's input of downsample_ratio pixels a cell.
    A box whose objectness is below conf_thresh is all 0. iou_aware: x has one more channel an anchor, first: predicted
    overlap, of which iou_aware_factor goes into the objectness. Boxes are in the order anchor, row, column. Raises
    ConfigError for an iou_aware_factor outside of [0, 1].
    """
    if not 0 <= iou_aware_factor <= 1:
        raise ConfigError(f"yolo_box: iou_aware_factor={iou_aware_factor}; it must lie in [0, 1]")
    sizes = _anchors("yolo_box", anchors)
    x = wide(x)
    head = _head("yolo_box", x, len(sizes), class_num, int(iou_aware))
    n, count, _, height, width = head.shape
    middle, size = _boxes(head, sizes, np.array([width, height]) * downsample_ratio, scale_x_y)
    confidence = jax.nn.sigmoid(head[:, :, 4])
    if iou_aware:
        overlap = jax.nn.sigmoid(x[:, :count])
        confidence = confidence ** (1 - iou_aware_factor) * overlap**iou_aware_factor
    keep = (confidence >= conf_thresh)[..., None]
    image = img_size.astype(x.dtype)[:, ::-1].reshape(n, 1, 1, 1, 2)
    low, high = (middle - size / 2) * image, (middle + size / 2) * image
    if clip_bbox:
        low, high = jnp.maximum(low, 0), jnp.minimum(high, image - 1)
    boxes = jnp.where(keep, jnp.concatenate([low, high], -1), 0)
    scores = jnp.where(keep, jnp.moveaxis(jax.nn.sigmoid(head[:, :, 5:]), 2, -1) * confidence[..., None], 0)
    return boxes.reshape(n, -1, 4), scores.reshape(n, -1, class_num)


def _cross_entropy(x: Array, label: Any) -> Array:
    """Binary cross-entropy of sigmoid(x) with a label, 0 to 1."""
    return jnp.maximum(x, 0) - x * label + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _overlaps(middle: Array, size: Array, other_middle: Array, other_size: Array) -> Array:
    """Intersection over union of boxes given by centres and sizes [..., 2], broadcast."""
    low = jnp.maximum(middle - size / 2, other_middle - other_size / 2)
    high = jnp.minimum(middle + size / 2, other_middle + other_size / 2)
    both = jnp.prod(jnp.maximum(high - low, 0), -1)
    union = jnp.prod(size, -1) + jnp.prod(other_size, -1) - both
    return both / jnp.where(union > 0, union, 1)


@op(amp="fp32", method=False)
def yolo_loss(
    x: Array,
    gt_box: Array,
    gt_label: Array,
    anchors: Any,
    anchor_mask: Any,
    class_num: int,
    ignore_thresh: float,
    downsample_ratio: int,
    gt_score: Array | None = None,
    use_label_smooth: bool = True,
    name: str | None = None,
    scale_x_y: float = 1.0,
) -> Array:
    """YOLOv3 loss of one head, by image: [n, len(anchor_mask) (5 + classes), H, H], [n, boxes, 4] -> [n].

    gt_box: (centre x, centre y, width, height) as fractions of the image, one without width or height being none;
    gt_label [n, boxes] classes; gt_score [n, boxes] weights, 1 if not given. anchors: widths and heights in a row in
    pixels of the network's input, of which this head has those in anchor_mask. A true box is learned by the anchor
    (of all) nearest in shape, in the cell of its centre; the other predictions learn that there is nothing, but for
    those that overlap a true box by more than ignore_thresh. use_label_smooth: classes are 1 - s and s, s = min(1 /
    classes, 1 / 40). The gradient flows to x.
    """
    every = _anchors("yolo_loss", anchors)
    mask = np.asarray(anchor_mask, int)
    if mask.size == 0 or mask.min() < 0 or mask.max() >= len(every):
        raise ConfigError(f"yolo_loss: anchor_mask={anchor_mask!r} of {len(every)} anchors; give their indices")
    x = wide(x)
    head = _head("yolo_loss", x, len(mask), class_num)
    n, _, _, height, width = head.shape
    if height != width or gt_box.shape != (n, gt_label.shape[1], 4):
        raise ShapeError(
            f"yolo_loss: x {list(x.shape)}, gt_box {list(gt_box.shape)}, gt_label {list(gt_label.shape)}; needs a "
            "square x, [n, boxes, 4] and [n, boxes]"
        )
    truth = lax.stop_gradient(gt_box.astype(x.dtype))
    score = jnp.ones(gt_label.shape, x.dtype) if gt_score is None else lax.stop_gradient(gt_score.astype(x.dtype))
    inputs = np.array([width, height]) * downsample_ratio
    there = (truth[..., 2] >= 1e-6) & (truth[..., 3] >= 1e-6)
    # of all anchors the nearest in shape, and its place in this head (-1: another head's)
    shape = _overlaps(jnp.zeros(2), truth[..., None, 2:], jnp.zeros(2), jnp.asarray(every / inputs, x.dtype))
    place = np.full(len(every), -1)
    place[mask] = np.arange(len(mask))
    best = jnp.argmax(shape, -1)
    anchor = jnp.where(there, jnp.asarray(place)[best], -1)
    cell = jnp.clip(jnp.floor(truth[..., :2] * width).astype(jnp.int32), 0, width - 1)
    where = (jnp.arange(n)[:, None], jnp.maximum(anchor, 0), slice(None), cell[..., 1], cell[..., 0])
    said = head[where]
    target = truth[..., :2] * width - cell
    ratio = truth[..., 2:] / jnp.asarray(every / inputs, x.dtype)[best]
    log_size = jnp.log(jnp.where(there[..., None], ratio, 1))
    weight = jnp.where(anchor >= 0, score, 0)
    place_loss = _cross_entropy(said[..., :2], target).sum(-1) + jnp.abs(said[..., 2:4] - log_size).sum(-1)
    smooth = min(1 / class_num, 1 / 40) if use_label_smooth else 0.0
    classes = jnp.where(jnp.arange(class_num) == gt_label[..., None], 1 - smooth, smooth)
    found = place_loss * (2 - truth[..., 2] * truth[..., 3]) + _cross_entropy(said[..., 5:], classes).sum(-1)
    objectness = _objectness(head, every[mask], inputs, scale_x_y, ignore_thresh, truth, there, anchor, cell, score)
    return (found * weight).sum(1) + objectness


def _objectness(
    head: Array,
    anchors: np.ndarray,
    inputs: np.ndarray,
    scale_x_y: float,
    ignore_thresh: float,
    truth: Array,
    there: Array,
    anchor: Array,
    cell: Array,
    score: Array,
) -> Array:
    """Cross-entropy of the objectness, by image: with 1 (weighed by score) at true boxes, with 0 elsewhere."""
    n, count, _, height, width = head.shape
    middle, size = _boxes(lax.stop_gradient(head), anchors, inputs, scale_x_y)
    seen = [v[:, None, None, None] for v in (truth[..., :2], truth[..., 2:])]
    overlap = _overlaps(middle[..., None, :], size[..., None, :], *seen)
    best = jnp.where(there[:, None, None, None], overlap, 0).max(-1, initial=0)
    # of several boxes in one place the last one counts
    order = jnp.arange(1, anchor.shape[1] + 1, dtype=jnp.int32)
    places = (jnp.arange(n)[:, None], jnp.maximum(anchor, 0), cell[..., 1], cell[..., 0])
    last = jnp.zeros((n, count, height, width), jnp.int32).at[places].max(jnp.where(anchor >= 0, order, 0))
    padded = jnp.concatenate([jnp.zeros((n, 1), score.dtype), score], 1)
    weight = jnp.take_along_axis(padded, last.reshape(n, -1), 1).reshape(last.shape)
    said = head[:, :, 4]
    nothing = jnp.where((last == 0) & (best <= ignore_thresh), _cross_entropy(said, 0), 0)
    return jnp.where(last > 0, _cross_entropy(said, 1) * weight, nothing).sum((1, 2, 3))


ALIASES: dict[str, str] = {}
