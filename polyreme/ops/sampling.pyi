"""For type checkers: polyreme.ops.sampling. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor
from typing import Any

def top_p_sampling(x: TensorLike, ps: TensorLike, threshold: TensorLike | None = None, topp_seed: TensorLike | None = None, seed: int = -1, k: int = 0, mode: str = 'truncated', return_top: bool = False, key: Tensor | None = ..., name: str | None = None, *, out: Tensor | None = None) -> Any: ...
