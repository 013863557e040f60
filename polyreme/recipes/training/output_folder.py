"""The output folder of a run: held by one run at a time, and what an earlier run left there kept out of the way."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyreme.distributed.checkpoint.lock import hold


@contextmanager
def claim(folder: Path) -> Iterator[Path]:
    """Hold the folder while the context lasts; made if missing, with those above it, and gone again if nothing was put
    into it.

    Raises ConfigError, before any work is done, if it cannot be written or another run holds it (naming its pid). The
    lock of a process that died is taken over.

    >>> import tempfile
    >>> with claim(Path(tempfile.mkdtemp()) / "run") as folder:
    ...     folder.is_dir()
    True
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = hold(folder)
    try:
        yield folder
    finally:
        lock.release()
        with suppress(OSError):  # something is in it
            for path in missing:
                path.rmdir()


def set_aside(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Rename what a run starting anew must not mix with, as checkpoints -> checkpoints.1; returns {old: new}."""
    renamed = {}
    for name in names:
        path, number = folder / name, 1
        if not path.is_dir() or not any(path.iterdir()):
            continue
        while (folder / f"{name}.{number}").exists():
            number += 1
        os.rename(path, folder / f"{name}.{number}")
        renamed[name] = f"{name}.{number}"
    return renamed
