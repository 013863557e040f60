"""For type checkers: polyreme.ops.detection.yolo. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor
from typing import Any

def yolo_box(x: TensorLike, img_size: TensorLike, anchors: Any, class_num: int, conf_thresh: float, downsample_ratio: int, clip_bbox: bool = True, name: str | None = None, scale_x_y: float = 1.0, iou_aware: bool = False, iou_aware_factor: float = 0.5, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
def yolo_loss(x: TensorLike, gt_box: TensorLike, gt_label: TensorLike, anchors: Any, anchor_mask: Any, class_num: int, ignore_thresh: float, downsample_ratio: int, gt_score: TensorLike | None = None, use_label_smooth: bool = True, name: str | None = None, scale_x_y: float = 1.0, *, out: Tensor | None = None) -> Tensor: ...
ALIASES: dict[str, str]
