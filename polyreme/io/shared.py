"""Batches in shared memory: the slots a worker writes, and the parent's view of them.

A task names the slot that its batch goes into; the parent names one whose last batch it has taken, so that a slot is
never written while it is read. A slot grows by becoming a new
segment `<prefix>w<worker>s<slot>g<generation>`; since the names can be told in advance, the parent can remove the
segments of a worker that was killed.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from polyreme.errors import DataError
from polyreme.io.collate import Stack
from polyreme.io.structure import map_leaves

_ALIGN = 64  # bytes: a cache line, and what vector loads like
_FOLDER = "/dev/shm"


@dataclass(frozen=True)
class SlotArray:
    """Where an array lies in a slot; stands in for it in the batch that goes through the pipe."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class InSlot:
    """A batch whose arrays lie in a slot."""

    name: str
    batch: Any


class Slot:
    """One reusable segment on the writing side."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._generation = 0
        self._memory: shared_memory.SharedMemory | None = None

    def write(self, batch: Any) -> Any:
        """Copy the arrays of a planned batch into the segment; what comes back describes them, for the pipe.

        A batch without arrays comes back as it is.
        """
        layout = _SlotLayout()
        described = map_leaves(layout.place, batch)
        if not layout.leaves:
            return batch
        memory = self._of_size(layout.nbytes)
        for placed, leaf in layout.leaves:
            out = np.ndarray(placed.shape, placed.dtype, memory.buf, placed.offset)
            if isinstance(leaf, Stack):
                leaf.write(out)
            else:
                out[...] = leaf
        return InSlot(memory.name, described)

    def remove(self) -> None:
        """Give the segment back to the system."""
        if self._memory is not None:
            _unlink(self._memory)
            self._memory.close()
            self._memory = None

    def _of_size(self, nbytes: int) -> shared_memory.SharedMemory:
        if self._memory is None or self._memory.size < nbytes:
            self.remove()
            self._memory = create(f"{self._name}g{self._generation}", nbytes)
            self._generation += 1
        return self._memory


class View:
    """The reading side of one slot."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory: shared_memory.SharedMemory | None = None

    def read(self, message: InSlot) -> Any:
        """The batch with arrays that look into the slot: copy them before the next batch is asked for."""
        if self._memory is None or self._memory.name != message.name:
            self.close()
            self._memory = shared_memory.SharedMemory(message.name)
        buffer = self._memory.buf

        def look(leaf: Any) -> Any:
            return np.ndarray(leaf.shape, leaf.dtype, buffer, leaf.offset) if isinstance(leaf, SlotArray) else leaf

        return map_leaves(look, message.batch)

    def close(self) -> None:
        """Let go of the segment; the worker still owns it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def remove(self) -> None:
        """Give the segment of a dead worker back to the system, and the one it may have been about to announce."""
        generation = 0
        if self._memory is not None:
            generation = int(self._memory.name.rpartition("g")[2])
        for candidate in (generation, generation + 1):
            with contextlib.suppress(FileNotFoundError):
                orphan = shared_memory.SharedMemory(f"{self._name}g{candidate}")
                orphan.close()
                _unlink(orphan)
        with contextlib.suppress(BufferError):  # a batch that failed on its way still looks into it
            self.close()


def create(name: str, nbytes: int) -> shared_memory.SharedMemory:
    """A new segment with its memory already reserved; raises DataError when there is not enough."""
    _check_room(nbytes)
    try:
        memory = shared_memory.SharedMemory(name, create=True, size=max(nbytes, 1))
    except OSError as error:
        raise DataError(
            f"shared memory cannot be made in {_FOLDER} ({error.strerror or error}): let this user write there, use no "
            "workers (data.num_workers=0), or DataLoader(use_shared_memory=False)"
        ) from error
    try:
        _reserve(memory)
    except OSError as error:
        memory.close()
        _unlink(memory)
        raise _no_room(nbytes) from error
    return memory


def slot_names(prefix: str, worker: int, slots: int) -> Iterator[str]:
    """The names of a worker's slots, without their generation."""
    return (f"{prefix}w{worker}s{slot}" for slot in range(slots))


class _SlotLayout:
    """Deals offsets to the arrays of a batch."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.leaves: list[tuple[SlotArray, Any]] = []

    def place(self, leaf: Any) -> Any:
        is_plain = type(leaf) is np.ndarray and not leaf.dtype.hasobject
        if not is_plain and not isinstance(leaf, Stack):
            return leaf
        placed = SlotArray(self.nbytes, leaf.shape, leaf.dtype)
        self.leaves.append((placed, leaf))
        self.nbytes += -(-leaf.nbytes // _ALIGN) * _ALIGN
        return placed


def _unlink(memory: shared_memory.SharedMemory) -> None:
    with contextlib.suppress(FileNotFoundError):  # the other side was first
        memory.unlink()


def _reserve(memory: shared_memory.SharedMemory) -> None:
    # a segment beyond what tmpfs can hold is made without complaint and then kills whoever writes to it (SIGBUS)
    path = os.path.join(_FOLDER, memory.name.lstrip("/"))
    if os.path.exists(path):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, memory.size)
        finally:
            os.close(descriptor)


def _free_bytes() -> int | None:
    if not os.path.isdir(_FOLDER):
        return None
    folder = os.statvfs(_FOLDER)
    return folder.f_bavail * folder.f_frsize


def _check_room(nbytes: int) -> None:
    free = _free_bytes()
    if free is not None and free < nbytes:
        raise _no_room(nbytes)


def _no_room(nbytes: int) -> DataError:
    return DataError(
        f"shared memory is too small: a batch needs {nbytes} bytes, {_FOLDER} has {_free_bytes()} bytes free; enlarge "
        "it (docker run --shm-size), lower batch_size, prefetch_factor or num_workers, or set use_shared_memory=False"
    )
