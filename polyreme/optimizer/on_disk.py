"""Parameters, gradients and optimizer state that lie in files, on a disk or in the host's memory: values are read when
asked for, in buckets of whole parameters.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from polyreme.core.devices.transfer import aligned_zeros
from polyreme.core.state import Elsewhere, TensorState, Tracer
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError
from polyreme.io.bucket_files import BucketFile, BucketStream, DiskSpeed, FilePart, MemoryFile, free_bytes, measure
from polyreme.io.folder_lock import lock_folder
from polyreme.system_memory import available_bytes

BUCKET_BYTES = 32 << 20
"""State of parameters is joined into one file up to this; a parameter is never cut."""
STATE = "optimizer state"
"""What messages call an optimizer's arrays."""
_FOLDER = "state-"
_LOCK = "LOCK"

Start = tuple[int, ...]


@dataclass(frozen=True)
class FileTier:
    """The tier of files with optimizer state: a folder, or the host's memory if path is None; and how many buckets are
    in flight at once.

    by_entry: each entry of the first dim moves by itself.
    """

    path: str | None
    buffers: int
    by_entry: bool = False


@dataclass(frozen=True)
class StateEntry:
    """An array that is to be stored: its name, its shape, dtype and layout, and what makes its first values; zeros if
    that is None. by_entry: as a StoredEntries."""

    name: str
    like: jax.ShapeDtypeStruct
    make: Callable[[], jax.Array] | None
    by_entry: bool = False


class StoredArray(Elsewhere):
    """Stands for a jax array whose bytes lie in a bucket's file: one part of the file for each box of it that devices
    of this process hold, by where the box starts. keeper: what deletes the file once nothing stands in it."""

    file: BucketFile
    places: dict[Start, int]

    keeper: Any = None

    def __init__(self, like: Any, file: BucketFile, places: Mapping[Start, int]) -> None:
        super().__init__(like.shape, like.dtype, like.sharding)
        self.file, self.places = file, dict(places)

    @property
    def saved(self) -> StoredArray:
        return self

    def read(self) -> jax.Array:
        """The array, in the devices' memory."""
        return self.assemble({start: self.file.read_part(at) for start, at in self.places.items()})

    def fill(self, array: Any) -> None:
        """Replace the values."""
        if tuple(array.shape) != self.shape or array.dtype != self.dtype:
            raise CheckpointError(
                f"state on disk is {self.dtype}{list(self.shape)}, the value {array.dtype}{list(array.shape)}"
            )
        for start, values in boxes_of(self._as_it_lies(array)).items():
            self.file.write_part(self.places[start], np.asarray(values))

    def _as_it_lies(self, array: Any) -> jax.Array:
        """An array in the layout of this one."""
        is_laid_out = isinstance(array, jax.Array) and array.sharding == self.sharding
        return array if is_laid_out else put(array, self.sharding)

    def assemble(self, boxes: Mapping[Start, np.ndarray]) -> jax.Array:
        """The array of the values of its boxes, whose memory it may go on using."""
        single = [
            jax.device_put(boxes[start], SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind))
            for device, start in _starts(self.sharding, self.shape).items()
        ]
        if isinstance(self.sharding, SingleDeviceSharding):
            return single[0]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, single)

    @property
    def parts(self) -> dict[Start, FilePart]:
        """The part of the file that each box lies in."""
        return {start: self.file.parts[at] for start, at in self.places.items()}


class StoredEntries(StoredArray):
    """A StoredArray whose entries of the first dim are parts of the file, one for each box of it, read by themselves.

    local_entries: the entries that this process has in its file, or a part of them: several processes share a
    parameter. holds: of a gradient, the entries that are not 0; None for all. late: brings entries up to date that
    missed updates (optimizer.late_updates); whoever asks for the whole gets all as they would be had they missed
    none.
    """

    holds: frozenset[int] | None = None
    late: Any = None

    def __init__(self, like: Any, file: BucketFile, places: Mapping[Start, int]) -> None:
        super().__init__(like, file, places)
        self._box_shape = self.sharding.shard_shape(self.shape)
        self._parts: list[list[_EntryPart]] = [[] for _ in range(self.shape[0])]
        for (entry, *rest), at in self.places.items():
            nth = entry % self._box_shape[0]
            self._parts[entry].append(_EntryPart(at, (entry - nth, *rest), nth))
        self.local_entries = frozenset(entry for entry, parts in enumerate(self._parts) if parts)

    @property
    def saved(self) -> StoredArray:
        self._settle()
        return self

    def read(self) -> jax.Array:
        self._settle()
        values = self.room()
        self.read_into(values, range(self.shape[0]) if self.holds is None else sorted(self.holds))
        return self.assemble(values)

    def fill(self, array: Any) -> None:
        self._settle()
        if tuple(array.shape) != self.shape or array.dtype != self.dtype:
            super().fill(array)  # which refuses it
        self.fill_entries(array, range(self.shape[0]))
        self.holds = None

    def fill_entries(self, array: Any, entries: Iterable[int]) -> None:
        """Replace these entries by those of an array of the whole shape."""
        boxes = {start: np.asarray(box) for start, box in boxes_of(self._as_it_lies(array)).items()}
        for entry in entries:
            for part in self._parts[entry]:
                self.file.write_part(part.place, boxes[part.box][part.nth : part.nth + 1])

    def extent(self, entry: int) -> tuple[tuple[int, int], ...]:
        """What this process holds of an entry, from where to where of each dim but the first: in one process all of it.

        Raises ConfigError where that is no box without gaps, as no mesh in the order of its devices has it.
        """
        parts, sizes = self._parts[entry], self._box_shape[1:]
        starts = [part.box[1:] for part in parts]
        bounds = tuple((min(dim), max(dim) + size) for dim, size in zip(zip(*starts, strict=True), sizes, strict=True))
        if math.prod(stop - start for start, stop in bounds) != len(parts) * math.prod(sizes):
            raise ConfigError(
                f"plan: offload of expert in processes whose parts of an expert {list(self.shape[1:])} have gaps; give "
                "the mesh's devices in the order of their processes"
            )
        return bounds

    def read_entry(self, entry: int) -> np.ndarray:
        """What is held of one entry, as it lies there: [1, ...]."""
        if len(self._parts[entry]) == 1:
            return self.file.read_part(self._parts[entry][0].place)
        extent = self.extent(entry)
        values = np.empty((1, *(stop - start for start, stop in extent)), self.dtype)
        for part in self._parts[entry]:
            values[self._within(part, extent)] = self.file.read_part(part.place)
        return values

    def write_entry(self, entry: int, values: Any) -> None:
        """Replace what is held of one entry: [1, ...]."""
        whole, extent = np.asarray(values), self.extent(entry)
        for part in self._parts[entry]:
            self.file.write_part(part.place, whole[self._within(part, extent)])

    def room(self) -> dict[Start, np.ndarray]:
        """Zeros for each box, by its start, which take memory only where something is read into them."""
        starts = dict.fromkeys(_starts(self.sharding, self.shape).values())
        return {start: aligned_zeros(self._box_shape, self.dtype) for start in starts}

    def read_into(self, values: Mapping[Start, np.ndarray], entries: Iterable[int]) -> None:
        """Read these entries, as they lie there, into their places in room(); assemble makes an array of it."""
        for entry in entries:
            for part in self._parts[entry]:
                self.file.read_part(part.place, values[part.box][part.nth].reshape(-1).view(np.uint8))

    def _within(self, part: _EntryPart, extent: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """Where a part lies in what is held of its entry."""
        inner = zip(part.box[1:], self._box_shape[1:], extent, strict=True)
        return (slice(None), *(slice(start - first, start - first + size) for start, size, (first, _) in inner))

    def _settle(self) -> None:
        if self.late is not None:
            self.late.settle()


class _EntryPart(NamedTuple):
    """A part of an entry: its place in the file, the box that it is in, by its start, and the entry's number there."""

    place: int
    box: Start
    nth: int


class StoredTensor(Tensor):
    """A Tensor of optimizer state in a file: reading its value reads the file, writing it writes there."""

    own_form = True
    stored: StoredArray

    @classmethod
    def of(cls, stored: StoredArray) -> StoredTensor:
        """The one whose value is there."""
        tensor = cls.__new__(cls)
        tensor.stored = stored
        TensorState.__init__(tensor, stored)
        return tensor

    @property
    def _array(self) -> Any:
        return self.stored.read()

    @_array.setter
    def _array(self, value: Any) -> None:
        if value is self.stored:  # restored in place
            return
        if isinstance(value, Tracer):
            raise CaptureError(
                "optimizer state on disk in a captured function, whose program cannot hold it; call the optimizer's "
                "step() after the captured function, not in it"
            )
        self.stored.fill(value)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        memo[id(self)] = copied = Tensor(self.stored.read())
        return copied


@dataclass(eq=False)
class Bucket:
    """A file, the parameters whose state is in it, and of each file's part the array it belongs to and its box."""

    file: BucketFile
    parameters: list[Any]
    tensors: dict[tuple[int, str], StoredTensor]  # by (id(parameter), slot or "master")

    def assemble(self, arrays: Sequence[np.ndarray]) -> dict[tuple[int, str], jax.Array]:
        """The state of each parameter, of the arrays of the file."""
        return {
            key: tensor.stored.assemble({start: arrays[at] for start, at in tensor.stored.places.items()})
            for key, tensor in self.tensors.items()
        }

    def result(
        self,
        old: Sequence[np.ndarray],
        new: Mapping[tuple[int, str], jax.Array],
        others: Sequence[tuple[StoredArray, jax.Array]] = (),
    ) -> list[np.ndarray]:
        """The arrays of the file after an update that gave these, then the boxes of what others become; waits for
        it."""
        # on every device: one that holds a copy of a box may still read the buffer that is filled again next
        jax.block_until_ready((new, [array for _, array in others]))
        arrays = list(old)
        for key, array in new.items():
            for start, values in boxes_of(array).items():
                arrays[self.tensors[key].stored.places[start]] = np.asarray(values)
        for stored_array, array in others:
            boxes = boxes_of(array)
            arrays += [np.asarray(boxes[start]) for start in stored_array.places]
        return arrays


class UpdateFile:
    """What the update of a bucket reads and writes as if it were one file: the bucket's state, then arrays of its
    parameters that lie elsewhere on the disk.

    written: of those arrays, how many of the first are written back.
    """

    file: BucketFile
    others: Sequence[StoredArray]
    written: int

    def __init__(self, file: BucketFile, others: Sequence[StoredArray], written: int) -> None:
        self.file, self.others, self.written = file, others, written
        self._count = len(file.parts)

    @property
    def data_bytes(self) -> int:
        """Bytes that are read."""
        return self.file.data_bytes + sum(_aligned(part.nbytes) for part in self._parts()) + _ALIGNMENT

    def read(self, buffer: np.ndarray) -> list[np.ndarray]:
        """All arrays, as views of the buffer: those of the file, then each box of the others."""
        arrays, offset = self.file.read(buffer), _aligned(self.file.data_bytes)
        for other in self.others:
            for at in other.places.values():
                part = other.file.parts[at]
                arrays.append(other.file.read_part(at, buffer[offset : offset + part.nbytes]))
                offset += _aligned(part.nbytes)
        return arrays

    def write(self, arrays: Sequence[np.ndarray]) -> None:
        """Replace the arrays of the file, then those of the others that are written."""
        self.file.write(arrays[: self._count])
        values = iter(arrays[self._count :])
        for other in self.others[: self.written]:
            for at in other.places.values():
                other.file.write_part(at, next(values))

    def assemble_others(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        """The other arrays, of what read gave."""
        values = iter(arrays[self._count :])
        return [other.assemble({start: next(values) for start in other.places}) for other in self.others]

    def _parts(self) -> list[FilePart]:
        return [other.file.parts[at] for other in self.others for at in other.places.values()]


_ALIGNMENT = 64  # bytes; the CPU backend uses arrays that begin at a multiple of it as they are


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class StateFiles:
    """Arrays of parameters on disk, such as an optimizer's state: a folder of its own below the tier's path, which goes
    when the process does.

    what: the arrays, for messages. Buckets are added as parameters get their state. What a process that was killed left
    there is taken away by the next that uses the path. Raises ConfigError, before anything is written, for a path that
    cannot be written or that has no room.
    """

    tier: FileTier
    what: str
    stream: BucketStream

    def __init__(self, tier: FileTier, what: str = STATE) -> None:
        self.tier, self.what = tier, what
        self.stream = BucketStream(tier.buffers)
        self.buckets: list[Bucket] = []
        self.speed: DiskSpeed | None = None
        self.failure: BaseException | None = None
        self._folder: Path | None = None
        self._home: dict[int, Bucket] = {}

    def __deepcopy__(self, memo: dict[Any, Any]) -> StateFiles:
        return StateFiles(self.tier, self.what)  # copies of Tensors in its files lie in memory

    def has(self, p: Any) -> bool:
        """Whether a parameter's state is here."""
        return id(p) in self._home

    def add(self, entries: Sequence[tuple[Any, Mapping[str, StateEntry]]]) -> None:
        """Store the state of parameters, all on the same devices: slot or "master" -> its entry, by parameter."""
        nbytes = sum(_local_bytes(entry.like) for _, slots in entries for entry in slots.values())
        self._claim(nbytes)
        filling: list[tuple[Any, Mapping[str, StateEntry]]] = []
        size = 0
        for p, slots in entries:
            more = sum(_local_bytes(entry.like) for entry in slots.values())
            if filling and size + more > BUCKET_BYTES:
                self._add_bucket(filling)
                filling, size = [], 0
            filling.append((p, slots))
            size += more
        self._add_bucket(filling)

    def buckets_of(self, parameters: Sequence[Any]) -> list[Bucket]:
        """The buckets with state of any of these parameters, in the order of their files."""
        wanted = {id(self._home[id(p)]) for p in parameters}
        return [bucket for bucket in self.buckets if id(bucket) in wanted]

    def tensor(self, p: Any, name: str) -> StoredTensor:
        """The Tensor of a slot, or of the "master", of a parameter."""
        return self._home[id(p)].tensors[id(p), name]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(bucket.file.nbytes for bucket in self.buckets)

    def _add_bucket(self, entries: Sequence[tuple[Any, Mapping[str, StateEntry]]]) -> None:
        listed: list[tuple[str, np.dtype, tuple[int, ...]]] = []
        placed: list[tuple[Any, str, StateEntry, dict[Start, int]]] = []
        for p, slots in entries:
            for slot, entry in slots.items():
                places = {}
                for start, shape in _parts_of(entry).items():
                    places[start] = len(listed)
                    at = f"@{','.join(map(str, start))}" if any(start) else ""
                    listed.append((f"{entry.name}{at}", np.dtype(entry.like.dtype), shape))
                placed.append((p, slot, entry, places))
        name = f"data-{jax.process_index():05d}-{len(self.buckets):05d}.safetensors"
        file = MemoryFile(listed) if self._folder is None else BucketFile(self._folder / name, listed)
        tensors = {}
        for p, slot, entry, places in placed:
            stored_array = (StoredEntries if entry.by_entry else StoredArray)(entry.like, file, places)
            if entry.make is not None:
                stored_array.fill(entry.make())  # one after another: all of them need not fit into memory
            tensors[id(p), slot] = StoredTensor.of(stored_array)
        bucket = Bucket(file, [p for p, _ in entries], tensors)
        self.buckets.append(bucket)
        self._home |= {id(p): bucket for p in bucket.parameters}

    def _claim(self, nbytes: int) -> None:
        """Make the folder of its own, once there is room for so many bytes more."""
        check_room(self.tier, self.what, nbytes)
        if self._folder is None and self.tier.path is not None:
            self._folder, lock = _open_folder(Path(self.tier.path))
            weakref.finalize(self, _discard, self._folder, lock)
            self.speed = measure(self._folder)

    def __str__(self) -> str:
        if self.tier.path is None:
            return f"{self.what} of {self.nbytes / 1e6:,.1f} MB is in the host's memory, which it takes as it is used"
        text = f"{self.what} of {self.nbytes / 1e6:,.1f} MB is in {self.tier.path}, {len(self.buckets)} files"
        if self.speed is None:
            return text
        way = "past the system's cache" if self.speed.direct else "through the system's cache, as it must be there"
        return (
            f"{text}; a trial of 4 MB, {way}, wrote {self.speed.write / 1e6:,.0f} MB/s and read "
            f"{self.speed.read / 1e6:,.0f} MB/s"
        )


def check_room(tier: FileTier, what: str, nbytes: int) -> None:
    """Raises ConfigError if a tier has no room for so many bytes of this."""
    if tier.path is None:
        available = available_bytes()
        if available is not None and nbytes > available:
            raise ConfigError(
                f"offload to host: {nbytes} bytes of {what} go to the host's memory, {available} are available; set "
                "offload to {expert: disk}, or make room"
            )
        return
    free = free_bytes(Path(tier.path))
    if nbytes > free:
        part = int(100 * free / nbytes) / 100
        near = f"lower offload_ratio to {part}" if part and what == STATE else "make room"
        raise ConfigError(
            f"offload_path: {nbytes} bytes of {what} go to the disk of {tier.path}, {free} are free; {near}, or name a "
            "folder of another disk"
        )


def boxes_of(array: jax.Array) -> dict[Start, jax.Array]:
    """The distinct boxes of an array that devices of this process hold, by where they start."""
    parts: dict[Start, jax.Array] = {}
    for shard in array.addressable_shards:
        parts.setdefault(_start(shard.index), shard.data)
    return parts


def _start(index: Sequence[slice]) -> Start:
    return tuple(part.start or 0 for part in index)


@functools.lru_cache(maxsize=4096)
def _starts(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Start]:
    """The start of the box of each device of this process."""
    return {device: _start(index) for device, index in sharding.addressable_devices_indices_map(shape).items()}


def _boxes(sharding: Any, shape: tuple[int, ...]) -> dict[Start, tuple[int, ...]]:
    """The shape of each distinct box, by its start."""
    size = sharding.shard_shape(tuple(shape))
    return {start: size for start in _starts(sharding, tuple(shape)).values()}


def _parts_of(entry: StateEntry) -> dict[Start, tuple[int, ...]]:
    """The shape of each part of the file, by where it starts in the array."""
    boxes = _boxes(entry.like.sharding, entry.like.shape)
    if not entry.by_entry:
        return boxes
    return {(start[0] + at, *start[1:]): (1, *shape[1:]) for start, shape in boxes.items() for at in range(shape[0])}


def _local_bytes(array: Any) -> int:
    boxes = _boxes(array.sharding, array.shape)
    return sum(int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize for shape in boxes.values())


def _open_folder(root: Path) -> tuple[Path, int]:
    """A new folder below root and the lock that says that its process lives; folders of dead processes are deleted."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with lock_folder(root):  # several processes begin at once
            for old in root.glob(f"{_FOLDER}*"):
                _sweep(old)
            number = 0
            while (folder := root / f"{_FOLDER}{os.getpid()}-{number}").exists():
                number += 1
            folder.mkdir()
            fd = _open_lock(folder / _LOCK)
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"offload_path: {root} cannot be written ({error.strerror or error}); name a folder that can"
        ) from error
    return folder, fd


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _sweep(old: Path) -> None:
    """Delete a folder whose process is gone: the lock of one that lives cannot be had."""
    fd = _open_lock(old / _LOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(old, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


def _discard(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def stored(tensor: TensorState) -> StoredArray | None:
    """The StoredArray of a Tensor that lies in a file; None for any other."""
    if isinstance(tensor, StoredTensor):
        return tensor.stored.saved
    array = tensor._array
    return array.saved if isinstance(array, StoredArray) else None
