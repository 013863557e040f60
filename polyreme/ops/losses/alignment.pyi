"""For type checkers: polyreme.ops.losses.alignment. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def ctc_loss(log_probs: TensorLike, labels: TensorLike, input_lengths: TensorLike, label_lengths: TensorLike, blank: int = 0, reduction: str = 'mean', norm_by_times: bool = False, zero_infinity: bool = False, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
def rnnt_loss(input: TensorLike, label: TensorLike, input_lengths: TensorLike, label_lengths: TensorLike, blank: int = 0, fastemit_lambda: float = 0.001, reduction: str = 'mean', name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
