"""Shards of arrays to files and back: copied off the device, packed, digested, read by the box that is asked for.

A file holds whole shards one after another, so reading a box touches only the bytes of shards it meets.
"""

import contextlib
import io
import math
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from polyreme.core import dtype as dtypes
from polyreme.distributed.checkpoint.manifest import FileEntry, Manifest, StoredChunk, TensorEntry
from polyreme.errors import CheckpointError
from polyreme.faults import point as fault_point
from polyreme.io import safetensors_file
from polyreme.io.bucket_files import BucketFile
from polyreme.optimizer.on_disk import StoredArray

FILE_BYTES = 256 << 20  # a file is closed once this full: several are written and digested at a time
WORKERS = min(8, os.cpu_count() or 1)
ON_HOST = -1  # the group of arrays that are on no device

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ShardBox:
    """A box of a tensor that this process holds for itself: where it starts in the whole, whose shape is given."""

    data: np.ndarray | jax.Array
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype


@dataclass(frozen=True)
class HostShard:
    """A shard copied to host memory: whose it is, where it starts, and the device it came from."""

    tensor: str
    start: tuple[int, ...]
    data: np.ndarray
    group: int


class StoredFile:
    """A file of state on disk that becomes one of the checkpoint, as it was when this was made.

    owners: of each part of the file, by its place, the tensor and where the part starts in it; tensors that are not
    saved have none.
    """

    def __init__(self, file: BucketFile, owners: dict[int, tuple[str, tuple[int, ...]]], number: int) -> None:
        self.frozen = file.freeze()
        self.owners = owners
        self.name: str = f"data-{jax.process_index():05d}-{number:05d}.safetensors"
        self.is_linked = False

    def link(self, folder: Path) -> None:
        """Link to it from a checkpoint's folder, before the file is written again, where one disk has both."""
        self.is_linked: bool = self.frozen.link(folder / self.name)

    def write(self, folder: Path) -> tuple[FileEntry, list[tuple[str, StoredChunk]]]:
        """Copy it if it is not linked, wait until it is on disk, and digest it."""
        if not self.is_linked:
            self.frozen.copy(folder / self.name)
        with open(folder / self.name, "rb") as file:
            os.fsync(file.fileno())
        whole, chunks, end = xxhash.xxh3_128(), [], 0
        for place, part in enumerate(self.frozen.parts):
            digest = xxhash.xxh3_128()
            for block in self.frozen.blocks(end, part.offset):
                whole.update(block)
            end = part.offset + part.nbytes
            for block in self.frozen.blocks(part.offset, end):
                whole.update(block)
                digest.update(block)
            if place in self.owners:
                tensor, start = self.owners[place]
                where = (self.name, part.offset, part.nbytes, start, part.shape)
                chunks.append((tensor, StoredChunk(*where, digest.hexdigest())))
        fault_point("ckpt.write")
        return FileEntry(self.name, end, whole.hexdigest()), chunks


def snapshot(arrays: dict[str, Any]) -> tuple[dict[str, TensorEntry], list[HostShard], list[StoredFile]]:
    """Copy every distinct shard that this process saves to host memory; of replicas, one process copies one.

    Returns the tensors (still without chunks), the shards, and the files of what lies on disk, which are not copied.
    When it returns, the caller may donate the arrays. Raises CheckpointError for anything but Pieces, StoredArrays and
    jax and NumPy arrays of a known dtype.
    """
    for name, array in arrays.items():
        _check_savable(name, array.data if isinstance(array, ShardBox) else array)
    for array in arrays.values():
        if isinstance(array, jax.Array):
            for shard in array.addressable_shards if _is_saved_here(array) else ():
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()  # all transfers start before the first is waited for
    tensors = {name: _entry(array) for name, array in arrays.items()}
    shards = [shard for name, array in arrays.items() for shard in _host_shards(name, array)]
    return tensors, shards, _stored_files(arrays, len(_pack(shards)))


def _stored_files(arrays: dict[str, Any], number: int) -> list[StoredFile]:
    """The files that StoredArrays lie in, numbered from there on."""
    owners: dict[BucketFile, dict[int, tuple[str, tuple[int, ...]]]] = {}
    for name, array in arrays.items():
        if isinstance(array, StoredArray):
            parts = {at: (name, start) for start, at in array.places.items()}
            owners.setdefault(array.file, {}).update(parts)
    return [StoredFile(file, of, number + i) for i, (file, of) in enumerate(owners.items())]


def _check_savable(name: str, array: Any) -> None:
    if not isinstance(name, str):
        raise CheckpointError(f"names of arrays are strings, got {name!r}")
    if not isinstance(array, jax.Array | np.ndarray | StoredArray):
        raise CheckpointError(f"{name!r} is a {type(array).__name__}; pass a jax.Array or numpy.ndarray, rest in meta")
    if _native(array) not in dtypes.NAMES.values():
        raise CheckpointError(
            f"{name!r} has dtype {array.dtype}, which is not saved; for a random key pass jax.random.key_data(key), "
            f"else convert to one of {', '.join(dtypes.NAMES)}"
        )
    if isinstance(array, jax.Array) and array.is_deleted():
        raise CheckpointError(f"{name!r} was deleted or donated before save; save before the step that donates it")


def _native(array: jax.Array | np.ndarray | StoredArray) -> np.dtype:
    """The dtype in this machine's byte order; for a random key an extended dtype, which is in no list."""
    return array.dtype.newbyteorder("=") if isinstance(array, np.ndarray) else array.dtype


def _entry(array: jax.Array | np.ndarray | ShardBox | StoredArray) -> TensorEntry:
    if isinstance(array, ShardBox):
        return TensorEntry(tuple(array.shape), _native(array.data), None, None, ())
    spec, mesh = None, None
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = [list(part) if isinstance(part, tuple) else part and str(part) for part in sharding.spec]
        mesh = {str(axis): int(size) for axis, size in sharding.mesh.shape.items()}
    return TensorEntry(tuple(array.shape), _native(array), spec, mesh, ())


def _is_saved_here(array: jax.Array | np.ndarray) -> bool:
    """Whether this process saves a shard. A tensor on no mesh exists in every process, and the first one saves it; of a
    shard on a mesh, the process that holds replica 0 saves it."""
    is_on_mesh = isinstance(array, jax.Array) and (
        isinstance(array.sharding, jax.sharding.NamedSharding) or not array.is_fully_addressable
    )
    return is_on_mesh or jax.process_index() == 0


def _host_shards(name: str, array: jax.Array | np.ndarray | ShardBox | StoredArray) -> Iterator[HostShard]:
    if isinstance(array, StoredArray):
        return
    if isinstance(array, ShardBox):
        yield HostShard(name, array.start, np.array(array.data, order="C", copy=True), ON_HOST)
        return
    if not _is_saved_here(array):
        return
    if isinstance(array, np.ndarray):
        copy = np.array(array, dtype=_native(array), order="C", copy=True)
        yield HostShard(name, (0,) * array.ndim, copy, ON_HOST)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            start = tuple(part.start or 0 for part in shard.index)
            # on CPU np.asarray is a view of the buffer that the caller donates next
            copy = np.array(shard.data, order="C", copy=True)
            yield HostShard(name, start, copy, shard.device.id)


def write_files(
    folder: Path,
    tensors: dict[str, TensorEntry],
    shards: list[HostShard],
    kind: str = "bin",
    stored: Sequence[StoredFile] = (),
) -> tuple[dict[str, TensorEntry], tuple[FileEntry, ...]]:
    """Write shards and stored files, each file synced to disk; returns the tensors with their chunks, and the files.

    kind: "bin", nothing but the shards' bytes, or "safetensors", which other programs read too: there a shard has its
    tensor's name, with @ and its start if that is not the tensor's own.
    """
    process = jax.process_index()
    packed = {f"data-{process:05d}-{n:05d}.{kind}": group for n, group in enumerate(_pack(shards))}
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint-file") as pool:
        written = list(pool.map(lambda item: _write_file(folder, *item), packed.items()))
        written += pool.map(lambda file: file.write(folder), stored)
    chunks: dict[str, list[StoredChunk]] = {name: [] for name in tensors}
    for _, found in written:
        for name, chunk in found:
            chunks[name].append(chunk)
    placed = {name: replace(tensor, chunks=tuple(chunks[name])) for name, tensor in tensors.items()}
    return placed, tuple(file for file, _ in written)


def _pack(shards: list[HostShard]) -> list[list[HostShard]]:
    files: list[list[HostShard]] = []
    filling: dict[int, int] = {}  # group -> index of the file it is filling
    nbytes: list[int] = []
    for shard in shards:
        index = filling.get(shard.group)
        if index is None or nbytes[index] + shard.data.nbytes > FILE_BYTES:
            index = filling[shard.group] = len(files)
            files.append([])
            nbytes.append(0)
        files[index].append(shard)
        nbytes[index] += shard.data.nbytes
    return files


def _write_file(folder: Path, name: str, shards: list[HostShard]) -> tuple[FileEntry, list[tuple[str, StoredChunk]]]:
    whole, chunks = xxhash.xxh3_128(), []
    head = safetensors_file.header(_list(shards)) if name.endswith(".safetensors") else b""
    offset = len(head)
    with open(folder / name, "xb", buffering=0) as file:
        whole.update(head)
        _write_all(file, memoryview(head))
        for shard in shards:
            data = _bytes_of(shard.data)
            whole.update(data)
            digest = xxhash.xxh3_128_hexdigest(data)
            _write_all(file, data)
            nbytes = shard.data.nbytes
            chunks.append((shard.tensor, StoredChunk(name, offset, nbytes, shard.start, shard.data.shape, digest)))
            offset += nbytes
            fault_point("ckpt.write")
        os.fsync(file.fileno())
    return FileEntry(name, offset, whole.hexdigest()), chunks


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _list(shards: list[HostShard]) -> list[tuple[str, np.ndarray]]:
    """Shards under the names they have in a safetensors file."""
    return [
        (f"{shard.tensor}@{','.join(map(str, shard.start))}" if any(shard.start) else shard.tensor, shard.data)
        for shard in shards
    ]


class ShardReader:
    """Reads tensors of one checkpoint folder, verifying the digest of every chunk it touches.

    Files are opened when first needed; one that is missing, of another size or not a plain file raises CheckpointError.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._stack = contextlib.ExitStack()
        self._fds: dict[str, int] = {}

    def __enter__(self) -> "ShardReader":
        for name in sorted({file for tensor in self.manifest.tensors.values() for file in tensor.files}):
            self.check_file(name)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def check_file(self, name: str) -> None:
        """Raise CheckpointError unless the file is there, plain and of the size in the manifest."""
        want = next(file.nbytes for file in self.manifest.files if file.name == name)
        try:
            status = os.lstat(self.folder / name)
        except OSError as error:
            raise CheckpointError(f"{self._where(name)}: cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self._where(name)}: is not a plain file")
        if status.st_size != want:
            raise CheckpointError(f"{self._where(name)}: has {status.st_size} bytes, expected {want}")

    def read(self, names: list[str], shardings: dict[str, Any]) -> dict[str, Any]:
        """The named tensors, placed as shardings says; NumPy arrays where it says None, and where it says a StoredArray
        that, filled with the values."""
        for name in sorted({file for tensor in names for file in self.manifest.tensors[tensor].files}):
            self._open(name)
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint-read") as pool:
            arrays = list(pool.map(lambda name: self._read_tensor(name, shardings.get(name)), names))
        return dict(zip(names, arrays, strict=True))

    def verify_files(self) -> None:
        """Compare every data file with its size and digest; raises CheckpointError naming file and tensors."""
        for file in self.manifest.files:
            self.check_file(file.name)
            digest = xxhash.xxh3_128()
            with open(self.folder / file.name, "rb") as stream:
                while block := stream.read(8 << 20):
                    digest.update(block)
            if digest.hexdigest() != file.digest:
                raise CheckpointError(f"{self._where(file.name)}: digest is {digest.hexdigest()}, not {file.digest}")

    def _open(self, name: str) -> None:
        if name not in self._fds:
            self.check_file(name)
            try:
                fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{self._where(name)}: cannot be read ({error.strerror})") from error
            self._stack.callback(os.close, fd)
            self._fds[name] = fd

    def _where(self, file: str) -> str:
        names = [name for name, tensor in self.manifest.tensors.items() if file in tensor.files]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"file {file} (tensor {', '.join(map(repr, names[:3]))}{more})"

    def _read_tensor(self, name: str, sharding: Any) -> Any:
        tensor = self.manifest.tensors[name]
        if sharding is None:
            return self._read_boxes(name, [tuple((0, n) for n in tensor.shape)])[0]
        if isinstance(sharding, StoredArray):
            places = [(at, sharding.file.parts[at].shape, start) for start, at in sharding.places.items()]
            asked = [tuple((a, a + n) for a, n in zip(start, shape, strict=True)) for _, shape, start in places]
            for (at, _, _), values in zip(places, self._read_boxes(name, asked), strict=True):
                sharding.file.write_part(at, values)
            return sharding
        boxes = {
            device: tuple(part.indices(n)[:2] for part, n in zip(index, tensor.shape, strict=True))
            for device, index in sharding.addressable_devices_indices_map(tensor.shape).items()
        }
        distinct = list(dict.fromkeys(boxes.values()))
        read = dict(zip(distinct, self._read_boxes(name, distinct), strict=True))
        single = [
            jax.device_put(read[box], jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
            for device, box in boxes.items()
        ]
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            # as it is: put together from parts, jax 0.10 would take it to be in device memory even if it is not
            (array,) = single
        else:
            array = jax.make_array_from_single_device_arrays(tensor.shape, sharding, single)
        if array.dtype != tensor.dtype:
            raise CheckpointError(f"{name!r} is {tensor.dtype} but jax made it {array.dtype}; set POLYREME_X64=1")
        return array

    def _read_boxes(self, name: str, boxes: list[Box]) -> list[np.ndarray]:
        tensor = self.manifest.tensors[name]
        outs = [_aligned_empty(tuple(stop - start for start, stop in box), tensor.dtype) for box in boxes]
        for chunk in tensor.chunks:
            here: Box = tuple((start, start + n) for start, n in zip(chunk.start, chunk.shape, strict=True))
            meeting = [(box, out) for box, out in zip(boxes, outs, strict=True) if _meet(box, here)]
            if not meeting:
                continue
            source = next((out for box, out in meeting if box == here), None)
            if source is None:
                source = np.empty(chunk.shape, tensor.dtype)
            self._read_chunk(name, chunk, source)
            for box, out in meeting:
                if out is not source:
                    out[_within(box, here, box)] = source[_within(box, here, here)]
        return outs

    def _read_chunk(self, name: str, chunk: StoredChunk, out: np.ndarray) -> None:
        left, offset = _bytes_of(out), chunk.offset
        try:
            while left:
                count = os.preadv(self._fds[chunk.file], [left], offset)
                if count == 0:
                    raise CheckpointError(f"file {chunk.file}: ends inside tensor {name!r}")
                left, offset = left[count:], offset + count
        except OSError as error:
            raise CheckpointError(f"file {chunk.file}: tensor {name!r} cannot be read ({error.strerror})") from error
        digest = xxhash.xxh3_128_hexdigest(_bytes_of(out))
        if digest != chunk.digest:
            raise CheckpointError(
                f"file {chunk.file}: tensor {name!r} at {list(chunk.start)} is corrupt: digest {digest}, "
                f"expected {chunk.digest}"
            )


def _meet(a: Box, b: Box) -> bool:
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True))


def _within(a: Box, b: Box, frame: Box) -> tuple[slice, ...]:
    """The intersection of two boxes, counted from the corner of frame."""
    return tuple(slice(max(x[0], y[0]) - f[0], min(x[1], y[1]) - f[0]) for x, y, f in zip(a, b, frame, strict=True))


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at a 64-byte boundary, which the CPU backend takes over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + nbytes].view(dtype).reshape(shape)
