"""The safetensors file format, read without trust: every size is checked against the file before it is used.

Layout: 8 bytes little-endian length of the header, a JSON header, then the data of the tensors without gaps.
Source: https://github.com/huggingface/safetensors#format. Written here and not by the library because a digest of the
data goes into the header, and because the library accepts duplicate keys.
"""

import functools
import gc
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import xxhash

from polyreme.errors import CheckpointError

CODES: dict[str, np.dtype] = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype("uint16"),
    "I16": np.dtype("int16"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "F32": np.dtype("float32"),
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F64": np.dtype("float64"),
}
_CODE_OF = {dtype: code for code, dtype in CODES.items()}
HEADER_BYTES = 4 << 20  # the most hostile JSON of this length takes 0.2 s and 100 MB to parse; 15k tensors need 3 MB
DIGEST = "polyreme.xxh3_128"
_BLOCK_BYTES = 16 << 20
MAX_NDIM = 64  # NumPy's own limit

_CONVERT = (
    "convert it once where you trust it: load it with the program that wrote it, write the arrays with "
    "safetensors.numpy.save_file(dict_of_arrays, 'weights.safetensors'), and load that"
)
_FOREIGN = (  # (offset, magic, what it is); safetensors itself has "{" at offset 8
    (0, b"\x80\x02", "a pickle (.pdparams, .pt, .pkl or joblib)"),
    (0, b"\x80\x03", "a pickle (.pdparams, .pt, .pkl or joblib)"),
    (0, b"\x80\x04", "a pickle (.pdparams, .pt, .pkl or joblib)"),
    (0, b"\x80\x05", "a pickle (.pdparams, .pt, .pkl or joblib)"),
    (0, b"PK\x03\x04", "a zip archive (torch .pt or NumPy .npz, either may hold pickles)"),
    (0, b"\x93NUMPY", "a NumPy .npy file (may hold a pickle)"),
    (0, b"\x89HDF\r\n", "an HDF5 file"),
    (0, b"\x1f\x8b", "a gzip stream (joblib or a compressed pickle)"),
    (0, b"\x78\x01", "a zlib stream (joblib)"),
    (0, b"\x78\x5e", "a zlib stream (joblib)"),
    (0, b"\x78\x9c", "a zlib stream (joblib)"),
    (0, b"\x78\xda", "a zlib stream (joblib)"),
    (0, b"BZh", "a bzip2 stream (joblib)"),
    (0, b"\xfd7zXZ", "an xz stream (joblib)"),
    (257, b"ustar", "a tar archive (old torch .tar)"),
)


@dataclass(frozen=True)
class Entry:
    """One tensor of the header: dtype, shape, and where its bytes begin and end in the data."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def refuse_foreign(path: Path) -> None:
    """Raise CheckpointError if a file at path is of a format that is never loaded; anything else passes."""
    if path.is_file():
        with open(path, "rb") as file:
            raise CheckpointError(
                f"{path} is {foreign(file.read(512)) or 'a file'}, not a checkpoint folder; {_CONVERT}"
            )


def foreign(head: bytes) -> str | None:
    """What a file is by its first 512 bytes, if it is of a format that can carry code; None for any other."""
    if head[8:9] == b"{":
        return None
    for offset, magic, what in _FOREIGN:
        if head.startswith(magic, offset):
            return what
    # protocol 0 and 1 of pickle are text: an opening mark, then names of what to call
    if head[:1] in (b"(", b"c", b"]", b"}") and (b"\n" in head or b"." in head):
        return "a pickle of protocol 0 or 1"
    return None


def header(arrays: Iterable[tuple[str, np.ndarray]], boundary: int = 8) -> bytes:
    """What precedes the data of these arrays, which follow in this order without gaps, from a multiple of boundary on.

    A dtype that the format has no code for is declared as its bytes, with a last dim of its itemsize.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for name, array in arrays:
        code, shape = _CODE_OF.get(array.dtype), list(array.shape)
        if code is None:
            code, shape = "U8", [*shape, array.dtype.itemsize]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    return _frame(entries, boundary)


def _frame(entries: dict[str, Any], boundary: int = 8) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % boundary)  # the data begins aligned
    if len(text) > HEADER_BYTES:
        raise CheckpointError(
            f"the header would be {len(text)} bytes, over {HEADER_BYTES}; save fewer tensors per file"
        )
    return len(text).to_bytes(8, "little") + text


def write(file: IO[bytes], arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write native-order arrays of the dtypes in CODES; adds the metadata DIGEST, see digest()."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        entries[name] = {"dtype": _CODE_OF[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    data = [_bytes_of(np.ascontiguousarray(array)) for array in arrays.values()]
    entries["__metadata__"] = {**metadata, DIGEST: digest({**entries, "__metadata__": metadata}, data)}
    file.write(_frame(entries))
    for block in data:
        file.write(block)


def read(file: BufferedIOBase, where: str, to_end: bool = True) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and metadata of a file; where names it in messages.

    to_end: whether the file ends where its data does. If not, the file stands there afterwards.
    Raises CheckpointError for anything the format does not allow, before memory is taken for it, and for data whose
    digest differs from the one in the metadata. A file without a digest (other programs write none) is read as it is.
    """
    try:
        return _read(file, to_end)
    except CheckpointError as error:
        text = str(error)
        if len(text) > 1000:  # a hostile name may be megabytes long
            text = f"{text[:300]} ... {text[-600:]}"
        raise CheckpointError(f"{where}: {text}") from error


class Slices:
    """The tensors of a file, read in parts when they are asked for; the header is checked as by `read`, the digest by
    `check_digest` alone.

    path: of the file. entries: dtype and shape by name. Raises CheckpointError for a file that is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                what = foreign(file.read(512))
                if what:
                    raise CheckpointError(f"is {what}, which is refused because loading it can run code; {_CONVERT}")
                total = file.seek(0, os.SEEK_END)
                file.seek(0)
                self._header, data_bytes = _header(file, total)
                self.entries: dict[str, Entry] = _entries(self._header, data_bytes, to_end=True)
                self._base = file.tell()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {str(error)[:1000]}") from error

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, by slices of steps above 0, one for each dim. Only rows from the first to the last of the
        first slice are read."""
        entry = self.entries[name]
        rows = range(entry.shape[0])[index[0]] if entry.shape else range(1)
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        count = max(0, rows.stop - rows.start)
        data = np.empty(count * row, np.uint8)
        with open(self.path, "rb") as file:
            file.seek(self._base + entry.begin + rows.start * row)
            if file.readinto(data.data) != len(data):
                raise CheckpointError(f"{self.path}: tensor {name!r}: the file ended while it was read")
        array = data.view(entry.dtype).reshape((count, *entry.shape[1:]) if entry.shape else ())
        return array[(slice(None, None, rows.step), *index[1:])] if entry.shape else array

    def check_digest(self) -> bool:
        """Read all of the data and compare its digest with the header's; whether there is one.

        Raises CheckpointError for another one.
        """
        try:
            metadata = _metadata(self._header)
            if DIGEST not in metadata:
                return False
            with open(self.path, "rb") as file:
                file.seek(self._base)
                _compare_digest(self._header, metadata, iter(functools.partial(file.read, _BLOCK_BYTES), b""))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return True


def digest(header: dict[str, Any], data: Iterable[memoryview | bytes]) -> str:
    """xxh3_128 of the header without the digest itself, keys sorted, then of the data."""
    state = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for block in data:
        state.update(block)
    return state.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read(file: BufferedIOBase, to_end: bool) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    start = file.tell()
    total = file.seek(0, os.SEEK_END) - start
    file.seek(start)
    what = foreign(file.read(512))
    if what:
        raise CheckpointError(f"is {what}, which is refused because loading it can run code; {_CONVERT}")
    file.seek(start)
    header, data_bytes = _header(file, total)
    metadata = _metadata(header)
    entries = _entries(header, data_bytes, to_end)
    base = file.tell()
    arrays = {name: _data(file, base, name, entry) for name, entry in entries.items()}
    file.seek(base + max((entry.end for entry in entries.values()), default=0))
    if DIGEST in metadata:
        _compare_digest(header, metadata, (_bytes_of(array) for array in arrays.values()))
    for name, array in arrays.items():
        if array.dtype == bool and array.size and array.view(np.uint8).max() > 1:
            raise CheckpointError(f"tensor {name!r} is BOOL but holds bytes other than 0 and 1")
    return arrays, metadata


def _header(file: BufferedIOBase, total: int) -> tuple[dict[str, Any], int]:
    if total < 8:
        raise CheckpointError(f"has {total} bytes; a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(file.read(8), "little")
    if length > total - 8:
        raise CheckpointError(f"declares a header of {length} bytes, {total - 8} follow: truncated, or not safetensors")
    if length > HEADER_BYTES:
        raise CheckpointError(f"declares a header of {length} bytes, over the limit of {HEADER_BYTES}")
    text = file.read(length)
    if text[:1] != b"{":
        raise CheckpointError("header does not begin with '{': not a safetensors file")
    try:
        header = parse_json(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError("header is not a JSON object")
    return header, total - 8 - length


def parse_json(text: str) -> Any:
    """JSON from a file nobody vouches for; raises ValueError or RecursionError, also for a key that comes twice."""
    collecting = gc.isenabled()
    gc.disable()  # a million small lists hold no cycles, but the collector would go through them ten times
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    finally:
        if collecting:
            gc.enable()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} comes twice")
        result[key] = value
    return result


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ is not an object of strings")
    return metadata


def _entries(header: dict[str, Any], data_bytes: int, to_end: bool) -> dict[str, Entry]:
    """Entries in the order of their data, which they must tile."""
    result = [(name, _entry(name, value)) for name, value in header.items() if name != "__metadata__"]
    entries = dict(sorted(result, key=lambda item: (item[1].begin, item[1].end)))
    offset = 0
    for name, entry in entries.items():
        if entry.begin != offset:
            raise CheckpointError(
                f"tensor {name!r} begins at byte {entry.begin}, expected {offset}: an overlap or a gap"
            )
        offset = entry.end
    if offset > data_bytes or (to_end and offset < data_bytes):
        raise CheckpointError(f"tensors end at byte {offset} but the file holds {data_bytes} bytes of data")
    return entries


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in CODES:
        raise CheckpointError(f"tensor {name!r} has dtype {str(code)[:40]!r}; known are {', '.join(CODES)}")
    if not _wholes(shape) or len(shape) > MAX_NDIM:
        raise CheckpointError(f"tensor {name!r}: shape is not a list of at most {MAX_NDIM} whole numbers")
    if not _wholes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"tensor {name!r}: data_offsets is not a pair [begin, end]")
    if math.prod(n for n in shape if n) >= 2**60:  # NumPy cannot count that far even when another dim is 0
        raise CheckpointError(f"tensor {name!r}: shape {shape} is too large")
    nbytes = math.prod(shape) * CODES[code].itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(f"tensor {name!r}: {code}{shape} takes {nbytes} bytes, not {offsets[1] - offsets[0]}")
    return Entry(CODES[code], tuple(shape), *offsets)


def _wholes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _data(file: BufferedIOBase, base: int, name: str, entry: Entry) -> np.ndarray:
    array = np.empty(entry.end - entry.begin, np.uint8)
    file.seek(base + entry.begin)
    if file.readinto(array.data) != len(array):
        raise CheckpointError(f"tensor {name!r}: the file ended while it was read")
    return array.view(entry.dtype).reshape(entry.shape)


def _compare_digest(header: dict[str, Any], metadata: dict[str, str], data: Iterable[memoryview | bytes]) -> None:
    expected = metadata[DIGEST]
    rest = {key: value for key, value in metadata.items() if key != DIGEST}
    actual = digest({**header, "__metadata__": rest}, data)
    if actual != expected:
        raise CheckpointError(f"is corrupt: digest {actual}, expected {expected[:40]}")
