"""Published data files on this machine: where they are looked for, their digests, texts in archives.

Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from polyreme.errors import ConfigError, DataError
from polyreme.io.archives import open_tar


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


def tar_files(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """(name without a leading ./, file to read before the next one) of each file in a tar archive."""
    with open_tar(path) as archive:
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
