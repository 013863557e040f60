"""For type checkers: polyreme.ops.indices.subscripts. Written by tools/write_stubs.py."""

from collections.abc import Sequence
from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor
from typing import Any

Spec = tuple[tuple, ...]
def getitem(x: TensorLike, arrays: Sequence[TensorLike], spec: tuple[Any, ...], name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
def setitem(x: TensorLike, value: TensorLike, arrays: Sequence[TensorLike], spec: tuple[Any, ...], name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
def setitem_where(x: TensorLike, value: TensorLike, mask: TensorLike, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
