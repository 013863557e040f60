"""Places outside captured code that hold Tensors made inside it: attributes, globals, entries of lists and dicts.

Such a place is a result of the program, which puts the Tensor there at each call. The program was captured for what the
place held before, and each run of the code begins with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.jit.structure import contents, put_contents, tensors_in, with_parts

ABSENT = object()


@dataclass(frozen=True, eq=False)
class KeptPlace:
    """An attribute or global, `name` in `owner`, or, where name is None, what a list or dict holds. before: what was
    there when the program was captured, ABSENT for nothing. is_state: the code reads the Tensor that is there, which is
    nowhere else, so that any of its form will do."""

    what: str
    owner: Any
    name: str | None
    before: Any
    is_state: bool = False

    def is_same(self, other: KeptPlace) -> bool:
        """Whether both are one place."""
        return self.owner is other.owner and self.name == other.name

    def is_longer_now(self) -> bool:
        """Whether it is a list that has more parts than when the program was captured."""
        return isinstance(self.owner, list) and len(self.owner) > len(self.before)

    def get(self) -> Any:
        """The value at the place now."""
        return contents(self.owner) if self.name is None else self.owner.get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        """Have it there."""
        if self.name is None:
            put_contents(self.owner, value)
        elif value is ABSENT:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


class ResultWithPlaces(NamedTuple):
    """The result of a function, and the values it left in each place."""

    result: Any
    left: tuple[Any, ...]

    @classmethod
    def of(cls, result: Any, places: Sequence[KeptPlace]) -> ResultWithPlaces:
        """The values in the places now."""
        owners = {id(place.owner) for place in places}

        def marked(part: Any) -> Any:
            return _Boxed(part) if part is ABSENT or id(part) in owners else part

        return cls(result, tuple(with_parts(place.get(), marked) for place in places))

    def put(self, places: Sequence[KeptPlace]) -> Any:
        """Put what was left where it belongs; returns the function's result."""
        for place, value in zip(places, self.left, strict=True):
            place.put(with_parts(value, _unboxed))
        state.attributes.version += 1
        return self.result


class _Boxed:
    """Keeps an object as it is, where lists and dicts are taken apart."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _unboxed(part: Any) -> Any:
    return part.value if part.__class__ is _Boxed else part


def holding_made(places: Sequence[KeptPlace], is_made: Callable[[TensorState], bool]) -> list[KeptPlace]:
    """All the places if one of them holds a Tensor made inside the capture, else none."""
    return list(places) if any(is_made(t) for place in places for t in tensors_in(place.get())) else []


@contextmanager
def as_before(places: Sequence[KeptPlace]) -> Iterator[None]:
    """Inside the block the places hold what they held when the program was captured, then again what they hold now."""
    now = [place.get() for place in places]
    for place in places:
        if not place.is_state:
            place.put(place.before)
    try:
        yield
    finally:
        for place, value in zip(places, now, strict=True):
            place.put(value)
