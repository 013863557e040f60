"""For type checkers: polyreme.ops.viterbi. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def viterbi_path(potentials: TensorLike, transition_params: TensorLike, lengths: TensorLike, include_bos_eos_tag: bool = True, name: str | None = None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
def viterbi_decode(potentials: Tensor, transition_params: Tensor, lengths: Tensor, include_bos_eos_tag: bool = True, name: str | None = None) -> tuple[Tensor, Tensor]: ...
