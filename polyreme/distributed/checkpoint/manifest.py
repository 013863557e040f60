"""The manifest of one checkpoint: what is in it, in which files, with which digests; as values and as JSON.

The manifest carries a digest of itself, so a bit flipped in a learning rate is found like one in a weight.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError, DTypeError

FORMAT_VERSION = 1
FILE_NAME = re.compile(r"data-\d{5}-\d{5}\.(bin|safetensors)")


class CheckpointVersionError(CheckpointError):
    """A checkpoint written by a newer polyreme; it is never skipped in favour of an older step."""


@dataclass(frozen=True)
class FileEntry:
    """One data file: its name, bytes and xxh3_128 (the same value as `xxhsum -H2`)."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, from start with the given shape, as bytes at an offset of one file, with its xxh3_128."""

    file: str
    offset: int
    nbytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: global shape, dtype, how it was placed when saved, and the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: list[Any] | None
    mesh: dict[str, int] | None
    chunks: tuple[StoredChunk, ...]

    @property
    def files(self) -> list[str]:
        """Names of the files that store the tensor, sorted."""
        return sorted({chunk.file for chunk in self.chunks})


@dataclass(frozen=True)
class Manifest:
    """Everything about one checkpoint but the bytes of its tensors."""

    step: int
    tensors: dict[str, TensorEntry]
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    replaces: tuple[str, ...] = ()  # folders of an abandoned branch that this step takes the place of

    @property
    def tree_hash(self) -> str:
        """Digest of every tensor's name, shape and dtype: equal for two checkpoints of the same model."""
        return json_hash([[name, list(t.shape), t.dtype.name] for name, t in sorted(self.tensors.items())])

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)

    def to_json(self) -> bytes:
        """The manifest as indented JSON, its own digest included."""
        meshes: list[dict[str, int]] = []
        body = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "tree_hash": self.tree_hash,
            "config_hash": json_hash(self.meta.get("config")),
            "meta": self.meta,
            "replaces": list(self.replaces),
            "files": [asdict(file) for file in self.files],
            "tensors": {name: _tensor_to_json(tensor, meshes) for name, tensor in self.tensors.items()},
            "meshes": meshes,
        }
        return json.dumps({**body, "manifest_hash": json_hash(body)}, indent=1).encode()

    @staticmethod
    def from_json(data: bytes) -> "Manifest":
        """Parse and check; raises CheckpointError for anything but a whole, consistent manifest of a known version."""
        body = _parse(data)
        version = body.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise CheckpointError(f"MANIFEST.json: format_version is {version!r}, needs a whole number from 1")
        if version > FORMAT_VERSION:
            raise CheckpointVersionError(
                f"MANIFEST.json: written in format_version {version}, this polyreme reads up to {FORMAT_VERSION}; "
                "upgrade polyreme to read it"
            )
        digest = body.pop("manifest_hash", None)
        if digest != json_hash(body):
            raise CheckpointError(f"MANIFEST.json: digest is {json_hash(body)}, expected {digest}: it was altered")
        try:
            manifest = _from_body(body)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"MANIFEST.json: malformed ({type(error).__name__}: {error})") from error
        return manifest


def part_to_json(tensors: dict[str, TensorEntry], files: tuple[FileEntry, ...]) -> bytes:
    """The part of a checkpoint that one of several processes wrote, as JSON: its files, and the chunks in them."""
    meshes: list[dict[str, int]] = []
    body = {
        "files": [asdict(file) for file in files],
        "tensors": {name: _tensor_to_json(tensor, meshes) for name, tensor in tensors.items()},
        "meshes": meshes,
    }
    return json.dumps(body).encode()


def part_from_json(data: bytes) -> tuple[dict[str, TensorEntry], tuple[FileEntry, ...]]:
    """The tensors and files that part_to_json was given; raises ValueError, KeyError or TypeError for anything else."""
    body = json.loads(data)
    files = _files_from_json(body["files"])
    tensors = {name: _tensor_from_json(name, t, body["meshes"], files) for name, t in body["tensors"].items()}
    return tensors, tuple(files.values())


def check_tiled(tensors: dict[str, TensorEntry]) -> None:
    """Raises ValueError for a tensor whose chunks are not the cells of one grid over it, each present once."""
    for name, tensor in tensors.items():
        if not _tile(tensor.shape, tensor.chunks):
            raise ValueError(f"tensor {name!r}: its chunks do not tile {tensor.shape}")


def config_hash(config: Any) -> str:
    """The digest a manifest stores for a JSON config; equal configs have equal digests.

    >>> config_hash({"lr": 0.1, "seed": 1}) == config_hash({"seed": 1, "lr": 0.1})
    True
    """
    return json_hash(config)


def json_hash(value: Any) -> str:
    """xxh3_128 of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def plain_json(value: Any, what: str) -> Any:
    """A deep copy of a JSON value; raises CheckpointError if JSON would change it (tuples, NaN, other classes)."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be written as JSON: {error}; pass plain lists, dicts, numbers") from error
    if copy != value:
        raise CheckpointError(
            f"{what} does not come back from JSON as it was: use lists for tuples and strings for keys of dicts"
        )
    return copy


def _parse(data: bytes) -> dict[str, Any]:
    if not data.strip():
        raise CheckpointError("MANIFEST.json: empty")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"MANIFEST.json: not JSON ({error})") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"MANIFEST.json: holds a {type(body).__name__}, needs an object")
    return body


def _tensor_to_json(tensor: TensorEntry, meshes: list[dict[str, int]]) -> dict[str, Any]:
    if tensor.mesh is not None and tensor.mesh not in meshes:
        meshes.append(tensor.mesh)
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype.name,
        "spec": tensor.spec,
        "mesh": None if tensor.mesh is None else meshes.index(tensor.mesh),
        "chunks": [asdict(chunk) for chunk in tensor.chunks],
    }


def _from_body(body: dict[str, Any]) -> Manifest:
    files = _files_from_json(body["files"])
    tensors = {name: _tensor_from_json(name, t, body["meshes"], files) for name, t in body["tensors"].items()}
    check_tiled(tensors)
    replaces = tuple(str(name) for name in body["replaces"])
    return Manifest(_as_count(body["step"]), tensors, tuple(files.values()), dict(body["meta"]), replaces)


def _files_from_json(listed: list[dict]) -> dict[str, FileEntry]:
    files = {f["name"]: FileEntry(str(f["name"]), _as_count(f["nbytes"]), str(f["digest"])) for f in listed}
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r} is not one that a checkpoint has")
    return files


def _tensor_from_json(name: str, body: dict, meshes: list[dict], files: dict[str, FileEntry]) -> TensorEntry:
    try:
        dtype = dtypes.as_dtype(body["dtype"])
    except DTypeError as error:
        raise ValueError(f"tensor {name!r}: {error}") from error
    chunks = tuple(
        StoredChunk(
            c["file"],
            _as_count(c["offset"]),
            _as_count(c["nbytes"]),
            _wholes(c["start"]),
            _wholes(c["shape"]),
            c["digest"],
        )
        for c in body["chunks"]
    )
    shape = _wholes(body["shape"])
    for chunk in chunks:
        if chunk.offset + chunk.nbytes > files[chunk.file].nbytes:
            raise ValueError(f"tensor {name!r}: a chunk ends beyond {chunk.file}")
        if chunk.nbytes != math.prod(chunk.shape) * dtype.itemsize:
            raise ValueError(f"tensor {name!r}: a chunk of {chunk.shape} {dtype} has {chunk.nbytes} bytes")
    mesh = None if body["mesh"] is None else meshes[_as_count(body["mesh"])]
    return TensorEntry(shape, dtype, body["spec"], mesh, chunks)


def _tile(shape: tuple[int, ...], chunks: tuple[StoredChunk, ...]) -> bool:
    """True if the chunks are the cells of one grid over shape, each present once."""
    if any(len(c.start) != len(shape) or len(c.shape) != len(shape) for c in chunks):
        return False
    if len({c.start for c in chunks}) != len(chunks):
        return False
    cells = 1
    for dim, length in enumerate(shape):
        intervals = sorted({(c.start[dim], c.start[dim] + c.shape[dim]) for c in chunks})
        ends = [0, *(stop for _, stop in intervals)]
        if [start for start, _ in intervals] != ends[:-1] or ends[-1] != length:
            return False
        cells *= len(intervals)
    return cells == len(chunks)


def _as_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _wholes(values: list) -> tuple[int, ...]:
    return tuple(_as_count(value) for value in values)
