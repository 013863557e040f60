"""Detectors: choosing among boxes, matching them with true ones, losses, and heads.

Where the number of rows of a result depends on values the Program runs op by op; bipartite_match and ssd_loss, whose
results have known shapes, are computed on the host from within a compiled Program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid import box_choice
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.boxes import box_coder, iou_similarity, prior_box
from polyreme.fluid.layers.loss import smooth_l1, softmax_with_cross_entropy
from polyreme.fluid.layers.nn import conv2d
from polyreme.nn import functional as F
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.indices.gather import gather, gather_nd, where
from polyreme.ops.manipulation import concat, reshape, stack, transpose
from polyreme.ops.scan import cumsum
from polyreme.sequences import lod as lods
from polyreme.static import host


@layer
def multiclass_nms(
    bboxes: Any, scores: Any, score_threshold: float, nms_top_k: int, keep_top_k: int, nms_threshold: float = 0.3,
    normalized: bool = True, nms_eta: float = 1.0, background_label: int = 0, name: str | None = None,
) -> Any:  # fmt: skip
    """Rows (class, score, x1, y1, x2, y2) [k, 6], a sequence for each image, class by class and best first.

    bboxes [n, m, 4], scores [n, classes, m]; or with sequences bboxes [rows, classes, 4], scores [rows, classes]. In
    each class but background_label, of the nms_top_k best scores above score_threshold those boxes stay that no better
    one overlaps by more than nms_threshold, which is multiplied by nms_eta after each while above 0.5. keep_top_k: how
    many an image (-1: all). An image without any has no row; 1.7 gives a row of -1.
    """
    return nms_with_places(bboxes, scores, score_threshold, nms_top_k, keep_top_k, nms_threshold, normalized, nms_eta,
                background_label)[0]  # fmt: skip


@layer
def matrix_nms(
    bboxes: Any, scores: Any, score_threshold: float, post_threshold: float, nms_top_k: int, keep_top_k: int,
    use_gaussian: bool = False, gaussian_sigma: float = 2.0, background_label: int = 0, normalized: bool = True,
    return_index: bool = False, name: str | None = None,
) -> Any:  # fmt: skip
    """Rows (class, score, x1, y1, x2, y2) [k, 6], best first, a sequence for each image, and with return_index the
    place of each among all images' boxes, int32 [k, 1]. Of 1.8; see vision.ops.matrix_nms.
    """
    args = (
        bboxes, scores, float(score_threshold), float(post_threshold), int(nms_top_k), int(keep_top_k),
        bool(use_gaussian), float(gaussian_sigma), int(background_label), bool(normalized), True, True,
    )  # fmt: skip
    results = [([-1, 6], bboxes.dtype, 0), ([bboxes.shape[0]], "int32", 0), ([-1, 1], "int32", 0)]
    rows, number, index = lods.uninferred("matrix_nms", args, results)
    chosen = lods.divided(rows, [lods.offsets(ar.cast(number, "int64"))])
    return (chosen, index) if return_index else chosen


def nms_with_places(
    bboxes: Any, scores: Any, score_threshold: float, nms_top_k: int, keep_top_k: int, nms_threshold: float,
    normalized: bool, nms_eta: float, background_label: int, locality: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(rows of multiclass_nms, the place of each among all images' boxes, int32 [k, 1])."""
    counts = None
    if scores.ndim == 2:
        counts = lods.inner(lods.sequences("fluid.layers.multiclass_nms", scores)[1])
    args = (
        bboxes, scores, counts, float(score_threshold), int(nms_top_k), int(keep_top_k), float(nms_threshold),
        0.0 if normalized else 1.0, float(nms_eta), int(background_label), locality,
    )  # fmt: skip
    images = scores.shape[0] if counts is None else counts.shape[0]
    results = [([-1, 6], bboxes.dtype, 0), ([images], "int64", 0), ([-1, 1], "int32", 0)]
    rows, number, index = lods.uninferred("nms_rows", args, results)
    return lods.divided(rows, [lods.offsets(number)]), index


@layer
def locality_aware_nms(
    bboxes: Any, scores: Any, score_threshold: float, nms_top_k: int, keep_top_k: int, nms_threshold: float = 0.3,
    normalized: bool = True, nms_eta: float = 1.0, background_label: int = -1, name: str | None = None,
) -> Any:  # fmt: skip
    """multiclass_nms after boxes that follow each other and overlap are merged, weighted by their scores, which add up.

    bboxes [n, m, 4]. Source: Zhou et al., 2017, arXiv:1704.03155, section 3.6. Raises ShapeError for quadrangles.
    """
    if bboxes.ndim != 3 or bboxes.shape[2] != 4:
        raise ShapeError(f"fluid.layers.locality_aware_nms: bboxes {list(bboxes.shape)}; needs [n, m, 4]")
    return nms_with_places(bboxes, scores, score_threshold, nms_top_k, keep_top_k, nms_threshold, normalized, nms_eta,
                background_label, locality=True)[0]  # fmt: skip


@layer
def detection_output(
    loc: Any, scores: Any, prior_box: Any, prior_box_var: Any, background_label: int = 0, nms_threshold: float = 0.3,
    nms_top_k: int = 400, keep_top_k: int = 200, score_threshold: float = 0.01, nms_eta: float = 1.0,
    return_index: bool = False,
) -> Any:  # fmt: skip
    """What an SSD head detects: multiclass_nms of boxes from loc [n, m, 4] and softmax of scores [n, m, classes].

    prior_box, prior_box_var [m, 4]. return_index: with the place of each row among all images' boxes, int32 [k, 1].
    """
    boxes = box_coder(prior_box, prior_box_var, loc, "decode_center_size")
    chances = transpose(F.softmax(scores, -1), [0, 2, 1])
    rows, index = nms_with_places(boxes, chances, score_threshold, nms_top_k, keep_top_k, nms_threshold, True, nms_eta,
                       background_label)  # fmt: skip
    return (rows, index) if return_index else rows


@layer
def generate_proposals(
    scores: Any, bbox_deltas: Any, im_info: Any, anchors: Any, variances: Any, pre_nms_top_n: int = 6000,
    post_nms_top_n: int = 1000, nms_thresh: float = 0.5, min_size: float = 0.1, eta: float = 1.0,
    name: str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(boxes [k, 4], their scores [k, 1]) of a region proposal network, a sequence for each image.

    As vision.ops.generate_proposals with boxes in whole pixels; im_info [n, 3]: height, width and scale, by which sides
    are divided before they are compared with min_size.
    """
    args = (scores, bbox_deltas, im_info, anchors, variances, int(pre_nms_top_n), int(post_nms_top_n),
            float(nms_thresh), float(min_size), float(eta))  # fmt: skip
    results = [([-1, 4], scores.dtype, 0), ([-1, 1], scores.dtype, 0), ([scores.shape[0]], "int64", 0)]
    boxes, chances, counts = lods.uninferred("proposal_rows", args, results)
    level = lods.offsets(counts)
    return lods.divided(boxes, [level]), lods.divided(chances, [level])


@layer
def distribute_fpn_proposals(
    fpn_rois: Any, min_level: int, max_level: int, refer_level: int, refer_scale: int, name: str | None = None
) -> tuple[list[Any], Any]:
    """(boxes of each level, a sequence for each image; index [n, 1] that restores their order).

    Boxes are in whole pixels; see vision.ops.distribute_fpn_proposals.
    """
    boxes, lod = lods.sequences("fluid.layers.distribute_fpn_proposals", fpn_rois)
    levels, index, counts = OPS["distribute_fpn_proposals"](
        boxes, min_level, max_level, refer_level, refer_scale, True, lods.inner(lod)
    )
    # how many dims rows have is known, whatever values decide how many rows there are
    divided = [lods.divided(reshape(v, [-1, 4]), [lods.offsets(c)]) for v, c in zip(levels, counts, strict=True)]
    return divided, lods.divided(reshape(index, [-1, 1]), ())


@layer
def collect_fpn_proposals(
    multi_rois: Sequence[Any], multi_scores: Sequence[Any], min_level: int, max_level: int, post_nms_top_n: int,
    name: str | None = None,
) -> Any:  # fmt: skip
    """The post_nms_top_n boxes [k, 4] with the highest scores of all levels and images, image by image.

    multi_rois [rows, 4] and multi_scores [rows, 1] of levels min_level to max_level, a sequence for each image.
    """
    if len(multi_rois) != max_level - min_level + 1 or len(multi_rois) != len(multi_scores):
        raise ConfigError(
            f"fluid.layers.collect_fpn_proposals: {len(multi_rois)} boxes and {len(multi_scores)} scores for levels "
            f"{min_level} to {max_level}"
        )
    counts = [lods.inner(lods.sequences("fluid.layers.collect_fpn_proposals", v)[1]) for v in multi_rois]
    results = [([-1], "int64", 0), ([counts[0].shape[0]], "int64", 0)]
    order, number = lods.uninferred("best_rows", (list(multi_scores), counts, int(post_nms_top_n)), results)
    return lods.divided(gather(concat(list(multi_rois), 0), order), [lods.offsets(number)])


@layer
def bipartite_match(
    dist_matrix: Any, match_type: str | None = None, dist_threshold: float | None = None, name: str | None = None
) -> tuple[Any, Any]:
    """(for each column the row that it is matched with, int32 [n, m], -1 for none; their distances [n, m]).

    dist_matrix [rows, m], a sequence for each image: the larger the nearer. The largest number of all left is a match,
    whose row and column are taken, and so on; with match_type "per_prediction" every column left is then matched with
    its nearest row if that is at least dist_threshold (0.5) near. Raises ConfigError for another match_type.
    """
    if match_type not in (None, "bipartite", "per_prediction"):
        raise ConfigError(f"fluid.layers.bipartite_match: match_type={match_type!r}; 'bipartite' or 'per_prediction'")
    matrix, lod = lods.sequences("fluid.layers.bipartite_match", dist_matrix)
    threshold = None if match_type != "per_prediction" else 0.5 if dist_threshold is None else float(dist_threshold)
    lengths = lods.inner(lod)
    sizes = [lengths._array.shape[0], matrix._array.shape[1]]

    def matched(rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        return box_choice.match_columns(rows, counts, threshold)

    found = host.called(matched, None, [], [(sizes, "int32"), (sizes, matrix.dtype.name)], [matrix, lengths])
    return tuple(lods.divided(v, ()) for v in found)  # type: ignore[return-value]


@layer
def target_assign(
    input: Any, matched_indices: Any, negative_indices: Any = None, mismatch_value: Any = None, name: str | None = None
) -> tuple[Any, Any]:
    """(rows of input where matched_indices [n, m] says, [n, m, k]; 1 there, else 0, [n, m, 1]).

    input [rows, k] or [rows, m, k], a sequence for each image, within which indices count. Where an index is -1 stands
    mismatch_value (0); negative_indices [r, 1], a sequence for each image, name columns whose weight is 1 all the same.
    """
    x, lod = lods.sequences("fluid.layers.target_assign", input)
    starts = reshape(lod[-1][:-1], [-1, 1])
    index = ar.cast(matched_indices, "int64")
    taken = ar.greater_equal(index, 0)
    row = ar.add(ar.cast(starts, "int64"), mt.maximum(index, 0))
    if x.ndim == 2:
        chosen = gather(x, reshape(row, [-1]))
    else:
        column = mt.scale(cumsum(OPS["ones_like"](row), 1), 1, -1)
        chosen = gather_nd(x, stack([reshape(v, [-1]) for v in (row, ar.remainder(column, x.shape[1]))], 1))
    chosen = reshape(chosen, [-1, matched_indices.shape[1], x.shape[-1]])
    weight = reshape(ar.cast(taken, "float32"), [-1, matched_indices.shape[1], 1])
    other = 0 if mismatch_value is None else mismatch_value
    out = where(reshape(taken, [-1, matched_indices.shape[1], 1]), chosen, OPS["full_like"](chosen, other))
    if negative_indices is not None:
        columns, of = lods.sequences("fluid.layers.target_assign", negative_indices)
        image = mt.scale(cumsum(OPS["ones_like"](lods.inner(of)), 0), 1, -1)
        image = OPS["sequence_expand_as"](image, lods.inner(of), lods.rows(columns))
        place = stack([ar.cast(image, "int64"), ar.cast(reshape(columns, [-1]), "int64")], 1)
        ones = OPS["ones_like"](ar.cast(columns, "float32"))
        weight = mt.minimum(OPS["scatter_nd_add"](weight, place, ones), 1.0)
    return lods.divided(out, ()), lods.divided(weight, ())


@layer
def ssd_loss(
    location: Any, confidence: Any, gt_box: Any, gt_label: Any, prior_box: Any, prior_box_var: Any = None,
    background_label: int = 0, overlap_threshold: float = 0.5, neg_pos_ratio: float = 3.0, neg_overlap: float = 0.5,
    loc_loss_weight: float = 1.0, conf_loss_weight: float = 1.0, match_type: str = "per_prediction",
    mining_type: str = "max_negative", normalize: bool = True, sample_size: int | None = None,
) -> Any:  # fmt: skip
    """Loss of an SSD head, [n, 1]: smooth L1 of matched boxes and cross entropy of them and of the hardest others.

    location [n, m, 4], confidence [n, m, classes]; gt_box [rows, 4] and gt_label [rows, 1], a sequence for each image;
    prior_box [m, 4]. Priors are matched by bipartite_match of overlaps; of the others that overlap by less than
    neg_overlap, neg_pos_ratio times as many as matched are taken, those with the largest cross entropy. normalize:
    divided by how many are matched. Source: Liu et al., 2015, arXiv:1512.02325, section 2.2. Raises ConfigError for
    mining_type "hard_example", which 1.7 refuses too, and for sample_size, which belongs to it.
    """
    if mining_type != "max_negative" or sample_size is not None:
        raise ConfigError(
            f"fluid.layers.ssd_loss: mining_type={mining_type!r}, sample_size={sample_size}; it is 'max_negative'"
        )
    m, classes = location.shape[1], confidence.shape[2]
    found = bipartite_match(iou_similarity(gt_box, prior_box), match_type, overlap_threshold)
    matched, distance = (reshape(v, [location._array.shape[0], m]) for v in found)
    _, lod = lods.sequences("fluid.layers.ssd_loss", gt_box)
    label = lods.divided(reshape(ar.cast(gt_label, "int64"), [-1, 1]), lod)
    target, _ = target_assign(label, matched, mismatch_value=background_label)
    cost = softmax_with_cross_entropy(reshape(confidence, [-1, classes]), reshape(target, [-1, 1]))
    cost = reshape(cost, [-1, m])
    count = location._array.shape[0]

    def hardest(costs: np.ndarray, index: np.ndarray, near: np.ndarray) -> np.ndarray:
        return box_choice.hardest_columns(costs, index, near, neg_pos_ratio, neg_overlap)

    (negative,) = host.called(hardest, None, [], [([count, m], "float32")], [cost, matched, distance])
    encoded = lods.divided(box_coder(prior_box, prior_box_var, gt_box), lod)
    place, weight = target_assign(encoded, matched)
    near = reshape(weight, [-1, m])
    moved = smooth_l1(reshape(location, [-1, 4]), reshape(place.detach(), [-1, 4]))
    live = ar.add(near, ar.cast(negative, near.dtype))
    terms = ar.add(
        mt.scale(ar.multiply(cost, live), conf_loss_weight),
        mt.scale(ar.multiply(reshape(moved, [-1, m]), near), loc_loss_weight),
    )
    loss = rd.sum(terms, 1, keepdim=True)
    return ar.divide(loss, mt.maximum(rd.sum(near), 1.0)) if normalize else loss


@layer
def sigmoid_focal_loss(x: Any, label: Any, fg_num: Any, gamma: float = 2, alpha: float = 0.25) -> Any:
    """Focal loss of each class, [n, classes]: logits x, label [n, 1] from 1 on, 0 for background, -1 ignored.

    -alpha (1 - p)^gamma log(p) of the label's class, -(1 - alpha) p^gamma log(1 - p) of the others, over fg_num [1], at
    least 1. Source: Lin et al., 2017, arXiv:1708.02002, equation 5.
    """
    is_own_class = ar.equal(ar.cast(label, "int64"), np.arange(1, x.shape[1] + 1))
    live = ar.cast(ar.not_equal(label, -1), x.dtype)
    p = F.sigmoid(x)
    hit = ar.multiply(mt.scale(ar.pow(ar.subtract(1.0, p), float(gamma)), alpha), F.softplus(mt.scale(x, -1.0)))
    miss = ar.multiply(mt.scale(ar.pow(p, float(gamma)), 1.0 - alpha), F.softplus(x))
    count = mt.maximum(ar.cast(reshape(fg_num, [1]), x.dtype), 1.0)
    return ar.divide(ar.multiply(where(is_own_class, hit, miss), live), count)


@layer
def rpn_target_assign(
    bbox_pred: Any, cls_logits: Any, anchor_box: Any, anchor_var: Any, gt_boxes: Any, is_crowd: Any, im_info: Any,
    rpn_batch_size_per_im: int = 256, rpn_straddle_thresh: float = 0.0, rpn_fg_fraction: float = 0.5,
    rpn_positive_overlap: float = 0.7, rpn_negative_overlap: float = 0.3, use_random: bool = True,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """What a region proposal network is to say of some anchors: (scores [f + b, 1], offsets [f, 4], labels int32
    [f + b, 1], target offsets [f, 4], their weights [f, 4]) of f anchors with an object and b without.

    bbox_pred [n, m, 4], cls_logits [n, m, 1], anchor_box [m, 4], im_info [n, 3]; gt_boxes [rows, 4] and is_crowd [rows,
    1], a sequence for each image, in pixels of the original image, of whose height im_info's is scale times. Of anchors
    inside the image (by rpn_straddle_thresh; all if negative) those have an object that overlap one by
    rpn_positive_overlap, or overlap it most; those have none that overlap all by less than rpn_negative_overlap, one
    that overlaps an object most included, in whose place a first row has no weight; at most rpn_batch_size_per_im an
    image, rpn_fg_fraction of them with an object, drawn if use_random (from NumPy's global generator), else the first
    ones. anchor_var is not used, as in 1.7. Source: Ren et al., 2015, arXiv:1506.01497, section 3.1.2.
    """
    boxes, lod = lods.sequences("fluid.layers.rpn_target_assign", gt_boxes)
    args = (
        anchor_box, boxes, None, lods.inner(lod), is_crowd, im_info, int(rpn_batch_size_per_im),
        float(rpn_straddle_thresh), float(rpn_fg_fraction), float(rpn_positive_overlap), float(rpn_negative_overlap),
        bool(use_random),
    )  # fmt: skip
    place, both, label, target, weight, _ = lods.uninferred("anchor_targets", args, _targets(im_info))
    score = gather(reshape(cls_logits, [-1, 1]), both)
    return score, gather(reshape(bbox_pred, [-1, 4]), place), label, target, weight


def _targets(im_info: Any) -> list[Any]:
    """What anchor_targets gives."""
    places, offsets = ([-1], "int64", 0), ([-1, 4], "float32", 0)
    return [places, places, ([-1, 1], "int32", 0), offsets, offsets, ([im_info.shape[0], 1], "int32", 0)]


@layer
def retinanet_target_assign(
    bbox_pred: Any, cls_logits: Any, anchor_box: Any, anchor_var: Any, gt_boxes: Any, gt_labels: Any, is_crowd: Any,
    im_info: Any, num_classes: int = 1, positive_overlap: float = 0.5, negative_overlap: float = 0.4,
) -> tuple[Any, ...]:  # fmt: skip
    """As rpn_target_assign of all anchors, without drawing: (scores [f + b, num_classes], offsets [f, 4], labels int32
    [f + b, 1], target offsets [f, 4], their weights [f, 4], one more than each image has with an object, int32 [n, 1]).

    cls_logits [n, m, num_classes]; gt_labels [rows, 1] from 1 on, a sequence for each image; a label is 0 where there
    is no object. The last result is what sigmoid_focal_loss divides by. Source: Lin et al., 2017, arXiv:1708.02002.
    """
    boxes, lod = lods.sequences("fluid.layers.retinanet_target_assign", gt_boxes)
    args = (anchor_box, boxes, gt_labels, lods.inner(lod), is_crowd, im_info, -1, -1.0, 1.0, float(positive_overlap),
            float(negative_overlap), False)  # fmt: skip
    place, both, label, target, weight, number = lods.uninferred("anchor_targets", args, _targets(im_info))
    score = gather(reshape(cls_logits, [-1, num_classes]), both)
    return score, gather(reshape(bbox_pred, [-1, 4]), place), label, target, weight, mt.scale(number, 1, 1)


@layer
def retinanet_detection_output(
    bboxes: Sequence[Any], scores: Sequence[Any], anchors: Sequence[Any], im_info: Any, score_threshold: float = 0.05,
    nms_top_k: int = 1000, keep_top_k: int = 100, nms_threshold: float = 0.3, nms_eta: float = 1.0,
) -> Any:  # fmt: skip
    """Rows (class from 1 on, score, x1, y1, x2, y2) [k, 6] in pixels of the original image, best first, a sequence for
    each image.

    Of each level: bboxes [n, m, 4] offsets from anchors [m, 4] in whole pixels, scores [n, m, classes]; im_info [n, 3]:
    height, width and scale. Of each level's nms_top_k best scores above score_threshold (the last level's: above 0)
    those boxes stay that no better one of their class overlaps by more than nms_threshold; see multiclass_nms.
    """
    if not len(bboxes) == len(scores) == len(anchors):
        raise ConfigError(
            f"fluid.layers.retinanet_detection_output: {len(bboxes)} bboxes, {len(scores)} scores, {len(anchors)} "
            "anchors; give one for each level"
        )
    args = (list(bboxes), list(scores), list(anchors), im_info, float(score_threshold), int(nms_top_k),
            int(keep_top_k), float(nms_threshold), float(nms_eta))  # fmt: skip
    results = [([-1, 6], "float32", 0), ([im_info.shape[0]], "int64", 0)]
    rows, number = lods.uninferred("level_rows", args, results)
    return lods.divided(rows, [lods.offsets(number)])


@layer
def generate_proposal_labels(
    rpn_rois: Any, gt_classes: Any, is_crowd: Any, gt_boxes: Any, im_info: Any, batch_size_per_im: int = 256,
    fg_fraction: float = 0.25, fg_thresh: float = 0.25, bg_thresh_hi: float = 0.5, bg_thresh_lo: float = 0.0,
    bbox_reg_weights: Sequence[float] = (0.1, 0.1, 0.2, 0.2), class_nums: int | None = None, use_random: bool = True,
    is_cls_agnostic: bool = False, is_cascade_rcnn: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """What the second stage of a detector is trained on: (boxes [k, 4], labels int32 [k, 1], offsets [k, 4 class_nums],
    their weights, the same weights again), a sequence for each image.

    rpn_rois [rows, 4] in pixels of the scaled image; gt_classes [true, 1] from 1 on, is_crowd [true, 1] and gt_boxes
    [true, 4] of the original one, a sequence for each image; im_info [n, 3]: height, width and scale. Of regions and
    true boxes together those have an object that overlap one by fg_thresh, at most fg_fraction of batch_size_per_im;
    those have none (label 0) that overlap all by bg_thresh_lo to bg_thresh_hi; drawn if use_random (from NumPy's global
    generator), else the first ones. Offsets are divided by bbox_reg_weights, and stand at the class's columns; with
    is_cls_agnostic at the second of two. Source: Girshick, 2015, arXiv:1504.08083, section 2.3. Raises ConfigError for
    is_cascade_rcnn.
    """
    if is_cascade_rcnn or class_nums is None:
        raise ConfigError(
            f"fluid.layers.generate_proposal_labels: class_nums={class_nums}, is_cascade_rcnn={is_cascade_rcnn}; give "
            "the number of classes, and label the boxes of later stages with py_func"
        )
    regions, lod = lods.sequences("fluid.layers.generate_proposal_labels", rpn_rois)
    true, true_lod = lods.sequences("fluid.layers.generate_proposal_labels", gt_boxes)
    args = (
        regions, lods.inner(lod), gt_classes, is_crowd, true, lods.inner(true_lod), im_info, int(batch_size_per_im),
        float(fg_fraction), float(fg_thresh), float(bg_thresh_hi), float(bg_thresh_lo), list(bbox_reg_weights),
        int(class_nums), bool(use_random), bool(is_cls_agnostic),
    )  # fmt: skip
    wide = ([-1, 4 * (2 if is_cls_agnostic else class_nums)], "float32", 0)
    results = [([-1, 4], "float32", 0), ([-1, 1], "int32", 0), wide, wide, ([im_info.shape[0]], "int64", 0)]
    *found, number = lods.uninferred("region_targets", args, results)
    level = lods.offsets(number)
    boxes, label, target, weight = (lods.divided(v, [level]) for v in found)
    return boxes, label, target, weight, lods.divided(OPS["assign"](weight), [level])


@layer
def generate_mask_labels(
    im_info: Any, gt_classes: Any, is_crowd: Any, gt_segms: Any, rois: Any, labels_int32: Any, num_classes: int,
    resolution: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """What the mask branch of a detector is trained on: (boxes [k, 4], their places among rois int32 [k, 1], masks
    int32 [k, num_classes resolution^2]), a sequence for each image.

    gt_segms [points, 2]: corners of polygons, three levels of sequences (objects of an image, polygons of an object,
    points of a polygon), in pixels of the original image as gt_classes and is_crowd [true, 1]; rois and labels_int32
    come from generate_proposal_labels. A region with an object has the mask of the object whose polygons' box overlaps
    it most: 1 where the centre of a cell lies in one of its polygons, else 0, at the columns of its class; -1, which no
    loss counts, at others. An image without such regions gives its first one of the background, with -1 alone.
    Source: He et al., 2017, arXiv:1703.06870, section 3.
    """
    what = "fluid.layers.generate_mask_labels"
    points, lod = lods.sequences(what, gt_segms)
    regions, region_lod = lods.sequences(what, rois)
    if len(lod) != 3:
        raise ConfigError(f"{what}: gt_segms has {len(lod)} levels of sequences; objects, polygons and points are 3")
    args = (
        im_info, gt_classes, is_crowd, points, [lods.lengths(level) for level in lod], regions, lods.inner(region_lod),
        labels_int32, int(num_classes), int(resolution),
    )  # fmt: skip
    results = [
        ([-1, 4], "float32", 0), ([-1, 1], "int32", 0), ([-1, num_classes * resolution**2], "int32", 0),
        ([im_info.shape[0]], "int64", 0),
    ]  # fmt: skip
    boxes, places, masks, number = lods.uninferred("mask_targets", args, results)
    level = lods.offsets(number)
    return lods.divided(boxes, [level]), lods.divided(places, [level]), lods.divided(masks, [level])


@layer
def multi_box_head(
    inputs: Sequence[Any], image: Any, base_size: int, num_classes: int, aspect_ratios: Sequence[Any],
    min_ratio: int | None = None, max_ratio: int | None = None, min_sizes: Any = None, max_sizes: Any = None,
    steps: Any = None, step_w: Any = None, step_h: Any = None, offset: float = 0.5,
    variance: Any = (0.1, 0.1, 0.2, 0.2), flip: bool = True, clip: bool = False, kernel_size: int = 1, pad: int = 0,
    stride: int = 1, name: str | None = None, min_max_aspect_ratios_order: bool = False,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """An SSD head on feature maps: (locations [n, m, 4], scores [n, m, num_classes], boxes [m, 4], variances [m, 4]).

    One of aspect_ratios, min_sizes and max_sizes for each of inputs; without min_sizes, sizes go evenly from min_ratio
    to max_ratio percent of base_size, after a first map of 10 and 20. steps, or step_w and step_h: one for each map.
    Raises ConfigError where they are not as many. Source: Liu et al., 2015, arXiv:1512.02325, section 2.2.
    """
    count = len(inputs)
    if min_sizes is None:
        min_sizes, max_sizes = _sizes_by_ratio(count, base_size, min_ratio, max_ratio)
    listed = {"aspect_ratios": aspect_ratios, "min_sizes": min_sizes, "max_sizes": max_sizes, "steps": steps,
              "step_w": step_w, "step_h": step_h}  # fmt: skip
    for what, value in listed.items():
        if value is not None and len(value) != count:
            raise ConfigError(f"fluid.layers.multi_box_head: {len(value)} {what} for {count} inputs; one for each")
    across, down = (steps, steps) if steps is not None else (step_w, step_h)
    locations, scores, priors, variances = [], [], [], []
    for k, x in enumerate(inputs):
        step = (across[k] if across else 0.0, down[k] if down else 0.0)
        largest = None if max_sizes is None else _listed(max_sizes[k])
        box, spread = prior_box(
            x, image, _listed(min_sizes[k]), largest, _listed(aspect_ratios[k]), variance, flip, clip, step, offset,
            None, min_max_aspect_ratios_order,
        )  # fmt: skip
        priors.append(reshape(box, [-1, 4]))
        variances.append(reshape(spread, [-1, 4]))
        for width, outs in ((4, locations), (num_classes, scores)):
            out = conv2d(x, box.shape[2] * width, kernel_size, stride, pad)
            outs.append(reshape(transpose(out, [0, 2, 3, 1]), [0, -1, width]))
    return concat(locations, 1), concat(scores, 1), concat(priors, 0), concat(variances, 0)


def _listed(value: Any) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _sizes_by_ratio(count: int, base_size: int, low: int | None, high: int | None) -> tuple[list[float], list[float]]:
    if low is None or high is None or count < 3:
        raise ConfigError(
            "fluid.layers.multi_box_head: give min_sizes and max_sizes, or min_ratio and max_ratio for 3 inputs or more"
        )
    step = (high - low) // (count - 2)
    ratios = list(range(low, high + 1, step))[: count - 1]
    least = [base_size * 0.1, *(base_size * r / 100 for r in ratios)]
    most = [base_size * 0.2, *(base_size * (r + step) / 100 for r in ratios)]
    return least, most


__all__ = [
    "bipartite_match", "collect_fpn_proposals", "detection_output", "distribute_fpn_proposals",
    "generate_mask_labels", "generate_proposal_labels", "generate_proposals", "locality_aware_nms", "matrix_nms",
    "multi_box_head", "multiclass_nms", "retinanet_detection_output", "retinanet_target_assign", "rpn_target_assign",
    "sigmoid_focal_loss", "ssd_loss", "target_assign",
]  # fmt: skip
