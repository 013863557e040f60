"""paddle.base.core.eager: the class of Tensors under its path in PaddlePaddle's C++ core."""

from polyreme.eager.tensor import Tensor

__all__ = ["Tensor"]
