"""to_tensor of an image; apart from the other transforms because it loads jax."""

from __future__ import annotations

from typing import Any

from polyreme.eager import tensor
from polyreme.vision.transforms.functional import to_chw


def to_tensor(pic: Any, data_format: str = "CHW") -> tensor.Tensor:
    """A Pillow image or ndarray [height, width(, channels)] as a float32 Tensor [channels, height, width] (or "HWC").

    Bytes become 0 .. 1; floats keep their values, and signed integers of an ndarray their dtype too.
    """
    return tensor.to_tensor(to_chw(pic, data_format))
