"""For type checkers: polyreme.ops.moments. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def layer_norm_moments(x: TensorLike, dims: int = 1, epsilon: float = 1e-05, name: str | None = None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
def rms_norm_moments(x: TensorLike, dims: int = 1, epsilon: float = 1e-05, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
ALIASES: dict[str, str]
