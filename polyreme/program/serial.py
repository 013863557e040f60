"""Programs as JSON and as bytes.

The file lists blocks of operations as they are in the Program: operations by class, ops by the names they
are declared under, arguments by program.encoding. It holds no code: a Python function in a Program is refused.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, ConfigError, DTypeError, ProgramError, did_you_mean
from polyreme.io import safetensors_file
from polyreme.io.complex_pairs import to_pairs
from polyreme.nn.parameter import Parameter
from polyreme.program.encoding import Arrays, Encoder, ValueDecoder
from polyreme.program.operation import Call, Operation, function_of
from polyreme.program.training import Optimize, StartOptimizer

FORMAT, VERSION = "polyreme.program", 1
_TEXT = "program.json"
_NOT_WRITTEN = ("_name", "block", "lod", "_hooks")  # attributes of Variables that have entries of their own


def to_body(program: Any, arrays: Arrays | None = None) -> dict[str, Any]:
    """The Program as what json.dumps takes. arrays: takes constants and held values; None writes them in."""
    encoder = Encoder(arrays, {id(b): b.idx for b in program.blocks})
    body = {
        "format": FORMAT,
        "version": VERSION,
        "polyreme": importlib.metadata.version("polyreme"),
        "random_seed": program.random_seed,
        "is_test": program.is_test,
        "held": [_held_json(encoder, name, tensor) for name, tensor in program.captured.items()],
        "blocks": [_block_json(encoder, block) for block in program.blocks],
    }
    return {**body, "digest": _digest(body)}


def to_json(program: Any, arrays: Arrays | None = None) -> str:
    """The Program as JSON; see Program.to_json."""
    return json.dumps(to_body(program, arrays), indent=1)


def to_bytes(program: Any) -> bytes:
    """The Program and its values as the bytes of one safetensors file."""
    arrays: Arrays = {}
    text = json.dumps(to_body(program, arrays)).encode()
    stored = {_TEXT: np.frombuffer(text, np.uint8)} | {n: to_pairs(a) for n, a in arrays.items()}
    file = io.BytesIO()
    safetensors_file.write(file, stored, {"format": FORMAT})
    return file.getvalue()


def _held_json(encoder: Encoder, name: str, tensor: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "value": encoder.array(np.asarray(tensor.numpy()), name=name),
        **_attributes(encoder, tensor, name, ("block", "lod", "_hooks")),
    }


def _block_json(encoder: Encoder, block: Any) -> dict[str, Any]:
    return {
        "parent": None if block.parent is None else block.parent.idx,
        "takes": list(block.takes),
        "vars": [_variable_json(encoder, name, var) for name, var in block.vars.items()],
        "ops": [_operation_json(encoder, op) for op in block.ops],
        "gives": encoder.encode(list(block.gives), f"the results of block {block.idx}"),
    }


def _variable_json(encoder: Encoder, name: str, var: Tensor) -> dict[str, Any]:
    symbol = var._array
    body: dict[str, Any] = {"name": name, "shape": [int(s) for s in symbol.shape], "dtype": symbol.dtype.name}
    if symbol.name != name:
        body["value"] = symbol.name  # an in-place op gave it this
    if symbol.weak_type:
        body["weak_type"] = True
    if symbol.known is not None:
        body["known"] = [encoder.array(np.asarray(k)) for k in symbol.known]
    if getattr(var, "lod", ()):
        body["lod"] = [level._array.name for level in var.lod]  # type: ignore[attr-defined]
    return {**body, **_attributes(encoder, var, name, _NOT_WRITTEN)}


def _attributes(encoder: Encoder, var: Tensor, name: str, without: tuple[str, ...]) -> dict[str, Any]:
    if var.__dict__.get("_hooks"):
        raise ProgramError(f"{name!r} has gradient hooks, which are functions and cannot be written into a file; "
                           "remove them")  # fmt: skip
    if var.__dict__.get("layouts"):
        raise ProgramError(
            f"parameter {name!r} is laid out by a plan over a mesh; write the Program before applying it"
        )
    kept = {k: v for k, v in var.__dict__.items() if k not in without}
    return {
        "class": "Parameter" if isinstance(var, Parameter) else "Variable",
        "stop_gradient": var.stop_gradient,
        "attributes": {k: encoder.encode(v, f"{name!r}: {k}") for k, v in kept.items()},
    }


def _operation_json(encoder: Encoder, op: Operation) -> dict[str, Any]:
    body: dict[str, Any] = {"op": type(op).__name__}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if type(value) is type(default) and not isinstance(value, np.ndarray) and value == default:
            continue
        called = getattr(op, "name", op.kind)
        body[field.name] = (
            _operation_json(encoder, value)
            if isinstance(value, Operation)
            else encoder.encode(value, f"operation {called!r}: {field.name}")
        )
    return body


# reading


def parse(text: str) -> dict[str, Any]:
    """The body of a Program's JSON, checked; raises CheckpointError."""
    try:
        body = safetensors_file.parse_json(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(f"not the JSON of a Program ({error}); it may be cut off") from error
    return checked(body)


def checked(body: Any) -> dict[str, Any]:
    """body, if it is a whole Program of a version that is known here; raises CheckpointError."""
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"not the JSON of a Program (format is not {FORMAT!r})")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"the Program has format version {body.get('version')!r}; this polyreme reads {VERSION}, upgrade it"
        )
    rest = {k: v for k, v in body.items() if k != "digest"}
    if body.get("digest") != (found := _digest(rest)):
        raise CheckpointError(f"the Program was changed since it was written: digest {found}, not {body.get('digest')}")
    return rest


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def fill(program: Any, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Fill an empty Program with what `parse` or `checked` gave."""
    outer, state.watch.active = state.watch.active, None  # nothing of this is recorded
    try:
        _ProgramReader(program, arrays).read(body)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, DTypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(f"the Program is malformed ({type(error).__name__}: {str(error)[:300]})") from error
    finally:
        state.watch.active = outer


def read_bytes(program: Any, data: bytes, where: str) -> None:
    """Fill an empty Program with what to_bytes gave; raises CheckpointError."""
    stored, _ = safetensors_file.read(io.BytesIO(data), where)  # type: ignore[arg-type]
    if _TEXT not in stored:
        raise CheckpointError(f"{where}: holds no Program; give what serialize_to_string or serialize_program returned")
    body = parse(stored.pop(_TEXT).tobytes().decode(errors="replace"))
    fill(program, body, stored)


class _ProgramReader:
    """Makes a Program of its body."""

    def __init__(self, program: Any, arrays: Mapping[str, np.ndarray]) -> None:
        self._program = program
        self._decoder = ValueDecoder(arrays, program.blocks, self._variable)

    def read(self, body: Mapping[str, Any]) -> None:
        program, blocks = self._program, body["blocks"]
        program.random_seed, program.is_test = body["random_seed"], bool(body["is_test"])
        for entry in blocks[1:]:
            program.add_block(program.blocks[entry["parent"]])
        for entry in body["held"]:
            program.captured[entry["name"]] = self._tensor(entry)
        for block, entry in zip(program.blocks, blocks, strict=True):
            self._variables(block, entry["vars"])
            block.takes = [str(n) for n in entry["takes"]]
            for name in block.takes:
                if name in block.vars:
                    block.vars[name]._node = block
        for block, entry in zip(program.blocks, blocks, strict=True):
            for op in entry["ops"]:
                self._append(block, op)
            block.gives = self._decoder.decode(entry["gives"])
        program.made_elsewhere = True
        program.changed()

    def _variable(self, name: str) -> Any:
        found = next((b.vars[name] for b in self._program.blocks if name in b.vars), None)
        found = found if found is not None else self._program.captured.get(name)
        if found is None:
            raise CheckpointError(f"the Program refers to a variable {name!r} that it does not have")
        return found

    def _tensor(self, entry: Mapping[str, Any]) -> Tensor:
        value = to_tensor(self._decoder.array(entry["value"]["$array"]))
        tensor: Any = Parameter.__new__(Parameter) if entry["class"] == "Parameter" else value
        if tensor is not value:
            Tensor.__init__(tensor, value._array)
        tensor.stop_gradient = bool(entry["stop_gradient"])
        tensor.__dict__.update(self._decoder.decode(entry["attributes"]))
        return tensor

    def _variables(self, block: Any, entries: list[Mapping[str, Any]]) -> None:
        for entry in entries:
            known = tuple(self._decoder.array(k["$array"]) for k in entry.get("known", ())) or None
            name, sizes = entry["name"], tuple(entry["shape"])
            weak, stops = bool(entry.get("weak_type")), bool(entry["stop_gradient"])
            if entry["class"] == "Parameter":
                parameter: Any = Parameter.__new__(Parameter)
                Tensor.__init__(parameter, Symbol(name, sizes, dtypes.as_dtype(entry["dtype"])), stop_gradient=stops)
                parameter.name = name
                block.vars[name] = parameter
            else:
                parameter = block.create_var(name, sizes, entry["dtype"], False, stops, known, weak)
            if "value" in entry:
                parameter._array = Symbol(entry["value"], sizes, parameter._array.dtype, weak, known)
            parameter.__dict__.update(self._decoder.decode(entry["attributes"]))
        for entry in entries:
            levels = [block.find_var(n) for n in entry.get("lod", ())]
            if levels and None not in levels:  # a pruned Program has no offsets that nothing reads
                block.vars[entry["name"]].lod = tuple(levels)

    def _append(self, block: Any, entry: Mapping[str, Any]) -> None:
        op = self._operation(entry)
        block.append(op)
        for name in op.outputs:
            if name in block.vars:
                block.vars[name]._node = op  # it is no leaf

    def _operation(self, entry: Mapping[str, Any]) -> Operation:
        cls = _operations().get(entry["op"])
        if cls is None:
            raise CheckpointError(
                f"the Program has an operation {entry['op']!r}, which is not known here"
                f"{did_you_mean(str(entry['op']), _operations())}; upgrade polyreme"
            )
        fields = {}
        for name, node in entry.items():
            if name != "op":
                nested = isinstance(node, dict) and "op" in node and cls is StartOptimizer
                fields[name] = self._operation(node) if nested else self._decoder.decode(node)
        op = cls(**fields)
        if isinstance(op, Optimize):
            op.pairs = [(str(p), str(g)) for p, g in op.pairs]
        if isinstance(op, Call):
            function_of(op.name)  # raises for one that is not declared
        return op


def _operations() -> dict[str, type[Operation]]:
    classes: dict[str, type[Operation]] = {}
    left = Operation.__subclasses__()
    while left:
        cls = left.pop()
        classes[cls.__name__] = cls
        left += cls.__subclasses__()
    return classes
