"""For type checkers: polyreme.ops.signal. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def stft(x: TensorLike, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: TensorLike | None = None, center: bool = True, pad_mode: str = 'reflect', normalized: bool = False, onesided: bool | None = None, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
def istft(x: TensorLike, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: TensorLike | None = None, center: bool = True, normalized: bool = False, onesided: bool = True, length: int | None = None, return_complex: bool = False, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
