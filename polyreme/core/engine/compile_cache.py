"""The folder of compiled programs, kept below a number of bytes: those that nothing has read for longest go first.

jax writes and reads the programs, one file each; its own bound needs another package, and a lock around every read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

# how jax ends the name of a program's file
_ENDING = "-cache"
# programs written between two looks at the folder: a look takes 8 ms for 1,000 files, a program 10 ms and more
_WRITES_BETWEEN = 256
# seconds within which a process that has written fewer does not look again, after whichever process looked last
_SECONDS_BETWEEN = 600.0
_LAST_LOOK = "last-look"
_WRITTEN = "/jax/compilation_cache/cache_misses"


class _Program(NamedTuple):
    used: float  # seconds since the epoch
    nbytes: int
    path: str


class ProgramFolder:
    """A folder of programs that holds at most max_bytes, apart from what was written since it was last looked at.

    Several processes may write to it, read from it and trim it: a file that is gone is compiled again.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._num_written = 0

    def keep_trimmed(self) -> None:
        """Trim it after every so many programs that this process writes, and when it ends if it has written some and
        nobody has looked of late. Who only reads does not look: that takes longer than to load some programs."""
        jax.monitoring.register_event_listener(self._count)
        atexit.register(self._trim_written)

    def trim(self) -> None:
        """Delete the programs that were not used for longest, until a tenth of max_bytes is free, if they are more than
        max_bytes; others see that they need not look."""
        with contextlib.suppress(OSError):  # gone, or not ours to write to
            (self.path / _LAST_LOOK).touch()
        programs = sorted(self._programs())
        excess = sum(program.nbytes for program in programs) - self.max_bytes
        if excess <= 0:
            return
        excess += self.max_bytes // 10
        for program in programs:
            if excess <= 0:
                break
            try:
                os.unlink(program.path)
            except OSError:  # another process was first, or owns it
                continue
            excess -= program.nbytes

    def _programs(self) -> list[_Program]:
        programs = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if entry.name.endswith(_ENDING):
                        facts = entry.stat()
                        # file systems note reading late or not at all; what was written last counts as used then
                        used = max(facts.st_atime, facts.st_mtime)
                        programs.append(_Program(used, facts.st_size, entry.path))
        except OSError:  # gone, or a file of it while we look: the next look sees what is left
            return []
        return programs

    def _count(self, event: str, **_: Any) -> None:
        if event == _WRITTEN:
            self._num_written += 1
            if self._num_written % _WRITES_BETWEEN == 0:
                self.trim()

    def _trim_written(self) -> None:
        if not self._num_written:
            return
        try:
            age = time.time() - (self.path / _LAST_LOOK).stat().st_mtime
        except OSError:
            age = _SECONDS_BETWEEN
        if age >= _SECONDS_BETWEEN:
            self.trim()
