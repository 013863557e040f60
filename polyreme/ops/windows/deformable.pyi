"""For type checkers: polyreme.ops.windows.deformable. Written by tools/write_stubs.py."""

from polyreme.core.annotations import Padding
from polyreme.core.annotations import Sizes
from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def deform_conv2d(x: TensorLike, offset: TensorLike, weight: TensorLike, bias: TensorLike | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1, deformable_groups: int = 1, groups: int = 1, mask: TensorLike | None = None, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
ALIASES: dict[str, str]
