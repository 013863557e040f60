"""Nested lists, tuples and dicts of values: paddle.utils.map_structure and its family.

Dicts are walked in the order of their sorted keys; anything else is one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyreme.eager.tensor import Tensor
from polyreme.errors import ShapeError


def is_sequence(seq: Any) -> bool:
    """Whether a value is a structure: a list, tuple or dict."""
    return isinstance(seq, (list, tuple, Mapping))


def flatten(nest: Any) -> list[Any]:
    """The values of a structure in one list.

    >>> flatten({"b": [1, 2], "a": (3,)})
    [3, 1, 2]
    """
    return list(_values(nest))


def _values(nest: Any) -> Iterator[Any]:
    if not is_sequence(nest):
        yield nest
        return
    for part in [nest[k] for k in sorted(nest)] if isinstance(nest, Mapping) else nest:
        yield from _values(part)


def map_structure(func: Callable[..., Any], *structure: Any) -> Any:
    """func of the values at each place of one structure or several of one form, in that form.

    Raises ShapeError for structures of different forms.

    >>> map_structure(lambda a, b: a + b, [1, {"x": 2}], [10, {"x": 20}])
    [11, {'x': 22}]
    """
    for other in structure[1:]:
        assert_same_structure(structure[0], other)
    return pack_sequence_as(structure[0], [func(*values) for values in zip(*map(flatten, structure), strict=True)])


def pack_sequence_as(structure: Any, flat_sequence: Any) -> Any:
    """A structure of the same form with the values of a list. Raises ShapeError for another number of them."""
    values, count = list(flat_sequence), len(flatten(structure))
    if len(values) != count:
        raise ShapeError(f"pack_sequence_as: the structure holds {count} values, got {len(values)}")
    return _packed(structure, iter(values))


def _packed(structure: Any, values: Iterator[Any]) -> Any:
    if not is_sequence(structure):
        return next(values)
    if isinstance(structure, Mapping):
        packed = {key: _packed(structure[key], values) for key in sorted(structure)}
        return type(structure)((key, packed[key]) for key in structure)  # type: ignore[call-arg]
    parts = [_packed(part, values) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)


def assert_same_structure(nest1: Any, nest2: Any, check_types: bool = True) -> None:
    """Raise ShapeError unless both are of one form; check_types: and of the same classes."""
    same_kind = type(nest1) is type(nest2) if check_types or not is_sequence(nest1) else is_sequence(nest2)
    if not is_sequence(nest1) and not is_sequence(nest2):
        return
    if not same_kind or len(nest1) != len(nest2) or (isinstance(nest1, Mapping) and nest1.keys() != nest2.keys()):
        raise ShapeError(f"structures of different forms: {nest1!r} and {nest2!r}")
    for a, b in zip(_parts(nest1), _parts(nest2), strict=True):
        assert_same_structure(a, b, check_types)


def _parts(nest: Any) -> list[Any]:
    return [nest[k] for k in sorted(nest)] if isinstance(nest, Mapping) else list(nest)


def to_sequence(nest: Any) -> Any:
    """The structure itself, or a list of one value."""
    return nest if is_sequence(nest) else [nest]


def convert_to_list(value: Any, n: int, name: str, dtype: type = int) -> list[Any]:
    """n numbers: one number n times, or a list of n. Raises ValueError for anything else."""
    values = [value] * n if isinstance(value, dtype) else list(value)
    if len(values) != n:
        raise ValueError(f"{name} is a {dtype.__name__} or {n} of them, got {value!r}")
    return [dtype(v) for v in values]


def convert_shape_to_list(shape: Any) -> list[int]:
    """Sizes as integers, from a list, tuple or Tensor, whose elements may be Tensors."""
    values = shape.tolist() if isinstance(shape, Tensor) else shape
    return [int(size) for size in values]


def strtobool(val: str) -> bool:
    """Whether a text says yes: y, yes, t, true, on or 1; n, no, f, false, off and 0 say no. ValueError for others."""
    words = {**dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True)}
    words.update(dict.fromkeys(("n", "no", "f", "false", "off", "0"), False))
    if val.lower() not in words:
        raise ValueError(f"{val!r} is no truth value; write true or false")
    return words[val.lower()]


__all__ = [
    "assert_same_structure", "convert_shape_to_list", "convert_to_list", "flatten", "is_sequence", "map_structure",
    "pack_sequence_as", "strtobool", "to_sequence",
]  # fmt: skip
