"""Arguments and results of recorded calls, with names in place of Tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from polyreme.core.state import TensorState
from polyreme.eager.memory import Size


@dataclass(frozen=True)
class Ref:
    """A value of the Program, by name."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class SizeOf:
    """The size that a dim of a value has when the Program runs."""

    name: str
    dim: int

    def __repr__(self) -> str:
        return f"%{self.name}.shape[{self.dim}]"


def replace(value: Any, kind: type, put: Callable[[Any], Any]) -> Any:
    """value with put(leaf) for every leaf of this kind, through lists, tuples, dicts and slices."""
    if isinstance(value, kind):
        return put(value)
    cls: Any = value.__class__
    if cls is list or cls is tuple:
        return cls(replace(v, kind, put) for v in value)
    if cls is Size:
        return [replace(v, kind, put) for v in value]
    if cls is dict:
        return {k: replace(v, kind, put) for k, v in value.items()}
    if cls is slice:
        return slice(*(replace(v, kind, put) for v in (value.start, value.stop, value.step)))
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return cls(*(replace(v, kind, put) for v in value))
    return value


def leaves(value: Any, kind: type) -> Iterator[Any]:
    """The leaves of this kind, in order."""
    result: list[Any] = []
    replace(value, kind, lambda leaf: result.append(leaf))
    return iter(result)


def refs(value: Any) -> list[str]:
    """Names of the values that value refers to, in order."""
    return [ref.name for kind in (Ref, SizeOf) for ref in leaves(value, kind)]


def resolve(value: Any, get: Callable[[str], Any]) -> Any:
    """value with Tensors and sizes in place of names."""
    found = replace(value, Ref, lambda ref: get(ref.name))
    return replace(found, SizeOf, lambda size: get(size.name)._array.shape[size.dim])


def tensors(value: Any) -> list[Any]:
    """The Tensors in value, in order."""
    return list(leaves(value, TensorState))
