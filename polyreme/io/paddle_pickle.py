"""Pickles that PaddlePaddle's save writes (.pdparams, .pdopt), read as data: nothing that they name is called.

Source: files written by PaddlePaddle 3.3.1 and what its load makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError, DataError
from polyreme.io.pickled_data import PickledName, PickleMachine, parse_pickle

BIG = "UnpackBigParamInfor@@"
"""Under protocols 2 and 3: parameter -> its shape and the names of the pieces that it was cut into."""
_ROOM = 1 << 20  # bytes beside twice the file's: an array's bytes are decoded, and then copied
_MAX_DEPTH = 64


class PickledTensor:
    """A Tensor as the pickle has it: an array, and the Tensor's name, "" if it has none there."""

    name: str
    array: np.ndarray

    def __init__(self, name: str, array: np.ndarray) -> None:
        # PaddlePaddle has no Tensors of uint16: this is how it keeps bfloat16
        self.name, self.array = name, array.view(dtypes.bfloat16) if array.dtype == np.uint16 else array


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins so is a pickle of a protocol that PaddlePaddle writes."""
    # what a safetensors file begins with may look so too, until its ninth byte
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04") and head[8:9] != b"{"


def read(data: bytes, where: str) -> tuple[Any, int]:
    """What a pickle holds, and its length in bytes: containers, numbers, strings, ndarrays, and a PickledTensor for
    every Tensor. A file of no marked Tensor is a state dict, or of an old release: every array of it is a Tensor.

    Raises CheckpointError for what is damaged or asks for anything else: a class, a function, an array of objects.
    """
    try:
        value, length = parse_pickle(data, where, _NAMES, 2 * len(data) + _ROOM)
    except DataError as error:
        is_damage = isinstance(
            error.__cause__, Exception
        )  # of the machine; what is refused has no other error before it
        advice = (
            "the file is cut or damaged"
            if is_damage
            else "a pickle can run code, so nothing else is looked up or called: convert it where you trust it"
        )
        raise CheckpointError(f"{error}; {advice}") from None
    if isinstance(value, dict) and BIG in value:
        value = _join_pieces(value, where)
    if not _any_tensor(value, where):
        value = _map_leaves(value, lambda x: PickledTensor("", x) if isinstance(x, np.ndarray) else x, {})
    return value, length


def with_tensors(value: Any, tensor: Callable[[PickledTensor], Any]) -> Any:
    """The value with this in the place of every PickledTensor; one that is met again stays one."""
    return _map_leaves(value, lambda x: tensor(x) if isinstance(x, PickledTensor) else x, {})


def _join_pieces(value: dict[Any, Any], where: str) -> dict[Any, Any]:
    """The dict with parameters put together of their pieces."""
    table = value[BIG]
    rest = {key: item for key, item in value.items() if key != BIG}
    try:
        for name, record in table.items():
            pieces = [rest.pop(piece) for piece in record["slices"]]
            shape = tuple(record["OriginShape"])
            if not all(isinstance(n, int) and n >= 0 for n in shape) or not all(p.ndim == 1 for p in pieces):
                raise ValueError(f"{name} has no shape, or pieces that are not flat")
            if math.prod(shape) != sum(p.size for p in pieces):
                raise ValueError(f"the pieces of {name} have {sum(p.size for p in pieces)} numbers, not {list(shape)}")
            rest[name] = np.concatenate(pieces).reshape(shape)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {BIG} is malformed ({error!s:.200}): the file was cut or altered") from error
    return rest


def _any_tensor(value: Any, where: str) -> bool:
    """Whether a PickledTensor lies in the value, which may not be nested deeply."""
    level, depth, seen, has_tensor = [value], 0, set(), False
    while level:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH}; it is no checkpoint")
        deeper = []
        for item in level:
            has_tensor = has_tensor or isinstance(item, PickledTensor)
            if isinstance(item, (dict, list, tuple)) and (depth, id(item)) not in seen:
                seen.add((depth, id(item)))
                deeper += item.values() if isinstance(item, dict) else item
        level, depth = deeper, depth + 1
    return has_tensor


def _map_leaves(item: Any, change: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]) -> Any:
    """The item with every leaf changed; one met again stays one. memo: those met so far, and what they became."""
    if id(item) not in memo:
        if isinstance(item, dict):
            result: Any = {key: _map_leaves(inner, change, memo) for key, inner in item.items()}
        elif isinstance(item, (list, tuple)):
            result = type(item)([_map_leaves(inner, change, memo) for inner in item])
        else:
            result = change(item)
        memo[id(item)] = item, result
    return memo[id(item)][1]


def _make_tensor(machine: PickleMachine, pair: Any) -> Any:
    """A Tensor is a call of tuple with its name and array; any other call of tuple is of its items."""
    if not isinstance(pair, (tuple, list)):
        raise DataError("a pickle makes a tuple of what is no tuple or list")
    if len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], np.ndarray):
        return PickledTensor(*pair)
    return tuple(pair)


def _make_dense(machine: PickleMachine, text: Any, scope: Any = None, *rest: Any) -> PickledTensor:
    """A DenseTensor outside of a Tensor is a call of eval with the text "data", whose value is beside it: no text is
    evaluated here."""
    array = scope.get("data") if text == "data" and isinstance(scope, dict) and len(scope) == 1 else None
    if not isinstance(array, np.ndarray) or rest:
        raise DataError(f"a pickle evaluates {text!r:.80}")
    return PickledTensor("", array)


def _make_dict(machine: PickleMachine, items: Any = ()) -> dict[Any, Any]:
    pairs = list(items.items() if isinstance(items, dict) else items)
    result: dict[Any, Any] = {}
    machine.stack.append(result)
    machine.fill([entry for pair in pairs for entry in pair])
    return machine.stack.pop()


_TUPLE, _EVAL = PickledName("builtins.tuple", _make_tensor), PickledName("builtins.eval", _make_dense)
_NAMES = {
    ("builtins", "tuple"): _TUPLE,
    ("__builtin__", "tuple"): _TUPLE,
    ("builtins", "eval"): _EVAL,
    ("__builtin__", "eval"): _EVAL,
    ("collections", "OrderedDict"): PickledName("collections.OrderedDict", _make_dict),
}
