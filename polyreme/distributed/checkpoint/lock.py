"""One writer per folder: a lock file that says who, and is taken over from a dead process."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError


def hold(folder: Path, name: str = ".lock") -> "FolderLock":
    """Make the folder if it is missing and lock it; writing the lock is also the trial that it can be written.

    Raises ConfigError, before any work is done, if it cannot be written or a living process holds it.
    """
    try:
        if folder.is_file():
            raise ConfigError(f"{folder} is a file; a folder is needed there: move it, or choose another output")
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder / name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{folder} cannot be written ({reason}); choose an output directory that can") from error


class FolderLock:
    """The lock of a folder, held from construction to release(), or until this process is dead.

    Raises ConfigError naming the pid if a living process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner = {"pid": os.getpid(), "host": socket.gethostname(), **_birth(os.getpid())}
        with _guard(path.parent):
            holder = self._holder()
            if holder is not None and _alive(holder):
                raise ConfigError(
                    f"{path.parent} is being written by process {holder['pid']} on {holder['host']}; give this run "
                    f"another output directory or stop that one (delete {path} only if it is surely gone)"
                )
            # written whole, then renamed: a reader of the lock never sees half a pid
            fresh = path.with_name(f"{path.name}.tmp")
            fresh.write_text(json.dumps(self.owner))
            os.replace(fresh, path)

    def release(self) -> None:
        """Give the folder free; a lock that another process has taken over since is left alone."""
        with contextlib.suppress(FileNotFoundError), _guard(self.path.parent):  # the folder may be deleted by now
            if self._holder() == self.owner:
                self.path.unlink()

    def _holder(self) -> dict[str, Any] | None:
        try:
            holder = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None  # none, or a torn one: its writer did not live to hold it
        if not isinstance(holder, dict) or type(holder.get("pid")) is not int or "host" not in holder:
            return None
        return holder


@contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Exclude other processes while the lock file is looked at and changed; the kernel frees it if this one dies."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _alive(holder: dict[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        return True  # cannot be known from here
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, of another user
    born = _birth(holder["pid"])
    return all(holder.get(key) in (None, value) for key, value in born.items())  # else the pid was given out again


def _birth(pid: int) -> dict[str, Any]:
    """When the process began, in clock ticks since a boot, and which boot; nothing where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    fields = stat.rpartition(")")[2].split()  # the name before ")" may hold spaces
    return {"boot": boot, "start": int(fields[19]), "zombie": False} if fields[0] != "Z" else {"zombie": True}
