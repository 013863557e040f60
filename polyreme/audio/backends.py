"""Reading and writing sound files: one backend, "wave_backend", for WAVE files."""

from __future__ import annotations

import os

from polyreme.audio import wave_file
from polyreme.audio.wave_file import AudioInfo, File
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError

_BACKEND = "wave_backend"


def list_available_backends() -> list[str]:
    """Names that set_backend takes."""
    return [_BACKEND]


def get_current_backend() -> str:
    """Name of the backend in use."""
    return _BACKEND


def set_backend(backend_name: str) -> None:
    """Choose the backend; ConfigError for any but "wave_backend"."""
    if backend_name != _BACKEND:
        raise ConfigError(f"set_backend: {backend_name!r}; {_BACKEND!r} is the only one: convert files to WAVE")


def info(filepath: File) -> AudioInfo:
    """What a file's header says. DataError for a file that is no WAVE file, or torn."""
    return wave_file.read_info(filepath)


def load(
    filepath: File,
    frame_offset: int = 0,
    num_frames: int = -1,
    normalize: bool = True,
    channels_first: bool = True,
) -> tuple[Tensor, int]:
    """(samples [channels, frames], frames a second); [frames, channels] with channels_first=False.

    normalize gives float32 in [-1, 1]; without it samples are as stored (uint8, int16, int32, float32 or float64).
    num_frames=-1 reads up to the end. DataError for a file that is no WAVE file, or torn.
    """
    samples, rate = wave_file.read(filepath, frame_offset, num_frames, normalize)
    return to_tensor(samples.T if channels_first else samples), rate


def save(
    filepath: str | os.PathLike[str],
    src: Tensor,
    sample_rate: int,
    channels_first: bool = True,
    encoding: str | None = None,
    bits_per_sample: int | None = 16,
) -> None:
    """Write src [channels, frames] (or [frames, channels] with channels_first=False) at sample_rate frames a second.

    Floats stand in [-1, 1], others are cut off; integers are stored as they are. encoding: "PCM_S" (16, 24 or 32 bits),
    "PCM_U" (8 bits) or "PCM_F" (floats of 32 or 64 bits); None takes integers.
    """
    samples = src.numpy()
    bits = 16 if bits_per_sample is None else bits_per_sample
    wave_file.write(filepath, samples.T if channels_first else samples, sample_rate, encoding, bits)


__all__ = ["AudioInfo", "get_current_backend", "info", "list_available_backends", "load", "save", "set_backend"]
