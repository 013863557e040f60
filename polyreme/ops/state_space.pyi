"""For type checkers: polyreme.ops.state_space. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def selective_scan(x: TensorLike, steps: TensorLike, decay: TensorLike, into: TensorLike, out_of: TensorLike, state: TensorLike, chunk: int = 64, name: str | None = None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
def head_state_scan(x: TensorLike, steps: TensorLike, decay: TensorLike, into: TensorLike, out_of: TensorLike, state: TensorLike, chunk: int = 64, name: str | None = None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
