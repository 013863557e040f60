"""Arrays that live in files, on a disk or in memory: each file a bucket of them, in a checkpoint's layout.

While a caller works on one bucket a thread reads the next and another writes the one before. A file that a checkpoint
has linked to is left as it is: the next write of its bucket makes a new one.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np

from polyreme.errors import CheckpointError, ConfigError, NoSpaceError
from polyreme.faults import point as fault_point
from polyreme.io import safetensors_file

PAGE = 4096
"""Bytes that the data of a file begins at a multiple of."""
_PROBE = 4 << 20  # bytes written and read to see how fast a disk is
_COPIED = 8 << 20  # bytes of a file that are copied at a time
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FilePart(NamedTuple):
    """An array of a file: its name, dtype and shape, and where its bytes begin in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class BucketFile:
    """A file of arrays, read and written as one: a safetensors header, then their bytes without gaps.

    path: of the file, which is made here and takes its room on the disk at once. arrays: name, dtype and shape of each.
    Raises NoSpaceError where it has no room; every error of reading and writing is a CheckpointError that names the
    file.
    """

    def __init__(self, path: Path, arrays: Sequence[tuple[str, np.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        shaped = [(name, np.broadcast_to(np.empty((), dtype), shape)) for name, dtype, shape in arrays]
        self._head = safetensors_file.header(shaped, PAGE)
        self.parts: list[FilePart] = []
        end = len(self._head)
        for name, dtype, shape in arrays:
            self.parts.append(FilePart(name, np.dtype(dtype), tuple(shape), end))
            end += self.parts[-1].nbytes
        self.nbytes = end
        self._is_linked = False
        self._lock = Lock()
        with self._named("made"):
            self._fd = self._make(path)
        weakref.finalize(self, os.close, self._fd)

    @property
    def data_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.nbytes - len(self._head)

    def read(self, buffer: np.ndarray) -> list[np.ndarray]:
        """All arrays, as views of the buffer (uint8, at least data_bytes)."""
        with self._named("read"):
            fault_point("offload.read")
            _read_into(self._fd, buffer[: self.data_bytes], len(self._head))
        return [self._view(buffer, part) for part in self.parts]

    def write(self, arrays: Sequence[np.ndarray]) -> None:
        """Replace all arrays; in a new file if a checkpoint shares this one."""
        with self._named("written"):
            fault_point("offload.write")
            fd, offset = self._writable(), len(self._head)
            for array in arrays:
                fault_point("offload.array")
                _write(fd, array, offset)
                offset += array.nbytes

    def read_part(self, at: int, out: np.ndarray | None = None) -> np.ndarray:
        """One array, by its place: a view of out (uint8, as many bytes), or in memory of its own."""
        part = self.parts[at]
        out = aligned_buffer(part.nbytes) if out is None else out
        with self._lock, self._named("read"):  # not while write_part makes the file anew
            fault_point("offload.part")
            _read_into(self._fd, out, part.offset)
        return out.view(part.dtype).reshape(part.shape)

    def write_part(self, at: int, array: np.ndarray) -> None:
        """Replace one array, by its place."""
        part = self.parts[at]
        with self._lock, self._named("written"):
            fault_point("offload.fill")
            fd = self._writable(keeping=True)
            _write(fd, np.ascontiguousarray(array, part.dtype), part.offset)

    def freeze(self) -> FrozenFile:
        """What is in the file now, whatever is written later."""
        self._is_linked = True
        with self._named("read"):
            return FrozenFile(self.path, self.nbytes, tuple(self.parts))

    def _view(self, buffer: np.ndarray, part: FilePart) -> np.ndarray:
        start = part.offset - len(self._head)
        return buffer[start : start + part.nbytes].view(part.dtype).reshape(part.shape)

    def _writable(self, *, keeping: bool = False) -> int:
        """The file to write to: a new one in place of one that a checkpoint shares, of the same contents if keeping."""
        if self._is_linked:
            new = self.path.with_suffix(".new")
            fd = self._make(new)
            for start in range(len(self._head), self.nbytes if keeping else 0, _COPIED):
                _write(fd, np.frombuffer(os.pread(self._fd, _COPIED, start), np.uint8), start)
            self._rename(new)
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            self._is_linked = False
        return self._fd

    def _rename(self, new: Path) -> None:
        os.replace(new, self.path)

    def _make(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
            _write(fd, np.frombuffer(self._head, np.uint8), 0)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return fd

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"offloaded state: {self.path} cannot be {what} ({error.strerror or error})"
            if error.errno in _FULL:
                free = free_bytes(self.path.parent)
                text += f": it takes {self.nbytes} bytes, {free} are free"
                raise NoSpaceError(text, self.nbytes, free) from error
            raise CheckpointError(text) from error


class MemoryFile(BucketFile):
    """A BucketFile in the host's memory, of which it takes what was written so far. A checkpoint copies it.

    Raises ConfigError where the system has no such files.
    """

    def __init__(self, arrays: Sequence[tuple[str, np.dtype, tuple[int, ...]]]) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"offload to host: {sys.platform} has no files in memory (memfd_create); set offload to "
                "{expert: disk}"
            )
        super().__init__(Path("offload"), arrays)
        self.path = Path(f"/proc/self/fd/{self._fd}")

    def _make(self, path: Path) -> int:
        fd = os.memfd_create(path.name, os.MFD_CLOEXEC)
        os.ftruncate(fd, self.nbytes)
        _write(fd, np.frombuffer(self._head, np.uint8), 0)
        return fd

    def _rename(self, new: Path) -> None:
        """Nothing: whoever looks at it has it open."""


class FrozenFile:
    """The contents of a bucket's file at one time; link or copy them before it is let go."""

    path: Path
    nbytes: int
    parts: tuple[FilePart, ...]

    def __init__(self, path: Path, nbytes: int, parts: tuple[FilePart, ...]) -> None:
        self.path, self.nbytes, self.parts = path, nbytes, parts
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def link(self, target: Path) -> bool:
        """Give the file another name; False where that cannot be, as on another disk. Call it before the next write."""
        fault_point("offload.link")
        try:
            os.link(self.path, target)
        except OSError:
            return False
        return True

    def copy(self, target: Path) -> None:
        """Write the contents into a new file."""
        with open(target, "xb", buffering=0) as file:
            for block in self.blocks(0, self.nbytes):
                left = memoryview(block)
                while left:
                    left = left[file.write(left) :]

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from start to stop, some MB at a time."""
        while start < stop:
            block = os.pread(self._fd, min(8 << 20, stop - start), start)
            if not block:
                raise OSError(errno.EIO, f"{self.path} ends at byte {start} of {stop}")
            yield block
            start += len(block)

    def sync(self) -> None:
        """Wait until the contents are on the disk."""
        os.fsync(self._fd)


class BucketStream:
    """Takes buckets through a ring of buffers: one is read while another is worked on and a third is written.

    buffers: how many are on their way at once; 1 reads, works and writes one after the other. seconds: how long run
    took so far, and how much of that it waited for the disk.
    """

    seconds: float
    waited: float

    def __init__(self, buffers: int) -> None:
        self.buffers = buffers
        self.seconds, self.waited = 0.0, 0.0
        self._ring: list[np.ndarray] = []

    def run(
        self, files: Sequence[BucketFile], work: Callable[[int, list[np.ndarray]], Callable[[], list[np.ndarray]]]
    ) -> None:
        """Read each file, hand its place and arrays to work, and write what the function that work returns gives.

        That function is called in the writing thread, and the arrays that work was given are not looked at after it.
        What either thread raises is raised here, when both have ended.
        """
        begin = time.perf_counter()
        self._allocate(max(file.data_bytes for file in files))
        empty: SimpleQueue[np.ndarray | None] = SimpleQueue()
        ready: SimpleQueue[tuple[list[np.ndarray], np.ndarray] | None] = SimpleQueue()
        done: SimpleQueue[tuple[int, Callable[[], list[np.ndarray]], np.ndarray] | None] = SimpleQueue()
        errors: list[BaseException] = []

        def read_all() -> None:
            for file in files:
                buffer = empty.get()
                if buffer is None:
                    return
                ready.put((file.read(buffer), buffer))

        def write_all() -> None:
            while (item := done.get()) is not None:
                at, result, buffer = item
                files[at].write(result())
                del item, result
                empty.put(buffer)

        def guarded(loop: Callable[[], None]) -> None:
            try:
                loop()
            except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
                errors.append(error)
                ready.put(None)

        for buffer in self._ring[: self.buffers]:
            empty.put(buffer)
        threads = [Thread(target=guarded, args=(loop,), name="offload") for loop in (read_all, write_all)]
        for thread in threads:
            thread.start()
        try:
            for index in range(len(files)):
                asked = time.perf_counter()
                item = ready.get()
                self.waited += time.perf_counter() - asked
                if item is None:
                    break
                done.put((index, work(index, item[0]), item[1]))
        finally:
            asked = time.perf_counter()
            done.put(None)
            empty.put(None)
            for thread in threads:
                thread.join()
            self.waited += time.perf_counter() - asked
            self.seconds += time.perf_counter() - begin
        if errors:
            raise errors[0]

    def _allocate(self, nbytes: int) -> None:
        if not self._ring or self._ring[0].nbytes < nbytes:
            self._ring = []
            self._ring = [aligned_buffer(nbytes) for _ in range(self.buffers)]


@dataclass(frozen=True)
class DiskSpeed:
    """What a short trial of a disk gave, bytes a second; direct: past the system's cache, or through it."""

    write: float
    read: float
    direct: bool


def measure(folder: Path) -> DiskSpeed:
    """Write and read 4 MB in a folder. Raises ConfigError if that cannot be."""
    path = folder / f"probe-{os.getpid()}"
    direct = getattr(os, "O_DIRECT", 0)
    try:
        for extra in (direct, 0) if direct else (0,):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | extra, 0o600)
            except OSError as error:
                if extra and error.errno == errno.EINVAL:
                    continue  # a file system without direct I/O
                raise
            try:
                return _timed(fd, bool(extra))
            finally:
                os.close(fd)
                path.unlink()
    except OSError as error:
        if error.errno in _FULL:
            raise ConfigError(
                f"offload_path: the disk of {folder} has no room for a trial of {_PROBE} bytes, {free_bytes(folder)} "
                "are free; make room, or name a folder of another disk"
            ) from error
        raise ConfigError(
            f"offload_path: {folder} cannot be written ({error.strerror or error}); name a folder that can"
        ) from error
    raise AssertionError("a file was neither opened nor refused")


def _timed(fd: int, is_direct: bool) -> DiskSpeed:
    # direct I/O wants whole pages; not closed here, which an error's traceback, that looks at them, would not let be
    pages = memoryview(mmap.mmap(-1, _PROBE))
    times = [time.perf_counter()]
    _move(os.pwritev, fd, pages, 0)
    os.fsync(fd)
    times.append(time.perf_counter())
    if not is_direct:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    _move(os.preadv, fd, pages, 0)
    times.append(time.perf_counter())
    write, read = times[1] - times[0], times[2] - times[1]
    return DiskSpeed(_PROBE / max(write, 1e-9), _PROBE / max(read, 1e-9), is_direct)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of a folder, or of the nearest one above it that is there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    space = os.statvfs(there)
    return space.f_bavail * space.f_frsize


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Bytes at a boundary of 64, which the CPU backend uses as they are."""
    raw = np.empty(nbytes + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + nbytes]


def _read_into(fd: int, out: np.ndarray, offset: int) -> None:
    _move(os.preadv, fd, out.data, offset)


def _write(fd: int, array: np.ndarray, offset: int) -> None:
    _move(os.pwritev, fd, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, offset)


def _move(call: Callable[..., int], fd: int, left: Any, offset: int) -> None:
    while len(left):
        count = call(fd, [left], offset)
        if count == 0:
            raise OSError(errno.EIO, f"it ends at byte {offset}")
        left, offset = left[count:], offset + count
