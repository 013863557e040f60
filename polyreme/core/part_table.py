"""The tables of a Layer: its parts by name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from polyreme.core import state


class PartTable(OrderedDict[Any, Any]):
    """An OrderedDict whose changes state.layer_parts counts, whoever makes them.

    >>> table, before = PartTable(), state.layer_parts.version
    >>> table["weight"] = 1
    >>> state.layer_parts.version - before
    1
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        state.layer_parts.version += 1

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        state.layer_parts.version += 1

    def pop(self, key: Any, *default: Any) -> Any:
        state.layer_parts.version += 1
        return super().pop(key, *default)

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        state.layer_parts.version += 1
        return super().popitem(last)

    def clear(self) -> None:
        state.layer_parts.version += 1
        super().clear()

    def move_to_end(self, key: Any, last: bool = True) -> None:
        state.layer_parts.version += 1
        super().move_to_end(key, last)
