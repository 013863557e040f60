"""Nested batches: dicts, lists, tuples and namedtuples with leaves in them."""

from collections.abc import Callable, Mapping
from typing import Any


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nesting with function applied to every leaf.

    >>> map_leaves(lambda x: x + 1, {"a": [1, 2], "b": (3,)})
    {'a': [2, 3], 'b': (4,)}
    """
    if isinstance(value, Mapping):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return rebuild(value, [map_leaves(function, item) for item in value])
    return function(value)


def rebuild(like: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """items as a list, tuple or namedtuple, as like is."""
    if isinstance(like, list):
        return items
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
