"""Published data files on this machine: where they are looked for, their digests, archives read safely."""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from polyreme.errors import ConfigError, DataError

TORN = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""What reading a missing or damaged file raises."""


@dataclass(frozen=True)
class Published:
    """A file as its authors published it: folder is the data set's name, parameter the argument that names another."""

    folder: str
    name: str
    md5: str
    url: str
    parameter: str = "data_file"

    def find(self, owner: str, file: str | os.PathLike[str] | None, download: bool) -> Path:
        """The file given, else the published one in a folder of `data_folders`, its digest checked.

        Raises DataError where there is none, or one with another digest; download=True cannot fetch it.
        """
        if not isinstance(download, bool):
            raise ConfigError(f"{owner}: download={download!r}; give True or False")
        if file is not None:
            if not Path(file).is_file():
                raise DataError(f"{owner}: {self.parameter}={str(file)!r} is no file; give the path of {self.name}")
            return Path(file)
        folders = data_folders(self.folder)
        for path in (folder / self.name for folder in folders):
            if path.is_file():
                check_digest(path, (self.md5,))
                return path
        raise DataError(
            f"{owner}: no {self.name} in {' or '.join(map(str, folders))}; nothing is downloaded: fetch {self.url} "
            f"(md5 {self.md5}) into one of them, or give {self.parameter}"
        )


def data_folders(name: str) -> list[Path]:
    """Where the files of a data set are looked for, in this order."""
    home = os.environ.get("XDG_CACHE_HOME")
    cache = Path(home) if home else Path.home() / ".cache"
    return [cache / "polyreme" / "datasets" / name, Path("/usr/share/datasets") / name]


def check_digest(path: Path, known: tuple[str, ...]) -> None:
    """Raise DataError if the file's md5 is none of those known."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if digest not in known:
        raise DataError(f"{path}: md5 {digest} is not that of the published file ({known[0]}); fetch it again")


def chosen_mode(owner: str, mode: str, choices: tuple[str, ...]) -> str:
    """mode in lower case. Raises ConfigError if it is none of the choices."""
    if not isinstance(mode, str) or mode.lower() not in choices:
        raise ConfigError(f"{owner}: mode={mode!r}; give one of {', '.join(map(repr, choices))}")
    return mode.lower()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside the block a missing or damaged file is a DataError that names it."""
    try:
        yield
    except TORN as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def tar_files(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """(name without a leading ./, file to read before the next one) of each file in a tar archive."""
    with readable(path), tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name.removeprefix("./"), file  # type: ignore[misc]


def tar_texts(path: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """Contents of the files of an archive whose names end so, by that ending. Raises DataError if one is missing."""
    texts: dict[str, bytes] = {}
    for name, file in tar_files(path):
        for ending in wanted:
            if name == ending or name.endswith(f"/{ending}"):
                texts[ending] = file.read()
    for ending in wanted:
        if ending not in texts:
            raise DataError(f"{path}: holds no {ending}; is it the archive that was meant?")
    return texts


# what NumPy arrays and Python 2 strings are pickled with; anything else could run code
_PICKLED = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED:
            raise DataError(f"a pickle asks for {module}.{name}; only NumPy arrays, strings and numbers are read")
        return super().find_class(module, name)


def unpickled(file: BinaryIO, path: Path) -> Any:
    """What a pickle of arrays, strings and numbers holds, Python 2's strings as bytes. Raises DataError for others."""
    try:
        return _Unpickler(file, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError, IndexError) as error:
        raise DataError(f"{path}: a pickle in it cannot be read: {error}") from error
