"""Windows of the root namespace, Tensors of window_length weights by audio.functional.get_window; and frames."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.audio.functional import get_window
from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.creation import zeros


def hann_window(window_length: int, periodic: bool = True, *, dtype: Any = "float32", **options: Any) -> Any:
    """0.5 - 0.5 cos(2 pi n / N) -> [window_length]."""
    return _window("hann", window_length, periodic, dtype, options)


def hamming_window(
    window_length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, *, dtype: Any = "float32",
    **options: Any,
) -> Any:  # fmt: skip
    """alpha - beta cos(2 pi n / N) -> [window_length]."""
    wave = _window("hann", window_length, periodic, "float64", {})  # 0.5 - 0.5 cos
    window = (alpha - beta + 2 * beta * wave).astype(dtypes.as_dtype(dtype).name)
    return _with_options(window, options)


def blackman_window(window_length: int, periodic: bool = True, *, dtype: Any = "float32", **options: Any) -> Any:
    """Blackman's window -> [window_length]."""
    return _window("blackman", window_length, periodic, dtype, options)


def bartlett_window(window_length: int, periodic: bool = True, *, dtype: Any = "float32", **options: Any) -> Any:
    """The triangle that ends at 0 -> [window_length]."""
    return _window("bartlett", window_length, periodic, dtype, options)


def kaiser_window(
    window_length: int, periodic: bool = True, beta: float = 12.0, *, dtype: Any = "float32", **options: Any
) -> Any:
    """Kaiser's window of shape beta -> [window_length]."""
    return _window(("kaiser", beta), window_length, periodic, dtype, options)


def _window(kind: Any, length: int, periodic: bool, dtype: Any, options: dict[str, Any]) -> Any:
    window = get_window(kind, length, fftbins=periodic, dtype=dtypes.as_dtype(dtype).name)
    return _with_options(window, options)


def _with_options(window: Any, options: dict[str, Any]) -> Any:
    """options: those of every creation function, of which layout, device and pin_memory say nothing here."""
    unknown = options.keys() - {"layout", "device", "pin_memory", "requires_grad", "name"}
    if unknown:
        raise TypeError(f"a window takes no {', '.join(sorted(unknown))}")
    window.stop_gradient = not options.get("requires_grad", False)
    return window


def frame(x: Any, frame_length: int, hop_length: int, axis: int = -1, name: str | None = None) -> Any:
    """Overlapping pieces of a signal: axis -1: [..., seq] -> [..., frame_length, frames]; 0: [seq, ...] -> [frames,
    frame_length, ...]. Raises ShapeError for a signal shorter than a piece.
    """
    if axis not in (0, -1):
        raise ConfigError(f"frame: axis={axis}; the signal lies along the first dim, 0, or the last, -1")
    if x.shape[axis] < frame_length:
        raise ShapeError(f"frame: frame_length={frame_length} for a signal of {x.shape[axis]}")
    pieces = x.unfold(axis, frame_length, hop_length)
    if axis == 0:
        return pieces.moveaxis(-1, 1)
    return pieces.moveaxis(-1, -2)


def overlap_add(x: Any, hop_length: int, axis: int = -1, name: str | None = None) -> Any:
    """The signal whose overlapping pieces, hop_length apart, x is, summed where they overlap; the reverse of frame.

    axis -1: [..., frame_length, frames] -> [..., seq]; 0: [frames, frame_length, ...] -> [seq, ...], with seq =
    (frames - 1) * hop_length + frame_length. Raises ShapeError for fewer than two dims.
    """
    if axis not in (0, -1):
        raise ConfigError(f"overlap_add: axis={axis}; frames lie along the first dim, 0, or the last, -1")
    if hop_length < 1:
        raise ConfigError(f"overlap_add: hop_length={hop_length}; at least 1")
    if x.ndim < 2:
        raise ShapeError(f"overlap_add: x {list(x.shape)} has {x.ndim} dims; frames and their samples are two")
    pieces = x if axis == 0 else x.moveaxis([-1, -2], [0, 1])
    frames, length = pieces.shape[:2]
    places = (np.arange(frames)[:, None] * hop_length + np.arange(length)).ravel()
    seq = (frames - 1) * hop_length + length
    samples = zeros([seq, *pieces.shape[2:]], x.dtype)
    added = samples.index_add(to_tensor(places), 0, pieces.flatten(0, 1))
    return added if axis == 0 else added.moveaxis(0, -1)
