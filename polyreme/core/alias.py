"""A second name of an attribute, as data of a class."""

from __future__ import annotations

from typing import Generic, Self, TypeVar, cast, overload

T = TypeVar("T")


class Alias(Generic[T]):
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
        self.target: str = target

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object, owner: type | None = None) -> Self | T:
        return self if instance is None else cast(T, getattr(instance, self.target))

    def __set__(self, instance: object, value: T) -> None:
        setattr(instance, self.target, value)
