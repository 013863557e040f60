"""Numeric arrays from MATLAB files of version 5.

Source: "MAT-File Format", The MathWorks, R2024, chapter 1.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polyreme.errors import DataError

_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
# a data set's index is far below; it bounds what a hostile file makes us hold
_MAX_BYTES = 2**28


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """Every real numeric array of the file by name. Raises DataError for a file that is torn or of another version."""
    try:
        raw = path.read_bytes()
        order = {b"IM": "<", b"MI": ">"}.get(raw[126:128])
        if order is None:
            raise DataError(f"{path}: no MATLAB file of version 5; save it with -v6 or -v7")
        return dict(array for kind, data in _elements(raw[128:], order) for array in _arrays(kind, data, order))
    except (OSError, struct.error, zlib.error, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as a MATLAB file: {error}") from error


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """(type, content) of one element after the other; each is padded to 8 bytes, small ones lie in their head."""
    offset = 0
    while offset + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, offset)
        if kind >> 16:
            yield kind & 0xFFFF, data[offset + 4 : offset + 4 + (kind >> 16)]
            offset += 8
            continue
        if offset + 8 + size > len(data):
            raise ValueError(f"an element of {size} bytes goes beyond the end")
        yield kind, data[offset + 8 : offset + 8 + size]
        offset += 8 + size + (-size % 8 if kind != _COMPRESSED else 0)


def _arrays(kind: int, data: bytes, order: str) -> Iterator[tuple[str, np.ndarray]]:
    if kind == _COMPRESSED:
        whole = zlib.decompressobj().decompress(data, _MAX_BYTES)
        for inner, content in _elements(whole, order):
            yield from _arrays(inner, content, order)
    if kind != _MATRIX:
        return
    flags, dims, name, *parts = _elements(data, order)
    # classes 6 to 15 are numbers; others (cells, structures, text) have no array to give
    if parts and 6 <= flags[1][0 if order == "<" else 3] <= 15:
        shape = np.frombuffer(dims[1], f"{order}i4")
        values = np.frombuffer(parts[0][1], f"{order}{_TYPES[parts[0][0]]}")
        yield name[1].decode("ascii"), values[: math.prod(shape.tolist())].reshape(shape, order="F")
