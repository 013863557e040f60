"""Pickles read as data: a small machine over their opcodes that knows values, containers and arrays of numbers.

Nothing that a pickle names is imported or called: a few names have a meaning here, a reader of one format may give a
meaning to more, and every other is refused. Source of the opcodes: the standard library's pickletools.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from polyreme.errors import DataError

MAX_BYTES = 1 << 28
"""How long a pickle may be, and how much its arrays and decoded strings may hold together."""
# letters and sizes of plain numbers: no objects, no fields, no strings
_NUMBERS = re.compile(r"[<>|=]?(?:[iu][1248]|f[248]|c(?:8|16)|b1)")
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Array:
    """An array before its BUILD, and the places of the memo that promise it."""

    def __init__(self) -> None:
        self.memoized: list[int] = []


class _DType:
    """A dtype before and after its BUILD."""

    def __init__(self, code: str) -> None:
        self.value = np.dtype(code)


class PickledName:
    """A name that a pickle asks for: what calling it gives, None for what is only mentioned.

    call(machine, *arguments) -> the value; it raises DataError for arguments that are not those of data.
    """

    call: Callable[..., Any] | None

    name: str

    def __init__(self, name: str, call: Callable[..., Any] | None) -> None:
        self.name, self.call = name, call

    def __repr__(self) -> str:
        return self.name


Names = Mapping[tuple[str, str], PickledName]


def read_pickle(file: BinaryIO, path: Path) -> Any:
    """What a pickle of numbers, strings, lists, tuples, dicts and arrays holds; Python 2's strings are bytes.

    Raises DataError, which names path, for one that is damaged or longer than MAX_BYTES, and for one that asks for
    anything else: another class or function, an array of objects, one larger than its bytes.
    """
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: a pickle in it is longer than {MAX_BYTES:,} bytes; is it the file that was meant?")
    return parse_pickle(data, str(path), {}, MAX_BYTES)[0]


def parse_pickle(data: bytes, where: str, names: Names, room: int) -> tuple[Any, int]:
    """What a pickle holds, and how many bytes long it is; where begins messages.

    names: more of them that have a meaning, by module and name. room: bytes that its arrays and decoded strings may
    take together. Raises DataError as `read_pickle` does.
    """
    stream = io.BytesIO(data)
    try:
        return PickleMachine(names, room).run(stream), stream.tell()
    # a pop of an empty stack, a name never stored, a value of another class than an opcode needs
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise DataError(f"{where}: a pickle in it cannot be read: {str(error)[:300]}") from error
    except DataError as error:
        raise DataError(f"{where}: {str(error)[:300]}") from None


class PickleMachine:
    """The stack and memo of one pickle."""

    names: dict[tuple[str, str], PickledName]
    room: int

    def __init__(self, names: Names, room: int) -> None:
        self.names = {**_NAMES, **names}
        self.limit = self.room = room
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: BinaryIO) -> Any:
        for opcode, argument, _ in pickletools.genops(stream):
            self.step(opcode.name, argument)
        (result,) = self.stack
        return _finished(result)

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.stack.append(tuple(reversed([self.stack.pop() for _ in range(count)])))
        elif name not in ("PROTO", "FRAME", "STOP"):
            handler = _STEPS.get(name)
            if handler is None:
                raise DataError(f"a pickle has the opcode {name}; only data are read: arrays, strings and numbers")
            handler(self, argument)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def fill(self, pairs: list[Any]) -> None:
        """Keys and values, by turns, into the dict on top."""
        target = self.stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise ValueError("pairs for what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, (str, bytes, int, float)):  # a deep tuple could not be hashed
                raise DataError(
                    f"a pickle has a dict whose key is a {type(key).__name__}; strings and numbers are read"
                )
            target[key] = value

    def extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("items for what is no list")
        self.stack[-1].extend(values)

    def take(self, nbytes: int) -> None:
        self.room -= nbytes
        if self.room < 0:
            raise DataError(f"a pickle holds more than {self.limit:,} bytes of arrays and strings")

    def call(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, PickledName) or function.call is None:
            raise DataError(f"a pickle calls {function!r:.80}; only NumPy arrays, strings and numbers are read")
        self.stack.append(function.call(self, *arguments))

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _DType):
            _, order, *rest = state
            order = order.decode("latin-1") if isinstance(order, bytes) else order
            if order not in ("<", ">", "|", "=") or any(item not in (None, -1, 0) for item in rest):
                raise DataError(f"a pickle has a dtype of {state}; only plain numbers are read")
            target.value = target.value.newbyteorder(order)
        elif isinstance(target, _Array):
            # a pickle builds an array before it refers to it again
            self.stack[-1] = array = self.build_array(*state)
            for place in target.memoized:
                self.memo[place] = array
        else:
            raise DataError(f"a pickle sets the state of a {type(target).__name__}; only that of arrays is read")

    def build_array(self, _: Any, shape: Any, dtype: Any, fortran: Any, raw: Any) -> np.ndarray:
        is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not is_shape or not isinstance(dtype, _DType) or not isinstance(raw, bytes):
            raise DataError("a pickle has an array that is not of a shape, a dtype of numbers and bytes")
        if math.prod(shape) * dtype.value.itemsize != len(raw):
            raise DataError(
                f"a pickle has an array {list(shape)} of {dtype.value} in {len(raw):,} bytes; it is damaged"
            )
        self.take(len(raw))
        flat = np.frombuffer(bytearray(raw), dtype.value)  # a copy that may be written
        return flat.reshape(shape, order="F" if fortran else "C")

    def named(self, module: Any, name: Any) -> PickledName:
        """What a name means here."""
        if (module, name) not in self.names:
            raise DataError(f"a pickle asks for {module}.{name}; only NumPy arrays, strings and numbers are read")
        return self.names[module, name]

    def keep(self, place: int) -> None:
        """The memo has what is on top."""
        self.memo[place] = self.stack[-1]
        if isinstance(self.stack[-1], _Array):
            self.stack[-1].memoized.append(place)


def _make_array(machine: PickleMachine, subtype: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _make_dtype(machine: PickleMachine, code: Any, *copy: Any) -> _DType:
    text = code.decode("latin-1") if isinstance(code, bytes) else code
    if not isinstance(text, str) or not _NUMBERS.fullmatch(text):
        raise DataError(f"a pickle has an array of dtype {code!r}; only plain numbers are read")
    return _DType(text)


def _encode(machine: PickleMachine, text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
        raise DataError(f"a pickle encodes a {type(text).__name__} as {encoding!r}; latin1 is how bytes are stored")
    machine.take(len(text))
    return text.encode("latin-1")


def _empty_bytes(machine: PickleMachine) -> bytes:
    return b""  # how protocol 2 stores them


def _make_scalar(machine: PickleMachine, dtype: Any, raw: Any) -> np.generic:
    if not isinstance(dtype, _DType) or not isinstance(raw, bytes) or len(raw) != dtype.value.itemsize:
        raise DataError("a pickle has a number that is not of a dtype and as many bytes")
    return np.frombuffer(raw, dtype.value)[0]


_ARRAY = PickledName("numpy.ndarray", None)
_SCALAR = PickledName("numpy._core.multiarray.scalar", _make_scalar)
_RECONSTRUCT = PickledName("numpy._core.multiarray._reconstruct", _make_array)
_NAMES = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): PickledName("numpy.dtype", _make_dtype),
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
    ("__builtin__", "bytes"): PickledName("__builtin__.bytes", _empty_bytes),
    ("_codecs", "encode"): PickledName("_codecs.encode", _encode),
}


def _push(make: Callable[[PickleMachine, Any], Any]) -> Callable[[PickleMachine, Any], None]:
    return lambda machine, argument: machine.stack.append(make(machine, argument))


def _text_bytes(machine: PickleMachine, text: str) -> bytes:
    return text.encode("latin-1")


def _dict_since_mark(machine: PickleMachine, _: Any) -> None:
    pairs = machine.since_mark()
    machine.stack.append({})
    machine.fill(pairs)


def _stack_global(machine: PickleMachine, _: Any) -> PickledName:
    name, module = machine.stack.pop(), machine.stack.pop()
    return machine.named(module, name)


_STEPS: dict[str, Callable[[PickleMachine, Any], Any]] = {
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "DUP": _push(lambda machine, _: machine.stack[-1]),
    "STRING": _push(_text_bytes),
    "BINSTRING": _push(_text_bytes),
    "SHORT_BINSTRING": _push(_text_bytes),
    "EMPTY_LIST": _push(lambda machine, _: []),
    "LIST": _push(lambda machine, _: machine.since_mark()),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "EMPTY_DICT": _push(lambda machine, _: {}),
    "DICT": _dict_since_mark,
    "SETITEM": lambda machine, _: machine.fill([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.fill(machine.since_mark()),
    "TUPLE": _push(lambda machine, _: tuple(machine.since_mark())),
    "PUT": PickleMachine.keep,
    "BINPUT": PickleMachine.keep,
    "LONG_BINPUT": PickleMachine.keep,
    "MEMOIZE": lambda machine, _: machine.keep(len(machine.memo)),
    "GET": _push(lambda machine, index: machine.memo[index]),
    "BINGET": _push(lambda machine, index: machine.memo[index]),
    "LONG_BINGET": _push(lambda machine, index: machine.memo[index]),
    "GLOBAL": _push(lambda machine, text: machine.named(*text.split(" ", 1))),
    "STACK_GLOBAL": _push(_stack_global),
    "REDUCE": PickleMachine.call,
    "BUILD": PickleMachine.build,
}


def _finished(result: Any) -> Any:
    """The result, which no array, dtype or name lies in any more that was only announced. Containers are walked once,
    however often they are referred to and however deep they lie."""
    waiting: list[Any] = [[result]]
    seen: set[int] = set()
    while waiting:
        for value in _values(waiting.pop()):
            if isinstance(value, (_Array, _DType, PickledName)):
                raise DataError(
                    "a pickle holds an unfinished array, a dtype or a name; only arrays, strings and numbers are read"
                )
            if isinstance(value, (list, dict, tuple)) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)
    return result


def _values(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)
