"""For type checkers: polyreme.ops.detection.regions. Written by tools/write_stubs.py."""

from polyreme.core.annotations import Sizes
from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def roi_align(x: TensorLike, boxes: TensorLike, boxes_num: TensorLike, output_size: Sizes, spatial_scale: float = 1.0, sampling_ratio: int = -1, aligned: bool = True, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
def roi_pool(x: TensorLike, boxes: TensorLike, boxes_num: TensorLike, output_size: Sizes, spatial_scale: float = 1.0, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
def psroi_pool(x: TensorLike, boxes: TensorLike, boxes_num: TensorLike, output_size: Sizes, spatial_scale: float = 1.0, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
ALIASES: dict[str, str]
