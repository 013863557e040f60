"""Nested arguments and results taken apart into leaves and put together again, dict order and types kept.

Containers: list, tuple, namedtuple, dict, OrderedDict (a Layer's PartTable too), and dataclasses that hold a Tensor.
The sizes that Tensor.shape gives count as a list. All else is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyreme.core.part_table import PartTable
from polyreme.core.state import TensorState
from polyreme.eager.memory import Size

LEAF = None
Spec = Any
"""LEAF, or (class, keys or None, specs of the children); hashable."""
DICTS = frozenset({dict, OrderedDict, PartTable})
"""Classes of dicts that are taken apart and put together."""


def flatten(value: Any, leaves: list[Any]) -> Spec:
    """Append value's leaves to leaves; returns what rebuild needs besides them."""
    cls: Any = value.__class__
    if cls is tuple or cls is list:
        return (cls, None, tuple(flatten(v, leaves) for v in value))
    if cls is Size:
        return (list, None, tuple(flatten(v, leaves) for v in value))
    if cls in DICTS:
        return (cls, tuple(value), tuple(flatten(v, leaves) for v in value.values()))
    names = getattr(cls, "_fields", None)
    if names is not None and issubclass(cls, tuple):
        return (cls, names, tuple(flatten(v, leaves) for v in value))
    if dataclasses.is_dataclass(cls):
        names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        inner: list[Any] = []
        specs = tuple(flatten(getattr(value, n), inner) for n in names)
        if any(isinstance(leaf, TensorState) for leaf in inner):
            leaves.extend(inner)
            return (cls, names, specs)
    leaves.append(value)
    return LEAF


def rebuild(spec: Spec, leaves: Iterator[Any]) -> Any:
    """The value that flatten took apart, around other leaves."""
    if spec is LEAF:
        return next(leaves)
    cls, keys, specs = spec
    children = [rebuild(s, leaves) for s in specs]
    if cls is tuple or cls is list:
        return cls(children)
    if cls in DICTS:
        return cls(zip(keys, children, strict=True))
    if issubclass(cls, tuple):
        return cls(*children)
    made = object.__new__(cls)
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def containers(spec: Spec, value: Any) -> Iterator[Any]:
    """The lists, dicts and dataclasses that a value with this spec is put together from, outer ones first."""
    if spec is LEAF:
        return
    cls, keys, specs = spec
    if not issubclass(cls, tuple):
        yield value
    names: Sequence[Any] = range(len(specs)) if keys is None else keys
    for key, inner in zip(names, specs, strict=True):
        if inner is not LEAF:
            yield from containers(inner, getattr(value, key) if _has_fields(cls) else value[key])


def contents(container: Any) -> Any:
    """The entries of a container, in a new list or dict."""
    return list(container) if isinstance(container, list) else dict(_entries(container))


def put_contents(container: Any, held: Any) -> None:
    """Have a container hold what contents() gave of another."""
    if isinstance(container, list):
        container[:] = held
    elif isinstance(container, dict):
        container.clear()
        container.update(held)
    else:
        for name, value in held.items():
            object.__setattr__(container, name, value)


def with_parts(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """A value whose parts, down to lists, tuples and dicts in it, are those that replacement gives for them."""
    new = replacement(value)
    if new is not value:
        return new
    if value.__class__ in (list, tuple):
        return value.__class__(with_parts(part, replacement) for part in value)
    if value.__class__ in DICTS:
        return value.__class__((key, with_parts(part, replacement)) for key, part in value.items())
    return value


def _entries(container: Any) -> Any:
    return container if isinstance(container, dict) else vars(container)


def _has_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def tensors_in(value: Any) -> list[TensorState]:
    """The Tensors among value's leaves."""
    leaves: list[Any] = []
    flatten(value, leaves)
    return [leaf for leaf in leaves if isinstance(leaf, TensorState)]
