"""The structure of saved values as tagged JSON beside a table of arrays, and back; what is read may be hostile."""

import argparse
import dataclasses
import enum
import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.memory import Size
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, DTypeError
from polyreme.io import safetensors_file

STRUCTURE = "polyreme.structure"
NAME_TABLE = "StructuredToParameterName@@"
MAX_DEPTH = 64  # of nested containers: deeper means a cycle or a hostile file
MAX_VALUES = 200_000  # numbers in an array count as one; this many Python values take a quarter of a second to read

_log = logging.getLogger("polyreme.io")
_logged: set[str] = set()  # classes whose objects were saved as records


class SavedRecord(SimpleNamespace):
    """What load gives for an object of settings, such as a dataclass: its attributes. saved_class: where its class was,
    "module.Class"; nothing of that is imported."""

    saved_class: str


class StructureEncoder:
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
            return self.encode_member(value, path, depth)
        fields = _fields_of(value)
        if fields is not None:
            pairs = [[name, self.encode(v, f"{path}.{name}", depth + 1)] for name, v in fields.items()]
            return self.encode_record(value, pairs)
        raise DTypeError(
            f"save: {path.lstrip('.') or 'the object'} is a {type(value).__name__}; only dicts, lists, tuples, sets, "
            "numbers, strings, None, ndarrays, Tensors and dataclasses of them are saved (of a Layer or optimizer pass "
            "its state_dict())"
        )

    def encode_member(self, member: enum.Enum, path: str, depth: int) -> Any:
        """A member of an enumeration: its value."""
        return self.encode(member.value, path, depth + 1)

    def encode_record(self, value: Any, fields: list[list[Any]]) -> dict[str, Any]:
        """An object of settings: the name of its class, and its fields as encoded pairs."""
        return {"record": [_named_once(value), fields]}

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


class StructureDecoder:
    """Turns tagged JSON back into values; everything it meets may be hostile.

    Of a file without any Tensor the ndarrays come as Tensors, as PaddlePaddle's load gives them; beside Tensors they
    stay ndarrays. A subclass that keeps_arrays leaves them as they were.
    """

    keeps_arrays = False

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
        self._decoded: dict[str, Any] = {}
        self._count = 0
        self._keeps = True

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
            self._keeps = self.keeps_arrays or self.return_numpy or _holds_tensors(structure)
            value = self.decode(structure, 0)
            if self.keep_name_table and isinstance(value, dict):
                value[NAME_TABLE] = {key: node["name"] for key, node in structure["dict"] if _is_tensor(node)}
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(f"{self.where}: {STRUCTURE} is malformed ({text})") from error
        return value

    def decode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        self._count += 1
        if self._count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return self._tensor(node)
        ((tag, body),) = node.items()
        if tag == "tuple":
            return tuple(self.decode(item, depth + 1) for item in body)
        if tag == "dict":
            return {key: self.decode(value, depth + 1) for key, value in body}
        if tag == "set":
            return {self.decode(item, depth + 1) for item in body}
        if tag == "record":
            name, pairs = body
            return SavedRecord(**{key: self.decode(v, depth + 1) for key, v in pairs} | {"saved_class": str(name)})
        if tag == "float":
            return float(body)
        if tag == "complex":
            real, imag = (self.decode(part, depth + 1) for part in body)
            return complex(real, imag)
        return self.decode_tagged(tag, body, depth)

    def decode_tagged(self, tag: str, body: Any, depth: int) -> Any:
        """A value of a kind that saved files do not have: ValueError."""
        raise ValueError(f"unknown tag {tag!r}")

    def _tensor(self, node: dict[str, Any]) -> Any:
        key = node["tensor"]
        if key not in self._decoded:
            self._decoded[key] = self._make(self.arrays[key], node)
        return self._decoded[key]

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
        if self.return_numpy or (node["as"] == "ndarray" and self._keeps):
            return array
        tensor = to_tensor(array)
        if node["as"] != "ndarray":
            tensor.name = str(node["name"])
        return tensor


def _is_tensor(node: Any) -> bool:
    return isinstance(node, dict) and node.get("as") == "Tensor"


def _holds_tensors(structure: Any) -> bool:
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if node.get("as") == "Tensor":
                return True
            waiting += node.values()
    return False
