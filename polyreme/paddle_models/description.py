"""What a .pdmodel says: blocks of variables and operations, read from protocol buffers by field number.

Source: files written by PaddlePaddle 1.8 to 3.3.1; the numbers of fields as its documentation of the format gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyreme.errors import CheckpointError
from polyreme.io.paddle_tensors import DESCRIPTION, DTYPES
from polyreme.io.protobuf_wire import Message, WireField, parse

_DENSE, _ARRAY = 7, 13  # kinds of variables: a Tensor, a list of Tensors
_HOLDERS = {9, 10, 17}  # what feed and fetch keep their values in, and what is no variable of values
_DENSE_TYPE: Message = {1: WireField("tensor", DESCRIPTION)}
_TYPE: Message = {
    1: WireField("kind", "int"),
    3: WireField("dense", _DENSE_TYPE),
    4: WireField("array", _DENSE_TYPE),
}
_VARIABLE: Message = {
    1: WireField("name", "string"), 2: WireField("type", _TYPE), 3: WireField("persistable", "bool"),
    5: WireField("is_parameter", "bool"),
}  # fmt: skip
_SLOT: Message = {1: WireField("parameter", "string"), 2: WireField("arguments", "string", True)}
_SCALAR: Message = {
    1: WireField("type", "int"), 2: WireField("boolean", "bool"), 3: WireField("i", "int"), 4: WireField("r", "double"),
    5: WireField("complex", {1: WireField("r", "double"), 2: WireField("i", "double")}),
}  # fmt: skip
_ATTRIBUTE: Message = {
    1: WireField("name", "string"), 2: WireField("type", "int"), 3: WireField("i", "int"), 4: WireField("f", "float"),
    5: WireField("s", "string"), 6: WireField("ints", "int", True), 7: WireField("floats", "float", True),
    8: WireField("strings", "string", True), 10: WireField("b", "bool"), 11: WireField("bools", "bool", True),
    12: WireField("block_idx", "int"), 13: WireField("l", "int"), 14: WireField("blocks_idx", "int", True),
    15: WireField("longs", "int", True), 16: WireField("float64s", "double", True),
    17: WireField("var_name", "string"), 18: WireField("vars_name", "string", True),
    19: WireField("float64", "double"), 20: WireField("scalar", _SCALAR), 21: WireField("scalars", _SCALAR, True),
}  # fmt: skip
# an attribute's type -> the field that holds it
_HELD = (
    "i", "f", "s", "ints", "floats", "strings", "b", "bools", "block_idx", "l", "blocks_idx", "longs", "float64s",
    "var_name", "vars_name", "float64", "scalar", "scalars",
)  # fmt: skip
_OPERATION: Message = {
    1: WireField("inputs", _SLOT, True), 2: WireField("outputs", _SLOT, True), 3: WireField("type", "string"),
    4: WireField("attributes", _ATTRIBUTE, True),
}  # fmt: skip
_BLOCK: Message = {
    1: WireField("index", "int"), 2: WireField("parent", "int"), 3: WireField("variables", _VARIABLE, True),
    4: WireField("operations", _OPERATION, True),
}  # fmt: skip
_PROGRAM: Message = {
    1: WireField("blocks", _BLOCK, True),
    4: WireField("version", {1: WireField("version", "int")}),
}


@dataclass(frozen=True)
class PaddleVariable:
    """A variable. shape: -1 where a size is open; dtype: None for what holds no numbers."""

    name: str
    dtype: np.dtype | None
    shape: tuple[int, ...]
    persistable: bool
    is_parameter: bool


@dataclass(frozen=True)
class PaddleOperation:
    """An operation: names of variables by slot, attributes by name, and the blocks that it may run."""

    type: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, Any]
    blocks: tuple[PaddleBlock, ...] = ()

    def __str__(self) -> str:
        outputs = [name for names in self.outputs.values() for name in names]
        return f"{self.type} (which gives {', '.join(outputs[:3]) or 'nothing'})"


@dataclass(frozen=True)
class PaddleBlock:
    """Operations in order, and the variables that they name; names of arguments and results, where it has some."""

    variables: Mapping[str, PaddleVariable]
    operations: tuple[PaddleOperation, ...]
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def read_description(data: bytes, where: str) -> PaddleBlock:
    """The outermost block of a program, in whose operations the other blocks are.

    Raises CheckpointError for bytes that are no program: cut, of another format, without blocks.
    """
    try:
        blocks = [_block(block) for block in parse(data, _PROGRAM)["blocks"]]
        for index in reversed(range(len(blocks))):  # a block comes after the one it lies in
            blocks[index] = _with_blocks(blocks[index], blocks, index)
    except CheckpointError as error:
        raise CheckpointError(
            f"{where}: not a program of protocol buffers ({error}); the file is cut, or another"
        ) from None
    if not blocks or not blocks[0].operations:
        raise CheckpointError(f"{where}: no program of protocol buffers: there are no operations in it")
    return blocks[0]


def _with_blocks(block: PaddleBlock, blocks: list[PaddleBlock], index: int) -> PaddleBlock:
    operations = []
    for op in block.operations:
        inner = op.attributes.get("sub_block")
        if inner is None:
            operations.append(op)
            continue
        if not isinstance(inner, int) or not index < inner < len(blocks):
            raise CheckpointError(f"{op.type} in block {index} has block {inner!s:.20}, which is none of its own")
        rest = {name: value for name, value in op.attributes.items() if name != "sub_block"}
        operations.append(replace(op, attributes=rest, blocks=(blocks[inner],)))
    return replace(block, operations=tuple(operations))


def _block(block: dict[str, Any]) -> PaddleBlock:
    variables = [_variable(v) for v in block["variables"]]
    return PaddleBlock({v.name: v for v in variables}, tuple(_operation(op) for op in block["operations"]))


def _variable(said: dict[str, Any]) -> PaddleVariable:
    kind = said.get("type", {}).get("kind", -1)
    described = said.get("type", {}).get("dense" if kind == _DENSE else "array", {}).get("tensor", {})
    dtype = DTYPES.get(described.get("data_type", -1)) if kind in (_DENSE, _ARRAY) else None
    return PaddleVariable(
        said.get("name", ""),
        dtype,
        tuple(described.get("dims", ())),
        said.get("persistable", False) and kind not in _HOLDERS,
        said.get("is_parameter", False),
    )


def _operation(said: dict[str, Any]) -> PaddleOperation:
    return PaddleOperation(
        said.get("type", ""),
        {slot.get("parameter", ""): tuple(slot["arguments"]) for slot in said["inputs"]},
        {slot.get("parameter", ""): tuple(slot["arguments"]) for slot in said["outputs"]},
        {a.get("name", ""): _value(a) for a in said["attributes"]},
    )


def _value(attribute: dict[str, Any]) -> Any:
    kind = attribute.get("type", -1)
    if not 0 <= kind < len(_HELD):
        raise CheckpointError(f"attribute {attribute.get('name')!r} has type {kind}, which is none")
    value = attribute.get(_HELD[kind])
    if isinstance(value, dict):
        return _scalar(value)
    return [_scalar(v) if isinstance(v, dict) else v for v in value] if isinstance(value, list) else value


def _scalar(said: dict[str, Any]) -> Any:
    # its own type: 1 boolean, 2 integer, 3 real, 4 complex
    kind = said.get("type", 0)
    if kind == 4:
        return complex(said.get("complex", {}).get("r", 0.0), said.get("complex", {}).get("i", 0.0))
    if not 1 <= kind <= 3:
        raise CheckpointError(f"an attribute has a number of type {kind}, which is none")
    return (said.get("boolean", False), said.get("i", 0), said.get("r", 0.0))[kind - 1]
