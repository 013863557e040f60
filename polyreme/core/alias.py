"""A second name of an attribute, as data of a class."""

from __future__ import annotations

from typing import Any


class Alias:
    """Reads and writes go to the attribute `target`; a subclass may give the name another meaning.

    >>> class Window:
    ...     size = Alias("_size")
    >>> window = Window()
    >>> window.size = 3
    >>> vars(window)
    {'_size': 3}
    """

    __slots__ = ("target",)

    def __init__(self, target: str) -> None:
        self.target = target

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance, self.target)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.target, value)
