"""For type checkers: polyreme.ops.windows.fractional_pooling. Written by tools/write_stubs.py."""

from polyreme.core.annotations import Sizes
from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor
from typing import Any

def fractional_max_pool2d(x: TensorLike, output_size: Sizes, kernel_size: Sizes | None = None, random_u: float | None = None, return_mask: bool = False, key: Tensor | None = ..., name: str | None = None, *, out: Tensor | None = None) -> Any: ...
def fractional_max_pool3d(x: TensorLike, output_size: Sizes, kernel_size: Sizes | None = None, random_u: float | None = None, return_mask: bool = False, key: Tensor | None = ..., name: str | None = None, *, out: Tensor | None = None) -> Any: ...
