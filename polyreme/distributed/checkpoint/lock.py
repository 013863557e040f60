"""One writer per folder: a lock file that says who, and is taken over from a dead process.

Of a process of this machine it is known whether it lives. One of another machine says so by a heartbeat: the time of
the lock's last change, compared with that of a file written now on the same disk, so that clocks may differ.
"""

import contextlib
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

from polyreme import flags
from polyreme.errors import CheckpointError, ConfigError
from polyreme.io.folder_lock import lock_folder

_log = logging.getLogger("polyreme.checkpoint")
_BEATS = 6
"""Heartbeats in the time after which a lock without any is taken over."""


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

    Raises ConfigError naming the pid if a living process holds it: one of this machine that is there, one of another
    whose heartbeat is younger than POLYREME_LOCK_TIMEOUT seconds, or one that says of itself that it has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        timeout = flags.lock_timeout()
        beat = timeout / _BEATS
        self.owner: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beat": beat,
            **_birth(os.getpid()),
        }
        with lock_folder(path.parent):
            # written whole, then renamed: a reader of the lock never sees half a pid
            fresh = path.with_name(f"{path.name}.tmp")
            fresh.write_text(json.dumps(self.owner))
            holder = self._holder()
            if holder is not None:
                age = fresh.stat().st_mtime - path.stat().st_mtime
                if _alive(holder, age, timeout):
                    fresh.unlink()
                    raise self._refusal(holder, age, timeout)
                if holder["host"] != self.owner["host"]:
                    _log.warning(
                        "%s: taken over from process %d on %s, whose heartbeat stopped %.0f s ago",
                        *(path.parent, holder["pid"], holder["host"], age),
                    )
            os.replace(fresh, path)
        self._released = threading.Event()
        threading.Thread(target=self._beat, args=(beat,), name="polyreme-lock", daemon=True).start()

    def _refusal(self, holder: dict[str, Any], age: float, timeout: float) -> ConfigError:
        if holder["host"] == socket.gethostname():
            remedy = "give this run another output directory or stop that one"
        elif "beat" not in holder:
            remedy = (
                "give this run another output directory or stop that one "
                f"(delete {self.path} only if it is surely gone)"
            )
        else:
            remedy = (
                f"its heartbeat is {max(0.0, age):.0f} s old, and the folder is taken over {timeout:g} s after the "
                "last one: stop that process, wait, or give this run another output directory"
            )
        return ConfigError(
            f"{self.path.parent} is being written by process {holder['pid']} on {holder['host']}; {remedy}"
        )

    def _beat(self, seconds: float) -> None:
        while not self._released.wait(seconds):
            with contextlib.suppress(OSError):  # a disk that is away for a while, or a folder that was deleted
                if self._holder() == self.owner:
                    os.utime(self.path)

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the folder over, as when this one was stopped for long."""
        holder = self._holder()
        if holder is not None and holder != self.owner:
            raise CheckpointError(
                f"{self.path.parent} was taken over by process {holder['pid']} on {holder['host']}, since this one "
                "gave no heartbeat; nothing is written: end this run, and resume from the checkpoints of that one"
            )

    def release(self) -> None:
        """Release the folder; a lock that another process has taken over since is left alone."""
        self._released.set()
        with contextlib.suppress(FileNotFoundError), lock_folder(self.path.parent):  # the folder may be deleted by now
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


def _alive(holder: dict[str, Any], age: float, timeout: float) -> bool:
    """age: seconds since the lock changed. Without a heartbeat it cannot be known of another host."""
    if holder["host"] != socket.gethostname():
        return "beat" not in holder or age < timeout
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, of another user
    born = _birth(holder["pid"])
    return all(holder.get(key) in (None, value) for key, value in born.items())  # else the pid was given out again


def _birth(pid: int) -> dict[str, Any]:
    """The start of the process in clock ticks since a boot, and the id of that boot; empty where the system does not
    tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    fields = stat.rpartition(")")[2].split()  # the name before ")" may hold spaces
    return {"boot": boot, "start": int(fields[19]), "zombie": False} if fields[0] != "Z" else {"zombie": True}
