"""Kernels of detection."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ShapeError
from polyreme.fluid.box_choice import nms_rows
from polyreme.fluid.layers import boxes
from polyreme.paddle_scripts.internals.kernels.registry import Kernels, listing
from polyreme.vision import ops as vision

KERNELS: Kernels = {}
_kernel = listing(KERNELS)


@_kernel
def _roi_align(
    x: Any, boxes: Any, boxes_num: Any, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, aligned: bool,
) -> Any:  # fmt: skip
    return vision.roi_align(x, boxes, boxes_num, (pooled_height, pooled_width), spatial_scale, sampling_ratio, aligned)


@_kernel
def _roi_pool(x: Any, boxes: Any, boxes_num: Any, pooled_height: int, pooled_width: int, spatial_scale: float) -> Any:
    return vision.roi_pool(x, boxes, boxes_num, (pooled_height, pooled_width), spatial_scale)


@_kernel
def _psroi_pool(
    x: Any, boxes: Any, boxes_num: Any, pooled_height: int, pooled_width: int, output_channels: int,
    spatial_scale: float,
) -> Any:  # fmt: skip
    if x.shape[1] != output_channels * pooled_height * pooled_width:
        raise ShapeError(
            f"_C_ops.psroi_pool: x has {x.shape[1]} channels; output_channels={output_channels} of bins "
            f"{pooled_height} x {pooled_width} need {output_channels * pooled_height * pooled_width}"
        )
    return vision.psroi_pool(x, boxes, boxes_num, (pooled_height, pooled_width), spatial_scale)


@_kernel
def _prior_box(
    input: Any, image: Any, min_sizes: Any, max_sizes: Any, aspect_ratios: Any, variances: Any, flip: bool, clip: bool,
    step_w: float, step_h: float, offset: float, min_max_aspect_ratios_order: bool,
) -> Any:  # fmt: skip
    return vision.prior_box(
        input, image, min_sizes, max_sizes or None, aspect_ratios, variances, flip, clip, (step_w, step_h), offset,
        min_max_aspect_ratios_order,
    )  # fmt: skip


@_kernel
def _generate_proposals(
    scores: Any, bbox_deltas: Any, im_shape: Any, anchors: Any, variances: Any, pre_nms_top_n: int, post_nms_top_n: int,
    nms_thresh: float, min_size: float, eta: float, pixel_offset: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    return vision.generate_proposals(
        scores, bbox_deltas, im_shape, anchors, variances, pre_nms_top_n, post_nms_top_n, nms_thresh, min_size, eta,
        pixel_offset, return_rois_num=True,
    )  # fmt: skip


@_kernel
def _matrix_nms(
    bboxes: Any, scores: Any, score_threshold: float, nms_top_k: int, keep_top_k: int, post_threshold: float = 0.0,
    use_gaussian: bool = False, gaussian_sigma: float = 2.0, background_label: int = 0, normalized: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    rows, number, index = vision.matrix_nms(
        bboxes, scores, score_threshold, post_threshold, nms_top_k, keep_top_k, use_gaussian, gaussian_sigma,
        background_label, normalized, return_index=True, return_rois_num=True,
    )  # fmt: skip
    return rows, index, number


@_kernel
def _box_coder(
    prior_box: Any, prior_box_var: Any, target_box: Any, code_type: str = "encode_center_size",
    box_normalized: bool = True, axis: int = 0, variance: Any = (),
) -> Any:  # fmt: skip
    by = list(variance) if prior_box_var is None and variance else prior_box_var
    return vision.box_coder(prior_box, by, target_box, code_type, box_normalized, axis)


@_kernel
def _distribute_fpn_proposals(
    fpn_rois: Any, rois_num: Any, min_level: int, max_level: int, refer_level: int, refer_scale: int,
    pixel_offset: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    rois, restore, nums = vision.distribute_fpn_proposals(
        fpn_rois, min_level, max_level, refer_level, refer_scale, pixel_offset, rois_num
    )
    return rois, nums, restore


@_kernel
def _yolo_loss(
    x: Any, gt_box: Any, gt_label: Any, gt_score: Any, anchors: Any, anchor_mask: Any, class_num: int,
    ignore_thresh: float, downsample_ratio: int, use_label_smooth: bool, scale_x_y: float,
) -> Any:  # fmt: skip
    return vision.yolo_loss(
        x, gt_box, gt_label, anchors, anchor_mask, class_num, ignore_thresh, downsample_ratio, gt_score,
        use_label_smooth, scale_x_y=scale_x_y,
    )  # fmt: skip


@_kernel
def _deformable_conv(
    x: Any, offset: Any, filter: Any, mask: Any, strides: Any, paddings: Any, dilations: Any, deformable_groups: int,
    groups: int, im2col_step: int,
) -> Any:  # fmt: skip
    return vision.deform_conv2d(x, offset, filter, None, strides, paddings, dilations, deformable_groups, groups, mask)


@_kernel
def _yolo_box(
    x: Any, img_size: Any, anchors: Any, class_num: int, conf_thresh: float, downsample_ratio: int, clip_bbox: bool,
    scale_x_y: float, iou_aware: bool, iou_aware_factor: float,
) -> Any:  # fmt: skip
    return vision.yolo_box(
        x, img_size, anchors, class_num, conf_thresh, downsample_ratio, clip_bbox, None, scale_x_y, iou_aware,
        iou_aware_factor,
    )  # fmt: skip


@_kernel
def _multiclass_nms3(
    bboxes: Any, scores: Any, rois_num: Any = None, score_threshold: float = 0.0, nms_top_k: int = -1,
    keep_top_k: int = -1, nms_threshold: float = 0.3, normalized: bool = True, nms_eta: float = 1.0,
    background_label: int = 0,
) -> tuple[Any, Any, Any]:  # fmt: skip
    rows, counts, index = nms_rows(
        bboxes, scores, rois_num, score_threshold, nms_top_k, keep_top_k, nms_threshold, 0.0 if normalized else 1.0,
        nms_eta, background_label, False, rois_num is not None,
    )  # fmt: skip
    return rows, index, counts.astype("int32")


@_kernel
def _anchor_generator(
    input: Any, anchor_sizes: Any, aspect_ratios: Any, variances: Any, stride: Any, offset: float = 0.5
) -> tuple[Any, Any]:
    return boxes.anchor_generator(input, anchor_sizes, aspect_ratios, variances, stride, offset)
