"""The output folder of a run: made, tried for writing and held by one run at a time.

Floor: 7.  Never imports: jax.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyreme.errors import ConfigError


@contextmanager
def claim(folder: Path) -> Iterator[Path]:
    """Hold the folder while the context lasts; made if missing.

    Raises ConfigError, before any work is done, if it cannot be written or another run holds it (naming its pid). The
    lock is the kernel's and ends with the process however that ends, so no stale one is ever in the way.

    >>> with claim(Path(tempfile.mkdtemp()) / "run") as folder:
    ...     folder.is_dir()
    True
    """
    _check_writable(folder)
    with (folder / ".lock").open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"{folder}: process {file.read().strip() or 'unknown'} is writing its run here; "
                "wait for it, or give this run another output"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield folder


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".try-"):
            pass
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); set output= to a folder that can") from None
