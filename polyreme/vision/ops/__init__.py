"""Operations of detectors: boxes, regions, deformable convolution, JPEG files. Ops are declared in polyreme.ops."""

from polyreme.module_names import suggest_names
from polyreme.ops.detection.boxes import box_coder, prior_box
from polyreme.ops.detection.proposals import distribute_fpn_proposals, generate_proposals, matrix_nms, nms
from polyreme.ops.detection.regions import psroi_pool, roi_align, roi_pool
from polyreme.ops.detection.yolo import yolo_box, yolo_loss
from polyreme.ops.windows.deformable import deform_conv2d
from polyreme.vision.ops.files import decode_jpeg, read_file
from polyreme.vision.ops.layers import DeformConv2D, PSRoIPool, RoIAlign, RoIPool

__all__ = [
    "DeformConv2D",
    "PSRoIPool",
    "RoIAlign",
    "RoIPool",
    "box_coder",
    "decode_jpeg",
    "deform_conv2d",
    "distribute_fpn_proposals",
    "generate_proposals",
    "matrix_nms",
    "nms",
    "prior_box",
    "psroi_pool",
    "read_file",
    "roi_align",
    "roi_pool",
    "yolo_box",
    "yolo_loss",
]

suggest_names(__name__)
