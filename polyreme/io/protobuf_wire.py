"""Protocol buffers read by field number: enough of the wire format for files whose fields are known.

Source: the encoding page of the protocol buffers' documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from polyreme.errors import CheckpointError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireField(NamedTuple):
    """A field that is read: its name, its kind, and whether there may be several.

    kind: "int", "bool", "float", "double", "string", or the message that it is.
    """

    name: str
    kind: str | Mapping[int, Any]
    repeated: bool = False


Message = Mapping[int, WireField]
"""A message's fields by number; those that are not there are passed over."""


def parse(data: memoryview | bytes, message: Message, depth: int = 0) -> dict[str, Any]:
    """The message's fields by name: those that are there, a list for a repeated one, a dict for a message.

    Raises CheckpointError for bytes that are no such message: cut, of another wire type, nested over 32 deep.
    """
    view = memoryview(data)
    if depth > 32:
        raise CheckpointError("a message is nested deeper than 32")
    values: dict[str, Any] = {field.name: [] for field in message.values() if field.repeated}
    place = 0
    while place < len(view):
        key, place = varint(view, place)
        number, wire = key >> 3, key & 7
        raw: Any
        if wire == _VARINT:
            raw, place = varint(view, place)
        elif wire == _BYTES:
            length, place = varint(view, place)
            raw, place = _take(view, place, length)
        elif wire in (_FIXED32, _FIXED64):
            raw, place = _take(view, place, 4 if wire == _FIXED32 else 8)
        else:
            raise CheckpointError(f"byte {place} begins a field of wire type {wire}, which is none")
        field = message.get(number)
        if field is None:
            continue
        read = _values(raw, wire, field, depth)
        if field.repeated:
            values[field.name] += read
        elif read:
            values[field.name] = read[-1]
    return values


def varint(view: memoryview, place: int) -> tuple[int, int]:
    """The number that begins at a place, as unsigned, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(view):
            raise CheckpointError(f"the message ends at byte {place}, inside a number")
        byte = view[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, place
    raise CheckpointError(f"a number at byte {place} is longer than 64 bits")


def _take(view: memoryview, place: int, length: int) -> tuple[memoryview, int]:
    if length > len(view) - place:
        raise CheckpointError(f"a field at byte {place} claims {length:,} bytes, and there are {len(view) - place:,}")
    return view[place : place + length], place + length


def _values(raw: Any, wire: int, field: WireField, depth: int) -> list[Any]:
    """What one occurrence of a field says; several values if they are packed."""
    kind = field.kind
    if isinstance(kind, Mapping):
        _expect(wire == _BYTES, field, wire)
        return [parse(raw, kind, depth + 1)]
    if kind == "string":
        _expect(wire == _BYTES, field, wire)
        return [str(raw, "utf-8", "replace")]
    if kind in ("float", "double"):
        code, size, single = ("f", 4, _FIXED32) if kind == "float" else ("d", 8, _FIXED64)
        _expect(wire in (_BYTES, single) and len(raw) % size == 0, field, wire)
        return list(struct.unpack(f"<{len(raw) // size}{code}", raw))
    _expect(wire in (_VARINT, _BYTES), field, wire)
    numbers = [raw] if wire == _VARINT else _unpack_varints(raw)
    return [bool(n) for n in numbers] if kind == "bool" else [n - (n >> 63 << 64) for n in numbers]


def _unpack_varints(raw: memoryview) -> list[int]:
    numbers, place = [], 0
    while place < len(raw):
        number, place = varint(raw, place)
        numbers.append(number)
    return numbers


def _expect(holds: bool, field: WireField, wire: int) -> None:
    if not holds:
        raise CheckpointError(f"field {field.name!r} has wire type {wire}, which does not fit; it is another format")
