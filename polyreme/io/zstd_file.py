"""Files compressed by zstd, read with the zstandard library where it is installed."""

import io
from importlib import import_module
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError

_PIECE_BYTES = 1024
"""Compressed bytes taken at a time. A block of four may stand for 128 KiB, so that these unpack to 32 MiB at most."""


def open_zstd(path: Path) -> io.RawIOBase:
    """The contents of a file of one or more zstd frames, read from its beginning on.

    Raises ConfigError without the zstandard library. Reading raises OSError for damaged frames, EOFError for a file
    that ends within one.
    """
    try:
        library = import_module("zstandard")
    except ImportError:
        raise ConfigError(f"{path}: .zst files are read with zstandard: pip install polyreme[data]") from None
    return _ZstdReader(path, library)


class _ZstdReader(io.RawIOBase):
    """What the frames of a file unpack to; the library's own reader takes a torn frame for a whole one."""

    def __init__(self, path: Path, library: Any) -> None:
        self._file = path.open("rb")
        self._library = library
        self._frame: Any = None
        self._ready, self._begin, self._position = b"", 0, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        pieces, wanted = [], float("inf") if size is None or size < 0 else size
        while wanted > 0 and (self._begin < len(self._ready) or self._unpack()):
            piece = self._ready[self._begin : self._begin + int(min(wanted, 1 << 30))]
            self._begin += len(piece)
            wanted -= len(piece)
            pieces.append(piece)
        data = b"".join(pieces)
        self._position += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()

    def _unpack(self) -> bool:
        """Whether there is more, which then stands in _ready."""
        rest = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        if rest or (self._frame is not None and self._frame.eof):
            self._frame = None
        packed = rest or self._file.read(_PIECE_BYTES)
        if not packed:
            if self._frame is not None:
                raise EOFError("it ends within a zstd frame")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready, self._begin = self._frame.decompress(packed), 0
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        return True
