"""For type checkers: polyreme.ops.unique. Written by tools/write_stubs.py."""

from polyreme.core.annotations import DTypeLike
from polyreme.eager.tensor import Tensor
from typing import Any

def unique(x: Tensor, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False, axis: int | None = None, dtype: DTypeLike = 'int64', sorted: bool = True, name: str | None = None) -> Any: ...
def unique_consecutive(x: Tensor, return_inverse: bool = False, return_counts: bool = False, axis: int | None = None, dtype: DTypeLike = 'int64', name: str | None = None) -> Any: ...
