"""Nested arguments and results as JSON: lists, tuples, dicts and namedtuples around tensors and plain values."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from polyreme.errors import CaptureError
from polyreme.jit.structure import LEAF, Spec

_BY_NAME = {"list": list, "tuple": tuple, "dict": dict, "OrderedDict": collections.OrderedDict}
PLAIN = (bool, int, float, str)
"""What may stand between tensors, besides None."""


def to_json(spec: Spec, where: str) -> Any:
    """A structure that jit.structure.flatten found. Raises CaptureError for a class of the user's, and for keys that
    are no strings: neither could be made again without the model's code.
    """
    if spec is LEAF:
        return None
    cls, keys, children = spec
    inner = [to_json(child, where) for child in children]
    if cls.__name__ in _BY_NAME and _BY_NAME[cls.__name__] is cls:
        if any(not isinstance(key, str) for key in keys or ()):
            raise CaptureError(f"{where}: a dict has the keys {list(keys)}; only strings can be saved, rename them")
        return {"kind": cls.__name__, "keys": list(keys or ()), "children": inner}
    if issubclass(cls, tuple):
        return {"kind": "namedtuple", "name": cls.__name__, "keys": list(keys), "children": inner}
    raise CaptureError(f"{where}: {cls.__name__} is a class that the loading side does not have; use a dict or tuple")


def from_json(body: Any) -> Spec:
    """The structure again; a namedtuple's class is made anew, with the same name and fields."""
    if body is None:
        return LEAF
    children = tuple(from_json(child) for child in body["children"])
    if body["kind"] == "namedtuple":
        return collections.namedtuple(body["name"], body["keys"]), tuple(body["keys"]), children
    kind = _BY_NAME[body["kind"]]
    return kind, tuple(body["keys"]) if kind in (dict, collections.OrderedDict) else None, children


def plain(value: Any, where: str) -> Any:
    """A value between tensors, checked; raises CaptureError if JSON cannot hold it."""
    if value is None or type(value) in PLAIN:
        return value
    raise CaptureError(
        f"{where}: {value!r} ({type(value).__name__}) is neither a Tensor nor a number, string or None, so it cannot "
        "be saved; leave it out"
    )


def leaf_names(spec: Spec, top: Sequence[str], default: str) -> list[str]:
    """A name for each leaf: the path to it, of dict keys and positions joined by dots; top: names of the first level.

    >>> leaf_names((tuple, None, (LEAF, (dict, ("a",), (LEAF,)))), ["x", "y"], "out")
    ['x', 'y.a']
    """
    if spec is LEAF:
        return [default]
    _, keys, children = spec
    steps = list(top) or [str(key) for key in keys or range(len(children))]
    found = []
    for step, child in zip(steps, children, strict=True):
        found += [step] if child is LEAF else [f"{step}.{rest}" for rest in leaf_names(child, (), "")]
    return found
