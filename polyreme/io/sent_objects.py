"""Values on their way between processes of one program: as saved files have them, but as exact as they were sent.

Dataclasses, namespaces and members of enumerations come as themselves: their class is looked up among the modules that
the receiving process has imported. Nothing is imported or called for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
from io import BytesIO
from types import SimpleNamespace
from typing import Any

from polyreme.errors import CheckpointError, DTypeError
from polyreme.io import safetensors_file
from polyreme.io.value_format import STRUCTURE, SavedRecord, StructureDecoder, StructureEncoder


def to_bytes(value: Any) -> bytes:
    """The bytes of a value. Raises DTypeError for a class that is not sent, or that is no part of a module."""
    encoder = _SentEncoder()
    structure = json.dumps(encoder.encode(value, "", 0), separators=(",", ":"))
    buffer = BytesIO()
    safetensors_file.write(buffer, encoder.arrays, {"format": "polyreme", STRUCTURE: structure})
    return buffer.getvalue()


def from_bytes(data: bytes, where: str) -> Any:
    """The value that to_bytes was given. Raises CheckpointError for damage, and for a class that is not here."""
    arrays, metadata = safetensors_file.read(BytesIO(data), where)
    return _SentDecoder(arrays, metadata, where, return_numpy=False, keep_name_table=False).decode_file()


class _SentEncoder(StructureEncoder):
    def encode_member(self, member: enum.Enum, path: str, depth: int) -> Any:
        return {"member": [*_place_of(member), member.name]}

    def encode_record(self, value: Any, fields: list[list[Any]]) -> dict[str, Any]:
        if isinstance(value, SavedRecord):
            return super().encode_record(value, fields)
        return {"object": [*_place_of(value), fields]}


class _SentDecoder(StructureDecoder):
    keeps_arrays = True

    def decode_tagged(self, tag: str, body: Any, depth: int) -> Any:
        if tag not in ("member", "object"):
            return super().decode_tagged(tag, body, depth)
        module, name, content = body
        cls = _class_at(module, name)
        if tag == "member" and isinstance(cls, enum.EnumMeta):
            return cls[content]
        if tag == "object" and cls is not None and _holds_settings(cls):
            result = object.__new__(cls)
            for field, node in content:
                object.__setattr__(result, str(field), self.decode(node, depth + 1))
            return result
        raise CheckpointError(
            f"{self.where}: holds a {module}.{name}, and this process has no such class; import {module} on every rank"
        )


def _place_of(value: Any) -> tuple[str, str]:
    cls = type(value)
    if _class_at(cls.__module__, cls.__qualname__) is not cls:
        raise DTypeError(
            f"the object is a {cls.__module__}.{cls.__qualname__}, which other processes cannot find; define the class "
            "at the top of a module"
        )
    return cls.__module__, cls.__qualname__


def as_imported(record: SavedRecord) -> Any:
    """An object of the class that a record was saved from, if this process has imported it and it holds settings alone;
    else the record. Nothing of the class is called."""
    parts = record.saved_class.split(".")
    for count in range(len(parts) - 1, 0, -1):
        cls = _class_at(".".join(parts[:count]), ".".join(parts[count:]))
        if cls is not None and _holds_settings(cls):
            result = object.__new__(cls)
            for name, value in vars(record).items():
                if name != "saved_class":
                    object.__setattr__(result, name, value)
            return result
    return record


def _class_at(module: Any, name: Any) -> type | None:
    """The class of a name in a module that is imported already."""
    scope: Any = sys.modules.get(str(module))
    for part in str(name).split("."):
        scope = vars(scope).get(part) if hasattr(scope, "__dict__") else None
    return scope if isinstance(scope, type) else None


def _holds_settings(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or issubclass(cls, SimpleNamespace | argparse.Namespace)
