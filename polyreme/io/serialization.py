"""save and load: nested Python values and Tensors in one safetensors file, digested; no pickle.

The values' structure is JSON in the file's metadata, so any safetensors reader still sees the weights.
"""

import argparse
import dataclasses
import enum
import errno
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.memory import Size
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, ConfigError, DTypeError
from polyreme.io import paddle_pickle, paddle_tensors, safetensors_file

STRUCTURE = "polyreme.structure"
NAME_TABLE = "StructuredToParameterName@@"
MAX_DEPTH = 64  # of nested containers: deeper means a cycle or a hostile file
MAX_VALUES = 200_000  # numbers in an array count as one; this many Python values take a quarter of a second to read

_SAVE_DEFAULTS = {"use_binary_format": False}
_LOAD_DEFAULTS = {
    "model_filename": None,
    "params_filename": None,
    "keep_name_table": False,
    "return_numpy": False,
    "use_binary_format": False,
}


_log = logging.getLogger("polyreme.io")
_logged: set[str] = set()  # classes whose objects were saved as records


class SavedRecord(SimpleNamespace):
    """What load gives for an object of settings, such as a dataclass: its attributes. saved_class: where its class was,
    "module.Class"; nothing of that is imported."""

    saved_class: str


class FileKind(NamedTuple):
    """A class whose values are files of their own: safetensors whose metadata name the format."""

    cls: type
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


_file_kinds: dict[str, FileKind] = {}


def register_file_kind(format_name: str, kind: FileKind) -> None:
    """Let save and load take the values of a class of a higher floor."""
    _file_kinds[format_name] = kind


def save(obj: Any, path: str | os.PathLike[str] | BytesIO, protocol: int = 4, **configs: Any) -> None:
    """Save nested dicts, lists, tuples, sets, numbers, strings, None, ndarrays and Tensors, or a static Program
    (without the values of its parameters, for which there is `static.save`), as one safetensors file.

    Of a dataclass or a namespace the fields are saved, of a member of an enumeration its value; load gives a
    SavedRecord, and the value.

    A file appears whole or not at all. protocol is there for the signature: only its default is taken, as nothing is
    pickled. Raises ConfigError for a setting that has no meaning here, DTypeError for a value of another class.

    >>> buffer = BytesIO()
    >>> save({"weight": np.ones(2, "float32"), "epoch": 3}, buffer)
    >>> _ = buffer.seek(0)
    >>> load(buffer, return_numpy=True)
    {'weight': array([1., 1.], dtype=float32), 'epoch': 3}
    """
    _check_configs("save", configs, _SAVE_DEFAULTS)
    if protocol != 4:
        raise ConfigError(f"save(protocol={protocol!r}): nothing is pickled here, leave protocol at its default of 4")
    write, nbytes = _writer(obj)
    if isinstance(path, BytesIO):
        write(path)
    else:
        _write_whole(_file_path("save", path), write, nbytes)


def _writer(obj: Any) -> tuple[Callable[[IO[bytes]], object], int]:
    """What writes a value into an open file, and the bytes of its arrays."""
    for kind in _file_kinds.values():
        if isinstance(obj, kind.cls):
            return _writer_of_bytes(kind.to_bytes(obj))
    encoder = _Encoder()
    structure = json.dumps(encoder.encode(obj, "", 0), separators=(",", ":"))
    metadata = {"format": "polyreme", STRUCTURE: structure}
    nbytes = sum(array.nbytes for array in encoder.arrays.values())
    return lambda file: safetensors_file.write(file, encoder.arrays, metadata), nbytes


def _writer_of_bytes(content: bytes) -> tuple[Callable[[IO[bytes]], object], int]:
    return lambda file: file.write(content), len(content)


def load(path: str | os.PathLike[str] | BytesIO, **configs: Any) -> Any:
    """Load what save wrote, what PaddlePaddle's save wrote (.pdparams, .pdopt), or any safetensors file as a dict; of
    a BytesIO what begins where it stands, so that several values saved into one are loaded one after the other. Tensors
    want no gradients.

    return_numpy: Tensors come as ndarrays; keep_name_table: a dict of Tensors gets back its table of their names.
    A pickle is read as data: nothing that it names is imported or called. Raises CheckpointError for one that holds
    more than containers, numbers, strings, arrays and Tensors, for other formats, and for a file that is corrupt.
    """
    settings = _check_configs("load", configs, _LOAD_DEFAULTS)
    if isinstance(path, BytesIO):
        start = path.tell()
        if _is_paddles(path.getbuffer()[start : start + 12]):
            value, length = _read_paddles(path.getvalue()[start:], "the BytesIO", settings)
            path.seek(start + length)
            return value
        arrays, metadata = safetensors_file.read(path, "the BytesIO", to_end=False)
        where = "the BytesIO"
        kind = _file_kinds.get(metadata.get("format", ""))
        if kind is not None:
            _check_no_arrays(kind, settings)
            return kind.from_bytes(path.getvalue()[start : path.tell()])
    else:
        file_path = _file_path("load", path)
        where = str(file_path)
        try:
            with open(file_path, "rb") as file:
                if _is_paddles(file.read(12)):
                    file.seek(0)
                    return _read_paddles_whole(file.read(), where, settings)
                file.seek(0)
                arrays, metadata = safetensors_file.read(file, where)
                kind = _file_kinds.get(metadata.get("format", ""))
                if kind is not None:
                    _check_no_arrays(kind, settings)
                    file.seek(0)
                    return kind.from_bytes(file.read())
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    return _Decoder(
        arrays, metadata, where, **{k: settings[k] for k in ("return_numpy", "keep_name_table")}
    ).decode_file()


def _is_paddles(head: bytes | memoryview) -> bool:
    return paddle_pickle.is_pickle(bytes(head)) or paddle_tensors.is_record(bytes(head))


def _read_paddles_whole(data: bytes, where: str, settings: dict[str, Any]) -> Any:
    value, length = _read_paddles(data, where, settings)
    if length != len(data):
        raise CheckpointError(f"{where}: {len(data) - length:,} bytes follow the value; give a file of one value")
    return value


def _read_paddles(data: bytes, where: str, settings: dict[str, Any]) -> tuple[Any, int]:
    """What PaddlePaddle saved, and its length in bytes."""
    as_arrays = settings["return_numpy"]
    if not paddle_pickle.is_pickle(data[:12]):
        array, length = paddle_tensors.read_one(data, where)
        return array if as_arrays else to_tensor(array), length
    value, length = paddle_pickle.read(data, where)
    table = value.pop(NAME_TABLE, None) if isinstance(value, dict) else None
    names = table if isinstance(table, dict) else {}

    def tensor(pickled: paddle_pickle.PickledTensor, key: Any = None) -> Any:
        if as_arrays:
            return pickled.array
        result = to_tensor(pickled.array)
        name = pickled.name or names.get(key)
        if isinstance(name, str) and name:
            result.name = name
        return result

    if isinstance(value, dict):  # the table names the Tensors of the outermost dict
        is_tensor = paddle_pickle.PickledTensor
        value = {key: tensor(item, key) if isinstance(item, is_tensor) else item for key, item in value.items()}
    value = paddle_pickle.with_tensors(value, tensor)
    if settings["keep_name_table"] and table is not None:
        value[NAME_TABLE] = table
    return value, length


def _check_configs(function: str, configs: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    for name, value in configs.items():
        if name not in defaults:
            raise ConfigError(f"{function}({name}=...): no such setting; known are {', '.join(defaults)}")
        if name in ("return_numpy", "keep_name_table"):
            if not isinstance(value, bool):
                raise ConfigError(f"{function}({name}={value!r}): needs True or False")
        elif value != defaults[name]:
            raise ConfigError(
                f"{function}({name}={value!r}): there is one format here, safetensors, in one file; leave it out"
            )
    return {**defaults, **configs}


def _check_no_arrays(kind: FileKind, settings: dict[str, Any]) -> None:
    for name in ("return_numpy", "keep_name_table"):
        if settings[name]:
            raise ConfigError(f"load({name}=True): the file holds a {kind.cls.__name__}, no Tensors; leave it out")


def _file_path(function: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{function}: path is a {type(path).__name__}; pass a path or a BytesIO")
    text = os.fspath(path)
    if not text or text.endswith(os.sep) or os.path.isdir(text):
        raise ConfigError(f"{function}: path {text!r} names a folder; pass folder/file")
    return Path(os.path.realpath(text))


def _write_whole(path: Path, write: Callable[[IO[bytes]], object], nbytes: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            done = False
            try:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
                done = True
            finally:
                if not done:
                    os.unlink(file.name)
    except OSError as error:
        hint = f"; it needs {nbytes} bytes" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"save: {path} cannot be written: {error.strerror}{hint}") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class _Encoder:
    """Turns values into tagged JSON and collects the arrays; one object met twice is stored once."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._count = 0
        self._seen: dict[int, tuple[Any, dict]] = {}  # the object is kept so that its id stays its own

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"save: {path[:100]!r} is nested deeper than {MAX_DEPTH}: does a container hold itself?"
            )
        self._count += 1
        if self._count > MAX_VALUES:
            raise CheckpointError(f"save: more than {MAX_VALUES} values at {path[:100]!r}; put numbers into an ndarray")
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._tensor(value, path)
        if hasattr(value, "__array__"):  # what a Scope holds
            return self._tensor(np.asarray(value), path)
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) in (float, complex):
            return _encode_number(value)
        if type(value) in (list, Size):
            return [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]}
        if isinstance(value, dict):
            pairs = [[_key(k, path), self.encode(v, f"{path}.{k}", depth + 1)] for k, v in value.items()]
            return {"dict": pairs}
        if isinstance(value, set | frozenset):
            return {"set": [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]}
        if isinstance(value, enum.Enum):
            return self.encode(value.value, path, depth + 1)
        fields = _fields_of(value)
        if fields is not None:
            pairs = [[name, self.encode(v, f"{path}.{name}", depth + 1)] for name, v in fields.items()]
            return {"record": [_named_once(value), pairs]}
        raise DTypeError(
            f"save: {path.lstrip('.') or 'the object'} is a {type(value).__name__}; only dicts, lists, tuples, sets, "
            "numbers, strings, None, ndarrays, Tensors and dataclasses of them are saved (of a Layer or optimizer pass "
            "its state_dict())"
        )

    def _tensor(self, value: Any, path: str) -> dict[str, Any]:
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype not in dtypes.NAMES.values():
            raise DTypeError(f"save: {path.lstrip('.')} has dtype {array.dtype}; known are {', '.join(dtypes.NAMES)}")
        key = self._unique(path.lstrip(".") or "value")
        node: dict[str, Any] = {"tensor": key, "dtype": array.dtype.name, "as": _kind(value)}
        if isinstance(value, Tensor):
            node["name"] = value.name
        self.arrays[key] = _pairs(array) if dtypes.is_complex(array.dtype) else array
        self._seen[id(value)] = value, node
        return node

    def _unique(self, key: str) -> str:
        base, n = key, 1
        while key in self.arrays or key == "__metadata__":
            n += 1
            key = f"{base}#{n}"
        return key


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is there to hold them; None for others."""
    if isinstance(value, SavedRecord):
        return {name: v for name, v in vars(value).items() if name != "saved_class"}
    if isinstance(value, SimpleNamespace | argparse.Namespace):
        return dict(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return None


def _named_once(value: Any) -> str:
    """Where an object's class is; the first time a line says what comes back."""
    if isinstance(value, SavedRecord):
        return value.saved_class
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name not in _logged:
        _logged.add(name)
        _log.info("save: a %s is saved as its fields; load gives them as a SavedRecord, and imports no class", name)
    return name


def _kind(value: Any) -> str:
    return "Tensor" if isinstance(value, Tensor) else "ndarray" if isinstance(value, np.ndarray) else "scalar"


def _pairs(array: np.ndarray) -> np.ndarray:
    """Complex numbers as pairs (real, imaginary) in a new last dim: safetensors has no complex dtype."""
    real = np.dtype(f"float{array.dtype.itemsize * 4}")
    return np.ascontiguousarray(array).reshape(-1).view(real).reshape(*array.shape, 2)


def _key(key: Any, path: str) -> Any:
    if key is None or type(key) in (bool, int, str):
        return key
    if type(key) is float and math.isfinite(key):
        return key
    raise DTypeError(
        f"save: a key of {path.lstrip('.') or 'the dict'} is a {type(key).__name__}; use strings or numbers"
    )


def _encode_number(value: complex) -> Any:
    if isinstance(value, complex):
        return {"complex": [_encode_number(value.real), _encode_number(value.imag)]}
    return value if math.isfinite(value) else {"float": str(value)}


class _Decoder:
    """Turns tagged JSON back into values; everything it meets may be hostile."""

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        metadata: dict[str, str],
        where: str,
        return_numpy: bool,
        keep_name_table: bool,
    ) -> None:
        self.arrays = arrays
        self.metadata = metadata
        self.where = where
        self.return_numpy = return_numpy
        self.keep_name_table = keep_name_table
        self._made: dict[str, Any] = {}
        self._count = 0

    def decode_file(self) -> Any:
        ours = [key in self.metadata for key in (STRUCTURE, safetensors_file.DIGEST)]
        if not any(ours):  # another program's file
            return {name: array if self.return_numpy else to_tensor(array) for name, array in self.arrays.items()}
        if not all(ours):
            raise CheckpointError(
                f"{self.where}: has only one of {STRUCTURE} and {safetensors_file.DIGEST}: it was altered"
            )
        try:
            structure = safetensors_file.parse_json(self.metadata[STRUCTURE])
            value = self._decode(structure, 0)
            if self.keep_name_table and isinstance(value, dict):
                value[NAME_TABLE] = {key: node["name"] for key, node in structure["dict"] if _is_tensor(node)}
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(f"{self.where}: {STRUCTURE} is malformed ({text})") from error
        return value

    def _decode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        self._count += 1
        if self._count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if isinstance(node, list):
            return [self._decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return self._tensor(node)
        ((tag, body),) = node.items()
        if tag == "tuple":
            return tuple(self._decode(item, depth + 1) for item in body)
        if tag == "dict":
            return {key: self._decode(value, depth + 1) for key, value in body}
        if tag == "set":
            return {self._decode(item, depth + 1) for item in body}
        if tag == "record":
            name, pairs = body
            return SavedRecord(**{key: self._decode(v, depth + 1) for key, v in pairs} | {"saved_class": str(name)})
        if tag == "float":
            return float(body)
        if tag == "complex":
            real, imag = (self._decode(part, depth + 1) for part in body)
            return complex(real, imag)
        raise ValueError(f"unknown tag {tag!r}")

    def _tensor(self, node: dict[str, Any]) -> Any:
        key = node["tensor"]
        if key not in self._made:
            self._made[key] = self._make(self.arrays[key], node)
        return self._made[key]

    def _make(self, array: np.ndarray, node: dict[str, Any]) -> Any:
        dtype = dtypes.NAMES[node["dtype"]]
        if dtypes.is_complex(dtype):
            if array.dtype.itemsize * 2 != dtype.itemsize or array.shape[-1:] != (2,):
                raise ValueError(f"tensor {node['tensor']!r} is {array.dtype}{list(array.shape)}, no pairs of {dtype}")
            array = array.reshape(-1).view(dtype).reshape(array.shape[:-1])
        if array.dtype != dtype:
            raise ValueError(f"tensor {node['tensor']!r} is {array.dtype}, not {dtype}")
        if node["as"] == "scalar":
            return array[()]
        if node["as"] == "ndarray" or self.return_numpy:
            return array
        tensor = to_tensor(array)
        tensor.name = str(node["name"])
        return tensor


def _is_tensor(node: Any) -> bool:
    return isinstance(node, dict) and node.get("as") == "Tensor"
