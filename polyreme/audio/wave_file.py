"""WAVE files: integers of 8 to 32 bits and floats, as ndarrays [frames, channels].

Format: Microsoft, "Multimedia Programming Interface and Data Specifications 1.0", 1991, and "Multiple Channel Audio
Data and WAVE Files" for the extensible header. The standard library's reader takes integers only, so this one reads
the chunks itself. 8 bits are unsigned, as the format has it, all others signed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from polyreme.errors import ConfigError, DataError, DTypeError, ShapeError

_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_HEADER_BYTES = 40  # of the longest form of the chunk that says how samples are stored
_STORED = {
    (_INTEGERS, 8): "u1",
    (_INTEGERS, 16): "<i2",
    (_INTEGERS, 24): "<i4",
    (_INTEGERS, 32): "<i4",
    (_FLOATS, 32): "<f4",
    (_FLOATS, 64): "<f8",
}
_ENCODINGS = {"PCM_U": _INTEGERS, "PCM_S": _INTEGERS, "PCM_F": _FLOATS}
File = str | os.PathLike[str] | BinaryIO


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says: frames a second, frames, channels, bits of one sample and their encoding.

    encoding: "PCM_U" unsigned integers, "PCM_S" signed, "PCM_F" floats.
    """

    sample_rate: int
    num_samples: int
    num_channels: int
    bits_per_sample: int
    encoding: str


@dataclass(frozen=True)
class _WaveFormat:
    """Where the samples are: kind of number, bits, channels, frames a second, first byte, frames."""

    kind: int
    bits: int
    channels: int
    rate: int
    start: int
    frames: int

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.bits // 8


def _layout(file: BinaryIO, name: str) -> _WaveFormat:
    head = file.read(12)
    if len(head) < 12 or head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise DataError(f"{name}: starts with {head[:12]!r}; only WAVE files are read here: convert it to one")
    form = None
    while len(chunk := file.read(8)) == 8:
        tag, nbytes = chunk[:4], struct.unpack("<I", chunk[4:])[0]
        if tag == b"fmt ":
            form = file.read(min(nbytes, _HEADER_BYTES))
            file.seek(nbytes + nbytes % 2 - len(form), os.SEEK_CUR)
        elif tag == b"data" and form is not None:
            return _check(form, file, nbytes, name)
        else:
            file.seek(nbytes + nbytes % 2, os.SEEK_CUR)
    raise DataError(f"{name}: the file ends before its samples; it is torn, write it again")


def _check(form: bytes, file: BinaryIO, nbytes: int, name: str) -> _WaveFormat:
    """The layout of `nbytes` of samples that start where the file stands."""
    if len(form) < 16:
        raise DataError(f"{name}: a header of {len(form)} bytes where 16 are needed; it is torn, write it again")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = struct.unpack("<H", form[24:26])[0]
    if (kind, bits) not in _STORED or not channels:
        raise DataError(f"{name}: format {kind} of {bits} bits, {channels} channels; integers and floats are read here")
    start = file.tell()
    there = file.seek(0, os.SEEK_END) - start
    if there < nbytes:
        raise DataError(f"{name}: {there} bytes of samples, its header says {nbytes}; it is torn, write it again")
    return _WaveFormat(kind, bits, channels, rate, start, nbytes // (channels * bits // 8))


class _Opened:
    """A file by its path, closed at the end, or one that is open already and stays so."""

    def __init__(self, file: File) -> None:
        self.source = file

    def __enter__(self) -> tuple[BinaryIO, str]:
        if isinstance(self.source, (str, os.PathLike)):
            self.file: BinaryIO = open(self.source, "rb")
        else:
            self.file = self.source
        return self.file, str(getattr(self.file, "name", self.file))

    def __exit__(self, *_: object) -> None:
        if self.file is not self.source:
            self.file.close()


def read_info(file: File) -> AudioInfo:
    """The header of a file. Raises DataError for one that is no WAVE file, or torn."""
    with _Opened(file) as (opened, name):
        found = _layout(opened, name)
    encoding = "PCM_F" if found.kind == _FLOATS else "PCM_U" if found.bits == 8 else "PCM_S"
    return AudioInfo(found.rate, found.frames, found.channels, found.bits, encoding)


def read(file: File, frame_offset: int = 0, num_frames: int = -1, normalize: bool = True) -> tuple[np.ndarray, int]:
    """(samples [frames, channels], frames a second), from frame_offset, num_frames of them or all for -1.

    normalize gives float32, integers divided by the largest they could be; without it samples are as stored: uint8,
    int16, int32 (for 24 bits too), float32 or float64.
    """
    with _Opened(file) as (opened, name):
        layout = _layout(opened, name)
        if not 0 <= frame_offset <= layout.frames or num_frames < -1:
            raise ConfigError(
                f"{name}: frame_offset={frame_offset}, num_frames={num_frames} of {layout.frames} frames; give an "
                "offset inside, and -1 for all that follow"
            )
        left = layout.frames - frame_offset
        count = left if num_frames == -1 else min(num_frames, left)
        opened.seek(layout.start + frame_offset * layout.frame_bytes)
        raw = opened.read(count * layout.frame_bytes)
    samples = _decode(raw, layout).reshape(count, layout.channels)
    return (_normalize(samples, layout.bits) if normalize else samples), layout.rate


def _decode(raw: bytes, found: _WaveFormat) -> np.ndarray:
    stored = np.dtype(_STORED[found.kind, found.bits])
    if found.bits != 24:
        return np.frombuffer(raw, stored).astype(stored.newbyteorder("="))
    padded = np.zeros((len(raw) // 3, 4), np.uint8)
    padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
    # the three bytes stand in the upper ones, so that shifting back keeps the sign
    return padded.view(stored).astype(np.int32)[:, 0] >> 8


def _normalize(samples: np.ndarray, bits: int) -> np.ndarray:
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    shifted = samples.astype(np.float64) - (128 if bits == 8 else 0)
    return (shifted / 2 ** (bits - 1)).astype(np.float32)


def write(
    path: str | os.PathLike[str], samples: np.ndarray, sample_rate: int, encoding: str | None = None, bits: int = 16
) -> None:
    """Write samples [frames, channels]; what read gives, with the same encoding and bits, is written back unchanged.

    Floats stand in [-1, 1] and are rounded to integers, those outside cut off; integers are stored as they are and must
    fit. encoding: "PCM_S" (16, 24 or 32 bits), "PCM_U" (8), "PCM_F" (32 or 64), integers of so many bits if None.
    """
    encoding = encoding or ("PCM_U" if bits == 8 else "PCM_S")
    kind = _ENCODINGS.get(encoding)
    if kind is None or (kind, bits) not in _STORED or (kind == _INTEGERS and (encoding == "PCM_U") is not (bits == 8)):
        raise ConfigError(
            f"save: encoding={encoding!r} of {bits} bits; give 'PCM_U' (8 bits), 'PCM_S' (16, 24, 32), 'PCM_F' (32, 64)"
        )
    if samples.ndim != 2:
        raise ShapeError(f"save: samples have shape {list(samples.shape)}, need two dims: channels and frames")
    channels, nbytes = samples.shape[1], bits // 8
    raw = _encode(samples, kind, bits)
    form = struct.pack("<HHIIHH", kind, channels, sample_rate, sample_rate * channels * nbytes, channels * nbytes, bits)
    chunks = [(b"fmt ", form if kind == _INTEGERS else form + b"\0\0")]
    if kind == _FLOATS:
        chunks.append((b"fact", struct.pack("<I", samples.shape[0])))
    body = b"".join(_chunk(tag, data) for tag, data in [*chunks, (b"data", raw)])
    with open(path, "wb") as file:
        file.write(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body)


def _chunk(tag: bytes, data: bytes) -> bytes:
    return tag + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _encode(samples: np.ndarray, kind: int, bits: int) -> bytes:
    stored = np.dtype(_STORED[kind, bits])
    if kind == _FLOATS:
        if samples.dtype.kind != "f":
            raise DTypeError(f"save: samples are {samples.dtype.name}; floats are written of floats, use astype")
        return samples.astype(stored).tobytes()
    low, high, zero = (0, 255, 128) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0)
    if samples.dtype.kind == "f":
        wide = np.rint(samples.astype(np.float64) * 2 ** (bits - 1)) + zero
        samples = np.clip(wide, low, high).astype(stored)
    elif samples.size and (samples.min() < low or samples.max() > high):
        raise DTypeError(
            f"save: samples are {samples.dtype.name} in {samples.min()} .. {samples.max()}, of {bits} bits"
        )
    raw = np.ascontiguousarray(samples.astype(stored))
    return raw.tobytes() if bits != 24 else raw.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
