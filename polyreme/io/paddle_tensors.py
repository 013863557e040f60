"""Tensors as PaddlePaddle's programs keep them (.pdiparams, save with use_binary_format): records of a version, a
description in protocol buffers, and the bytes.

Source: files written by PaddlePaddle 3.3.1, and the layout of the record as its documentation gives it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError
from polyreme.io.protobuf_wire import Message, WireField, parse

DTYPES = {
    0: dtypes.bool_, 1: dtypes.int16, 2: dtypes.int32, 3: dtypes.int64, 4: dtypes.float16, 5: dtypes.float32,
    6: dtypes.float64, 19: dtypes.uint64, 20: dtypes.uint8, 21: dtypes.int8, 22: dtypes.bfloat16,
    23: dtypes.complex64, 24: dtypes.complex128, 32: dtypes.float8_e4m3fn, 33: dtypes.float8_e5m2,
}  # fmt: skip
"""Dtypes by the numbers that programs of protocol buffers have for them."""
DESCRIPTION: Message = {1: WireField("data_type", "int"), 2: WireField("dims", "int", repeated=True)}
_MAX_NDIM = 64
_MAX_LEVELS = 16


class _Records:
    """What is left of a file of records; where names it in messages."""

    def __init__(self, data: bytes, where: str) -> None:
        self.view, self.place, self.where = memoryview(data), 0, where

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes < 0 or nbytes > len(self.view) - self.place:
            left = len(self.view) - self.place
            raise CheckpointError(
                f"{self.where}: {what} is {nbytes:,} bytes long, and {left:,} are left; the file is cut, or another"
            )
        self.place += nbytes
        return self.view[self.place - nbytes : self.place]

    def number(self, nbytes: int, what: str) -> int:
        return int.from_bytes(self.take(nbytes, what), "little")

    def tensor(self, name: str) -> np.ndarray:
        what = f"the record of {name}" if name else "the record"
        version, levels = self.number(4, what), self.number(8, what)
        if version or levels > _MAX_LEVELS:
            raise CheckpointError(f"{self.where}: {what} has version {version} and {levels} levels: it is no Tensor's")
        for _ in range(levels):  # offsets of sequences, which a parameter has no use for
            self.take(self.number(8, what), what)
        version, length = self.number(4, what), self.number(4, what)
        if version:
            raise CheckpointError(f"{self.where}: {what} has version {version} inside, known is 0")
        try:
            said = parse(self.take(length, f"the description in {what}"), DESCRIPTION)
        except CheckpointError as error:
            raise CheckpointError(f"{self.where}: {what}: {error}") from None
        shape, dtype = said["dims"], DTYPES.get(said.get("data_type", -1))
        if dtype is None or len(shape) > _MAX_NDIM or any(n < 0 for n in shape):
            raise CheckpointError(
                f"{self.where}: {what} is of dtype number {said.get('data_type')} and shape {shape[:9]}: none is known"
            )
        raw = self.take(math.prod(shape) * dtype.itemsize, f"{dtype}{shape} in {what}")
        return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def is_record(head: bytes) -> bool:
    """Whether a file that begins so is a Tensor's record."""
    return len(head) >= 12 and not any(head[:4]) and int.from_bytes(head[4:12], "little") <= _MAX_LEVELS


def read_one(data: bytes, where: str) -> tuple[np.ndarray, int]:
    """The Tensor that begins here, and the length of its record in bytes. Raises CheckpointError for another format."""
    records = _Records(data, where)
    return records.tensor(""), records.place


def read_every(data: bytes, where: str) -> list[np.ndarray]:
    """The Tensors of a file of records, however many. Raises CheckpointError for a file that is cut, or of another
    format."""
    records, arrays = _Records(data, where), []
    while records.place < len(data):
        arrays.append(records.tensor(f"Tensor {len(arrays)}"))
    return arrays


def read_all(data: bytes, names: Sequence[str], where: str) -> dict[str, np.ndarray]:
    """The Tensors of a file of as many records, in this order.

    Raises CheckpointError for a file that is cut, of another format, or longer than the records.
    """
    records = _Records(data, where)
    arrays = {name: records.tensor(name) for name in names}
    if records.place != len(data):
        raise CheckpointError(
            f"{where}: {len(data) - records.place:,} bytes follow the {len(names)} Tensors that the program names; "
            "it is of another program"
        )
    return arrays
