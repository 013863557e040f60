"""A run's own folder of compiled programs, deleted with the run, or by a later one where the run was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "polyreme-test-programs-"
_LOCK = "owner"
_DAY = 86_400


class RunFolder:
    """A new folder that is this process's as long as it lives: it holds a lock on a file in it.

    Where a process is gone, however it ended, the system has let go of its lock, and the folder is deleted by the next.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _delete_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def delete(self) -> None:
        """Delete it with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:  # its process is about to lock it, or was killed before
        return folder.exists() and time.time() - folder.stat().st_mtime > _DAY
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
