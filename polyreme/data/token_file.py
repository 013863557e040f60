"""A file of tokens that does not change under its reader: each window is read whole or refused."""

from __future__ import annotations

import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from polyreme.errors import DataError

_LARGEST = np.iinfo(np.int32).max
BLOCK_BYTES = 1 << 20
"""How much of the file one digest is of; a block is checked when this process first reads of it."""
_PIECES, _PIECE_BYTES = 64, 1 << 12
"""How many pieces, of how many bytes, are looked at again of a file without digests: 0.3 MB in all."""


class TokenFile:
    """The tokens of a file: read by position, so that one that shrinks is an error and not the end of the process.

    digest: xxh3_128 of the file as it was prepared, hex; None for a file that is not read whole before it is used.
    Raises DataError, naming the file, for one that has another; window does for one that has shrunk, was written to
    since, or, with a digest, has a block that is not as it was. Where the time of the last write says nothing, as after
    a copy that keeps times, the blocks that are read are looked at again, or pieces of a file without a digest.
    """

    blocks: np.ndarray | None

    path: Path
    dtype: np.dtype[Any]
    stamp: tuple[int, int, int]
    pieces: int | None

    def __init__(self, path: Path, dtype: str, digest: str | None) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        whole, blocks = xxhash.xxh3_128(), []
        try:
            with path.open("rb") as file:
                self.stamp = _stamp(file.fileno())
                while digest is not None and (block := file.read(BLOCK_BYTES)):
                    whole.update(block)
                    blocks.append(xxhash.xxh3_64_intdigest(block))
                self.pieces = self._digest_of_pieces(file.fileno()) if digest is None else None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        self.blocks = None if digest is None else np.array(blocks, np.uint64)
        if digest is not None and whole.hexdigest() != digest:
            raise self._changed("its digest is another than when it was prepared")

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.stamp[0]

    def window(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count - 1, int32 `[count]`."""
        offset, nbytes = start * self.dtype.itemsize, count * self.dtype.itemsize
        descriptor, is_checked = self._opened
        try:
            data = os.pread(descriptor, nbytes, offset)
            self._check_stamp(descriptor, is_checked)
            if self.blocks is not None:
                self._check_blocks(descriptor, is_checked, offset, nbytes)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}; look at the disk") from error
        if len(data) != nbytes:
            raise self._changed(f"it ends before byte {offset + nbytes:,}")
        tokens = np.frombuffer(data, self.dtype)
        outside = (tokens < 0) | (tokens > _LARGEST)
        if outside.any():
            place = int(np.argmax(outside))
            raise DataError(
                f"{self.path}: token {start + place:,} is {tokens[place]}, and tokens are 0 to {_LARGEST:,}; "
                "prepare it again"
            )
        return tokens.astype(np.int32)

    def _check_stamp(self, descriptor: int, is_checked: np.ndarray) -> None:
        stamp = _stamp(descriptor)
        if stamp == self.stamp:
            return
        if stamp[:2] != self.stamp[:2]:
            shown = f"{stamp[0]:,} bytes, {self.stamp[0]:,} when it was opened"
            raise self._changed(shown if stamp[0] != self.stamp[0] else "it was written to")
        # written to and given its old time back, or no more than linked or moved
        if self.pieces is not None and self._digest_of_pieces(descriptor) != self.pieces:
            raise self._changed("it was written to, and has the time of its last write from before")
        is_checked[:] = False
        self.stamp = stamp

    def _digest_of_pieces(self, descriptor: int) -> int:
        """Of the first and last bytes, and of pieces at equal distances between them."""
        size = os.fstat(descriptor).st_size
        last = max(size - _PIECE_BYTES, 0)
        starts = sorted({last * i // (_PIECES - 1) for i in range(_PIECES)})
        return xxhash.xxh3_64_intdigest(b"".join(os.pread(descriptor, _PIECE_BYTES, start) for start in starts))

    def _check_blocks(self, descriptor: int, is_checked: np.ndarray, offset: int, nbytes: int) -> None:
        assert self.blocks is not None
        for block in range(offset // BLOCK_BYTES, (offset + nbytes - 1) // BLOCK_BYTES + 1):
            if is_checked[block]:
                continue
            data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
            if xxhash.xxh3_64_intdigest(data) != self.blocks[block]:
                raise self._changed(f"bytes from {block * BLOCK_BYTES:,} on are not those that were prepared")
            is_checked[block] = True

    @cached_property
    def _opened(self) -> tuple[int, np.ndarray]:
        """The file's descriptor in this process, and which blocks were checked here."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be opened: {error.strerror}") from error
        weakref.finalize(self, os.close, descriptor)
        return descriptor, np.zeros(0 if self.blocks is None else len(self.blocks), bool)

    def __getstate__(self) -> dict[str, Any]:
        # a worker opens the file itself
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def _changed(self, how: str) -> DataError:
        cure = "prepare it again" if self.blocks is None else "the tokens are prepared again"
        return DataError(
            f"{self.path}: the file has changed under this run: {how}; let nothing else write there, and go on from "
            f"the last checkpoint: {cure}"
        )


def _stamp(descriptor: int) -> tuple[int, int, int]:
    """(bytes, nanoseconds of the last write as the file says it, and as the system saw any change of it)."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
