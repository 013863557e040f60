"""Archives and compressed files read within bounds: what unpacks to far more than the file has is refused before it is
held or written.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from polyreme.errors import DataError
from polyreme.io.zstd_file import open_zstd

RATIO = 100
"""How often its own size a file may unpack to. Text reaches 10 and sparse tables 50; deflate's limit is 1032."""
ALWAYS_BYTES = 1 << 26
"""What even the smallest file may unpack to."""
_MAX_MEMBERS = 1 << 20
_COMPRESSION: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": open_zstd,
}

TORN = (
    *(OSError, EOFError, RuntimeError, NotImplementedError, UnicodeError, zlib.error, lzma.LZMAError),
    *(tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile),
)
"""What reading a missing, damaged, encrypted or hostile file raises."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside the block a missing or damaged file is a DataError that names it."""
    try:
        yield
    except DataError:
        raise
    except TORN as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def unpacked_limit(nbytes: int) -> int:
    """Bytes that a file of nbytes may unpack to."""
    return max(ALWAYS_BYTES, RATIO * nbytes)


class BoundedReader(io.RawIOBase):
    """A file read up to a position: what lies behind it is refused, and never held.

    Raises DataError when a byte behind the limit is read or sought.
    """

    def __init__(self, file: Any, limit: int, name: object) -> None:
        self._file, self._limit, self._name = file, limit, name

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._limit - self._file.tell()
        # one byte more than allowed tells a file that ends here from one that goes on
        data = self._file.read(left + 1 if size is None or size < 0 else min(size, left + 1))
        if len(data) > left:
            self._refuse()
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if (offset if whence == os.SEEK_SET else self.tell() + offset) > self._limit:
            self._refuse()
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _refuse(self) -> None:
        raise DataError(
            f"{self._name}: unpacks to more than {self._limit:,} bytes, {RATIO} times its size; it is damaged or made "
            "to fill memory: fetch it again, or unpack it yourself"
        )


def open_unpacked(path: Path, compression: bool = True) -> BinaryIO:
    """The contents of a file, unpacked if it is compressed by gzip, bzip2, xz or zstd, up to what its size allows.

    compression=False gives the file as it is.

    Reading raises DataError past that, and what `readable` catches for a damaged file.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(6)
    unpack = next((unpack for magic, unpack in _COMPRESSION.items() if head.startswith(magic)), None)
    if unpack is None or not compression:
        return BoundedReader(path.open("rb"), nbytes, path)  # type: ignore[return-value]
    return BoundedReader(unpack(path), unpacked_limit(nbytes), path)  # type: ignore[return-value]


def read_unpacked(path: Path) -> bytes:
    """The whole contents of a file, as open_unpacked gives them. Raises DataError for one missing or damaged."""
    with readable(path), open_unpacked(path) as file:
        return file.read()


def gunzipped(data: bytes, name: object) -> bytes:
    """What a gzip stream in memory unpacks to, up to what its size allows. Raises DataError past that."""
    with BoundedReader(gzip.open(io.BytesIO(data)), unpacked_limit(len(data)), name) as file:
        return file.read()


@contextmanager
def open_tar(path: Path, compression: bool = True) -> Iterator[tarfile.TarFile]:
    """A tar archive, compressed or not.

    Raises DataError for one that is damaged or unpacks to too much, also while it is read inside the block.
    """
    with readable(path), open_unpacked(path, compression) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        yield archive


def open_zip(path: Path) -> zipfile.ZipFile:
    """A zip archive. Raises DataError for one that is damaged or says that it unpacks to too much; it cannot unpack to
    more than it says."""
    with readable(path):
        archive = zipfile.ZipFile(path)
    try:
        _check_zip(archive, path)
    except DataError:
        archive.close()
        raise
    return archive


def _check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    members, limit = archive.infolist(), unpacked_limit(path.stat().st_size)
    total = sum(member.file_size for member in members)
    if total > limit or len(members) > _MAX_MEMBERS:
        raise DataError(
            f"{path}: {len(members):,} files of {total:,} bytes unpacked; at most {_MAX_MEMBERS:,} and {limit:,} "
            f"bytes, {RATIO} times the archive's size, are unpacked: it is damaged or made to fill memory"
        )


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or tar archive."""
    if zipfile.is_zipfile(path):
        return True
    try:
        with open_tar(path):
            return True
    except DataError:
        return False


def extract(path: Path, folder: Path) -> None:
    """Write the files of an archive into a folder that is empty. Raises DataError for an archive that is damaged,
    unpacks to too much, or reaches outside of the folder."""
    with readable(path):
        if not zipfile.is_zipfile(path):
            with open_tar(path) as archive:
                archive.extractall(folder, filter="data")
            return
        with open_zip(path) as archive:
            for name in archive.namelist():
                parts = Path(name.replace("\\", "/")).parts
                if ".." in parts or Path(name).is_absolute():
                    raise DataError(f"{path}: holds {name!r}, which lies outside of the folder it is unpacked into")
            archive.extractall(folder)
