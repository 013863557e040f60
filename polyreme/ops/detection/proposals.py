"""Choosing among boxes: non-maximum suppression, proposals of a region network, and their levels in a pyramid.

How many boxes remain is a value, so all of these compute on the host and raise CaptureError inside a
capture. Boxes are (x1, y1, x2, y2); sorting by score is stable, so of equal scores the first comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.op import OPS, composite
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.detection.boxes import areas, overlaps
from polyreme.ops.indices.gather import gather

# exp of more than this would make a box 1000 / 16 times its anchor's size, beyond any image
_MAX_LOG_RATIO = np.log(1000 / 16)


def read_on_host(who: str, *given: Any) -> list[np.ndarray]:
    """The values of Tensors on the host."""
    what = f"{who}(), whose result has a shape only known on the host"
    return [state.host(v, what) if isinstance(v, state.TensorState) else np.asarray(v) for v in given]


def tensor_of(value: Any, dtype: Any) -> Any:
    """A Tensor of host values."""
    return OPS["cast"](np.asarray(value, dtype), np.dtype(dtype).name)


def descending(scores: np.ndarray) -> np.ndarray:
    """Places of scores from the highest on; of equal ones the first comes first."""
    return np.argsort(-scores, kind="stable")


def suppress(boxes: np.ndarray, threshold: float, extra: float = 0.0, eta: float = 1.0, most: int = -1) -> list[int]:
    """Places of boxes, best first, that no kept one before them overlaps by more than threshold.

    eta: what the threshold is multiplied by after each kept box while it is above a half.
    """
    chosen: list[int] = []
    # of each box with the kept ones before it
    overlap = np.zeros(len(boxes))
    for index in range(len(boxes)):
        if len(chosen) == most:
            break
        if overlap[index] <= threshold:
            chosen.append(index)
            rest = overlap[index + 1 :]
            np.maximum(rest, overlaps(boxes[index + 1 :], boxes[index], extra), out=rest)
            threshold *= eta if threshold > 0.5 else 1.0
    return chosen


@composite(method=False)
def nms(
    boxes: AnyTensor,
    iou_threshold: float = 0.3,
    scores: AnyTensor | None = None,
    category_idxs: AnyTensor | None = None,
    categories: Sequence[int] | None = None,
    top_k: int | None = None,
) -> AnyTensor:
    """Indices (int64) of the boxes [n, 4] that no better one overlaps by more than iou_threshold, best first.

    Better is a higher one of scores [n], or coming earlier where there are none. With category_idxs [n] and categories,
    boxes suppress only those of their own category, and those of no category listed are left out. top_k: how many at
    most. Raises ConfigError where one of the two is missing or top_k is out of range, CaptureError inside a capture.
    """
    (b,) = read_on_host("nms", boxes)
    if b.ndim != 2 or b.shape[1] != 4:
        raise ShapeError(f"nms: boxes {list(b.shape)}; needs [n, 4]")
    if (category_idxs is None) is not (categories is None):
        raise ConfigError("nms: give both category_idxs and categories, or neither")
    if top_k is not None and not 0 <= top_k <= len(b):
        raise ConfigError(f"nms: top_k={top_k} of {len(b)} boxes; give 0 to {len(b)}")
    rank = np.arange(len(b), 0, -1) if scores is None else scores
    s, c = read_on_host("nms", rank, np.zeros(len(b)) if categories is None else category_idxs)
    if s.shape != b.shape[:1] or c.shape != b.shape[:1]:
        raise ShapeError(f"nms: boxes {list(b.shape)}, scores {list(s.shape)}, category_idxs {list(c.shape)}; each [n]")
    order = descending(s)
    found = [np.zeros(0, np.int64)]
    for category in (0,) if categories is None else dict.fromkeys(int(v) for v in categories):
        mine = order[c[order] == category]
        found.append(mine[suppress(b[mine], iou_threshold)])
    chosen = np.concatenate(found)
    return tensor_of(chosen[descending(s[chosen])][:top_k], np.int64)


@composite(method=False)
def matrix_nms(
    bboxes: AnyTensor,
    scores: AnyTensor,
    score_threshold: float,
    post_threshold: float,
    nms_top_k: int,
    keep_top_k: int,
    use_gaussian: bool = False,
    gaussian_sigma: float = 2.0,
    background_label: int = 0,
    normalized: bool = True,
    return_index: bool = False,
    return_rois_num: bool = True,
    name: str | None = None,
) -> tuple[AnyTensor, AnyTensor | None, AnyTensor | None]:
    """(boxes [k, 6], number by image [n] or None, their indices [k, 1] or None): scores decay, no box is dropped.

    bboxes [n, m, 4] and scores [n, classes, m]. In each class but background_label, of the scores above
    score_threshold the best nms_top_k (-1: all) are multiplied by the least, over better boxes j, of (1 - iou) / (1 -
    iou_j), iou_j being j's largest overlap with better ones; with use_gaussian by exp(sigma (iou_j^2 - iou^2)). Those
    then above post_threshold, at most keep_top_k an image (-1: all), make rows (class, score, x1, y1, x2, y2), best
    first. Indices count over all images' boxes. normalized: see detection.boxes. Source: Wang et al., 2020,
    arXiv:2003.10152, section 3.3. Raises CaptureError inside a capture.
    """
    b, s = read_on_host("matrix_nms", bboxes, scores)
    if b.ndim != 3 or s.ndim != 3 or b.shape != (s.shape[0], s.shape[2], 4):
        raise ShapeError(f"matrix_nms: bboxes {list(b.shape)}, scores {list(s.shape)}; give [n, m, 4], [n, classes, m]")
    rows, indices, numbers = [np.zeros((0, 6), b.dtype)], [np.zeros(0, np.int64)], []
    for image in range(len(b)):
        candidates = []
        for label in range(s.shape[1]):
            if label == background_label:
                continue
            order = descending(s[image, label])
            order = order[s[image, label][order] > score_threshold][: None if nms_top_k < 0 else nms_top_k]
            factor = _decay(b[image][order], gaussian_sigma if use_gaussian else None, 0.0 if normalized else 1.0)
            decayed = s[image, label][order] * factor
            candidates += [
                (label, at, score) for at, score in zip(order, decayed, strict=True) if score > post_threshold
            ]
        best = descending(np.array([f[2] for f in candidates]))[: None if keep_top_k < 0 else keep_top_k]
        rows += [np.array([[candidates[i][0], candidates[i][2], *b[image, candidates[i][1]]]], b.dtype) for i in best]
        indices.append(np.array([candidates[i][1] + image * b.shape[1] for i in best], np.int64))
        numbers.append(len(best))
    index = tensor_of(np.concatenate(indices)[:, None], np.int32) if return_index else None
    number = tensor_of(numbers, np.int32) if return_rois_num else None
    return tensor_of(np.concatenate(rows), b.dtype), number, index


def _decay(boxes: np.ndarray, sigma: float | None, extra: float) -> np.ndarray:
    """The factor of the score of each box, best first."""
    # entry (i, j): overlap of box i with the better box j
    iou = np.tril(overlaps(boxes[:, None], boxes[None], extra), -1)
    most = iou.max(1, initial=0)
    better = np.tri(len(boxes), k=-1, dtype=bool)
    if sigma is not None:
        factor = np.exp(sigma * (most**2 - iou**2))
    else:
        factor = (1 - iou) / np.where(most < 1, 1 - most, 1)
    # a box that is a copy of a better one decays nothing more: that one did already
    factor = np.where(better & (most < 1), factor, np.where(better & (sigma is not None), factor, 1))
    return factor.min(1, initial=1)


@composite(method=False)
def distribute_fpn_proposals(
    fpn_rois: AnyTensor,
    min_level: int,
    max_level: int,
    refer_level: int,
    refer_scale: int,
    pixel_offset: bool = False,
    rois_num: AnyTensor | None = None,
    name: str | None = None,
) -> tuple[list[AnyTensor], AnyTensor, list[AnyTensor] | None]:
    """(boxes by level, index [n, 1] that restores their order, numbers by level and image or None).

    A box [x1, y1, x2, y2] of fpn_rois [n, 4] belongs to level floor(refer_level + log2(sqrt(area) / refer_scale)), kept
    within min_level .. max_level. gather(concat(levels), index) is fpn_rois. rois_num [images]: how many are in each.
    pixel_offset: a box is one wider and higher than its corners say. Source: Lin et al., 2016, arXiv:1612.03144,
    equation 1. Raises CaptureError inside a capture.
    """
    (boxes,) = read_on_host("distribute_fpn_proposals", fpn_rois)
    if boxes.ndim != 2 or boxes.shape[1] != 4 or not 0 < min_level <= max_level:
        raise ShapeError(
            f"distribute_fpn_proposals: fpn_rois {list(boxes.shape)}, levels {min_level} to {max_level}; needs [n, 4] "
            "and 0 < min_level <= max_level"
        )
    if refer_scale <= 0:
        raise ConfigError(f"distribute_fpn_proposals: refer_scale={refer_scale}; it must be positive")
    scale = np.sqrt(areas(boxes, 1.0 if pixel_offset else 0.0))
    # the small number lets a box of exactly a level's scale, and one without area, have a level
    level = np.floor(np.log2(scale / refer_scale + 1e-8) + refer_level).clip(min_level, max_level).astype(int)
    places = [np.flatnonzero(level == at) for at in range(min_level, max_level + 1)]
    restore = np.argsort(np.concatenate(places), kind="stable")
    levels = [gather(fpn_rois, tensor_of(p, np.int64)) for p in places]
    numbers = None
    if rois_num is not None:
        (count,) = read_on_host("distribute_fpn_proposals", rois_num)
        if count.ndim != 1 or count.sum() != len(boxes):
            raise ShapeError(f"distribute_fpn_proposals: rois_num={count.tolist()} of {len(boxes)} boxes; add them up")
        image = np.repeat(np.arange(len(count)), count)
        numbers = [tensor_of(np.bincount(image[p], minlength=len(count)), np.int32) for p in places]
    return levels, tensor_of(restore[:, None], np.int32), numbers


@composite(method=False)
def generate_proposals(
    scores: AnyTensor,
    bbox_deltas: AnyTensor,
    img_size: AnyTensor,
    anchors: AnyTensor,
    variances: AnyTensor,
    pre_nms_top_n: int = 6000,
    post_nms_top_n: int = 1000,
    nms_thresh: float = 0.5,
    min_size: float = 0.1,
    eta: float = 1.0,
    pixel_offset: bool = False,
    return_rois_num: bool = False,
    name: str | None = None,
) -> tuple[AnyTensor, AnyTensor, AnyTensor | None]:
    """(boxes [k, 4], their scores [k, 1], number by image [n] or None) of a region proposal network.

    scores [n, A, H, W], bbox_deltas [n, 4 A, H, W], img_size [n, 2] (height, width), anchors, variances [H, W, A, 4].
    Of each image the best pre_nms_top_n (0: all) anchors are moved by their deltas times variances, cut to the image,
    dropped if a side is below max(min_size, 1), and suppressed (nms_thresh; times eta after each kept box while above
    0.5) down to post_nms_top_n. An image without any gives one box of zeros. pixel_offset: a box is one wider and
    higher than its corners say, and its centre must lie in the image. Not differentiable. Source: Ren et al., 2015,
    arXiv:1506.01497, section 3. Raises CaptureError inside a capture.
    """
    s, d, size, a, v = read_on_host("generate_proposals", scores, bbox_deltas, img_size, anchors, variances)
    deltas = (s.shape[0], 4 * s.shape[1], *s.shape[2:])
    if size.shape != (s.shape[0], 2):
        raise ShapeError(f"generate_proposals: img_size {list(size.shape)}; needs {[s.shape[0], 2]}")
    if s.ndim != 4 or d.shape != deltas or a.size != 4 * s[:1].size or v.size != a.size:
        raise ShapeError(
            f"generate_proposals: scores {list(s.shape)}, bbox_deltas {list(d.shape)}, anchors {list(a.shape)}, "
            f"variances {list(v.shape)}; needs [n, A, H, W], [n, 4 A, H, W] and twice [H, W, A, 4]"
        )
    a, v, extra = a.reshape(-1, 4), v.reshape(-1, 4), 1.0 if pixel_offset else 0.0
    chosen, values, numbers = [], [], []
    for score, delta, image in zip(s, d, size, strict=True):
        boxes, best = proposals_of_image(
            score, delta, image, a, v, pre_nms_top_n, post_nms_top_n, nms_thresh, min_size, eta, extra
        )
        chosen.append(boxes)
        values.append(best)
        numbers.append(len(boxes))
    found = tensor_of(np.concatenate(chosen), s.dtype), tensor_of(np.concatenate(values)[:, None], s.dtype)
    return *found, tensor_of(numbers, np.int32) if return_rois_num else None


def proposals_of_image(
    score: np.ndarray, delta: np.ndarray, size: np.ndarray, anchors: np.ndarray, variances: np.ndarray, pre: int,
    post: int, threshold: float, min_size: float, eta: float, extra: float, scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(boxes, scores) of one image of generate_proposals: score [A, H, W], delta [4 A, H, W], anchors [H W A, 4].

    scale: sides are divided by it before they are compared with min_size.
    """
    height, width = size
    flat = score.transpose(1, 2, 0).reshape(-1)
    order = descending(flat)[: pre if pre > 0 else None]
    delta = delta.reshape(score.shape[0], 4, *score.shape[1:]).transpose(2, 3, 0, 1).reshape(-1, 4)
    boxes = _move(anchors[order], delta[order] * variances[order], extra)
    boxes = boxes.clip(0, np.array([width, height, width, height]) - extra)
    fine = _large_enough(boxes, max(min_size, 1.0), extra, width, height, scale)
    boxes, flat = boxes[fine], flat[order][fine]
    stay = suppress(boxes, threshold, extra, eta, post if post > 0 else -1)
    return (boxes[stay], flat[stay]) if stay else (np.zeros((1, 4)), np.zeros(1))


def _move(anchors: np.ndarray, delta: np.ndarray, extra: float) -> np.ndarray:
    """Anchors with centres moved by delta's first two times their size, sizes multiplied by exp of the others."""
    size = anchors[:, 2:] - anchors[:, :2] + extra
    centre = anchors[:, :2] + size / 2 + delta[:, :2] * size
    half = np.exp(np.minimum(delta[:, 2:], _MAX_LOG_RATIO)) * size / 2
    return np.concatenate([centre - half, centre + half - extra], 1)


def _large_enough(
    boxes: np.ndarray, least: float, extra: float, width: float, height: float, scale: float
) -> np.ndarray:
    sides = boxes[:, 2:] - boxes[:, :2] + extra
    fine = [(sides - extra >= (least - extra) * scale).all(1)]
    if extra:
        fine.append((boxes[:, :2] + sides / 2 <= [width, height]).all(1))
    return np.all(fine, 0)


ALIASES: dict[str, str] = {}
