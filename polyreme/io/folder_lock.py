"""Exclusive use of a folder by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Inside the block no other process is inside one of its own for this folder. The kernel unlocks the folder of a
    process that dies."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
