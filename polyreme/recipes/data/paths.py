"""Paths of the files that a configuration names."""

import contextlib
from pathlib import Path

from polyreme.errors import DataError

_REPOSITORY = Path(__file__).resolve().parents[3]


def resolve(text: str, base: Path | None, key: str = "data.text") -> Path:
    """The file a path in a configuration means, under this key. Raises DataError listing where it was looked for."""
    path = Path(text).expanduser()
    folders = (
        [Path()] if path.is_absolute() else [folder for folder in (base, Path(), _REPOSITORY) if folder is not None]
    )
    for folder in folders:
        with contextlib.suppress(OSError):  # a name too long, a folder that may not be read
            if (folder / path).is_file():
                return folder / path
    looked = ", ".join(dict.fromkeys(str((folder / path).absolute()) for folder in folders))
    raise DataError(f"{key}: no file {text!r}; looked for {looked}")
