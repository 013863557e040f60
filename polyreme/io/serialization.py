"""save and load: nested Python values and Tensors in one safetensors file, digested; no pickle.

The values' structure is JSON in the file's metadata, so any safetensors reader still sees the weights.
"""

import errno
import json
import os
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.io import paddle_pickle, paddle_tensors, safetensors_file
from polyreme.io.value_format import NAME_TABLE, STRUCTURE, SavedRecord, StructureDecoder, StructureEncoder

__all__ = ["FileKind", "SavedRecord", "load", "register_file_kind", "save"]

_SAVE_DEFAULTS = {"use_binary_format": False}
_LOAD_DEFAULTS = {
    "model_filename": None,
    "params_filename": None,
    "keep_name_table": False,
    "return_numpy": False,
    "use_binary_format": False,
}


class FileKind(NamedTuple):
    """A class whose values are files of their own: safetensors whose metadata name the format."""

    cls: type
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


_file_kinds: dict[str, FileKind] = {}


def register_file_kind(format_name: str, kind: FileKind) -> None:
    """Make save and load take the values of one more class, which a package above this one defines."""
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
    encoder = StructureEncoder()
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
    return StructureDecoder(
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


# what PyTorch's functions of these names take
_NOT_NEEDED = {
    "map_location": ". Leave it out: what is loaded lies where new Tensors go, set_device says where",
    "weights_only": ". Leave it out: no file is unpickled here",
}


def _check_configs(function: str, configs: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    for name, value in configs.items():
        if name not in defaults:
            raise ConfigError(
                f"{function}({name}=...): no such setting; known are {', '.join(defaults)}{_NOT_NEEDED.get(name, '')}"
            )
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
