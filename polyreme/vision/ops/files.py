"""Image files as Tensors of bytes and of pixels. They read the host, so they cannot be captured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, DataError, DTypeError
from polyreme.vision.image import decoded

# Pillow's name of each mode; "unchanged" keeps the file's
_MODES = {"unchanged": None, "gray": "L", "rgb": "RGB"}


def read_file(filename: str | os.PathLike[str], name: str | None = None) -> Tensor:
    """The bytes of a file, uint8 [bytes]. Raises DataError for one that cannot be read."""
    try:
        raw = Path(filename).read_bytes()
    except OSError as error:
        raise DataError(f"read_file: {filename} cannot be read: {error.strerror}") from error
    return to_tensor(np.frombuffer(raw, np.uint8))


def decode_jpeg(x: Any, mode: str = "unchanged", name: str | None = None) -> Tensor:
    """The pixels of a JPEG file given as its bytes, uint8 [bytes] -> uint8 [channels, height, width].

    mode: "gray" (1 channel), "rgb" (3) or "unchanged", what the file has. Raises DataError for bytes that are no JPEG
    image, ConfigError for another mode.
    """
    if mode not in _MODES:
        raise ConfigError(f"decode_jpeg: mode={mode!r}; give {', '.join(_MODES)}")
    raw = state.host(x, "decode_jpeg(), whose result has a shape only known on the host")
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raise DTypeError(f"decode_jpeg: x is {raw.dtype.name} {list(raw.shape)}; give a file's bytes, uint8 [bytes]")
    image = decoded(raw.tobytes(), "JPEG")
    pixels = np.asarray(image if _MODES[mode] is None else image.convert(_MODES[mode]))
    return to_tensor(np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)))
