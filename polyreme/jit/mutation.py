"""Changes that a branch or loop on a Tensor makes to Python objects: items of lists, dicts and sets, and attributes.

Both sides of a branch are traced, and a loop's body several times, so a change may not simply happen. Each
one is noted, undone when the trace ends, and what it left is merged or carried like a variable.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from malt.operators import Undefined

from polyreme.call_site import user_frame
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager.memory import Size
from polyreme.errors import CaptureError
from polyreme.jit.capture import Capture

_CONTAINERS = (list, dict, set, deque)
_MUTATORS = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort", "update", "setdefault", "popitem", "add",
    "discard", "appendleft", "popleft", "extendleft", "rotate", "__setitem__", "__delitem__", "__iadd__", "__ior__",
    "difference_update", "intersection_update", "symmetric_difference_update",
})  # fmt: skip
# Traces after which an object that is new in each of them is taken to be made inside.
_MAX_TRACES = 3


class MutablePlace:
    """One thing that can be changed. shape: what must be the same on both sides; values: what may differ."""

    owner: Any

    def shape(self) -> Any:
        raise NotImplementedError

    def values(self) -> list[Any]:
        raise NotImplementedError

    def write(self, shape: Any, values: Sequence[Any]) -> None:
        raise NotImplementedError

    def names(self) -> list[str]:
        raise NotImplementedError


class Items(MutablePlace):
    """The content of a list, dict, set or deque."""

    owner: Any
    name: str

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def shape(self) -> Any:
        if isinstance(self.owner, dict):
            return tuple(self.owner)
        return frozenset(self.owner) if isinstance(self.owner, set) else len(self.owner)

    def values(self) -> list[Any]:
        if isinstance(self.owner, dict):
            return list(self.owner.values())
        return [] if isinstance(self.owner, set) else list(self.owner)

    def write(self, shape: Any, values: Sequence[Any]) -> None:
        if isinstance(self.owner, list):
            self.owner[:] = values
            return
        self.owner.clear()
        if isinstance(self.owner, dict):
            self.owner.update(zip(shape, values, strict=True))
        elif isinstance(self.owner, set):
            self.owner |= shape
        else:
            self.owner.extend(values)

    def names(self) -> list[str]:
        if isinstance(self.owner, set):
            return []
        keys = list(self.owner) if isinstance(self.owner, dict) else range(len(self.owner))
        return [f"{self.name}[{key!r}]" for key in keys]

    def told(self, shape: Any) -> str:
        """A shape in words."""
        if isinstance(self.owner, dict):
            return f"keys {list(shape)}"
        count = len(shape) if isinstance(shape, frozenset) else shape
        return f"{count} element{'' if count == 1 else 's'}"


class Attribute(MutablePlace):
    """One attribute of an object."""

    owner: Any
    attribute: str
    name: str

    def __init__(self, owner: Any, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.name = f"{type(owner).__name__}.{attribute}"

    def shape(self) -> Any:
        return 1

    def values(self) -> list[Any]:
        try:
            return [getattr(self.owner, self.attribute)]
        except AttributeError:
            return [Undefined(self.name)]

    def write(self, shape: Any, values: Sequence[Any]) -> None:
        (value,) = values
        if not isinstance(value, Undefined):
            setattr(self.owner, self.attribute, value)
        elif not isinstance(self.values()[0], Undefined):
            delattr(self.owner, self.attribute)

    def names(self) -> list[str]:
        return [self.name]

    def told(self, shape: Any) -> str:
        """Never asked: all attributes have one shape."""
        return "1 value"


class RegionCapture(Capture):
    """The capture of one branch or loop body: notes and undoes what it changes in Python objects."""

    def __init__(self, outer: Capture | None) -> None:
        super().__init__(outer, detach=True)
        self.places: dict[Hashable, tuple[MutablePlace, Any, list[Any]]] = {}
        self.local_objects: dict[int, Any] = {}
        self.depth: int = 1 + (outer.depth if isinstance(outer, RegionCapture) else 0)

    def note(self, key: Hashable, place: Callable[[], MutablePlace]) -> None:
        """Something is about to be changed."""
        if key not in self.places:
            made = place()
            if id(made.owner) not in self.local_objects:
                self.places[key] = (made, made.shape(), made.values())

    def restore(self) -> None:
        super().restore()
        for place, shape, values in self.places.values():
            place.write(shape, values)


def _region() -> RegionCapture | None:
    active = state.watch.active
    return active if isinstance(active, RegionCapture) else None


def note_items(owner: Any) -> None:
    """The content of owner is about to be changed, if it is a container."""
    region = _region()
    if (recorder := state.recorder()) is not None and isinstance(owner, _CONTAINERS):
        recorder.changes(_name_of(owner))
    if region is not None and isinstance(owner, _CONTAINERS):
        region.note(id(owner), lambda: Items(owner, _name_of(owner)))


def note_attribute(owner: Any, attribute: str) -> None:
    """An attribute is about to be set or deleted."""
    region = _region()
    if (recorder := state.recorder()) is not None and not isinstance(owner, TensorState):
        recorder.changes(f"{type(owner).__name__}.{attribute}")
    if region is not None and not isinstance(owner, TensorState):
        region.note((id(owner), attribute), lambda: Attribute(owner, attribute))


def note_call(fn: Any) -> None:
    """fn is about to be called: list.append and its like change what they are bound to."""
    if (_region() is not None or state.recording()) and getattr(fn, "__name__", None) in _MUTATORS:
        note_items(getattr(fn, "__self__", None))


def own(value: Any) -> Any:
    """made, an object that did not exist before: whatever is done to it in this branch or loop body is local to it."""
    region = _region()
    if region is not None:
        region.local_objects[id(value)] = value
    return value


def own_all(value: Any) -> Any:
    """own(made), and the containers in it, which are as new."""
    if _region() is not None and type(value) in (list, Size, dict, tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            own_all(inner)
    return own(value)


def own_result(fn: Any, result: Any) -> Any:
    """result of calling fn, which is new if fn is a class that makes one at each call, or sorted."""
    makes = isinstance(fn, type) and (fn.__new__ is object.__new__ or issubclass(fn, _CONTAINERS))
    return own(result) if makes or fn is sorted else result


def _name_of(owner: Any) -> str:
    """The variable that holds owner, for messages."""
    frame = user_frame()
    for name, value in (frame.f_locals if frame is not None else {}).items():
        if value is owner:
            return name
    return f"a {type(owner).__name__}"


# operators of converted code


def set_item(value: Any, owner: Any, key: Any) -> None:
    """owner[key] = value."""
    note_items(owner)
    owner[key] = value


def update_item(owner: Any, key: Any, name: str, value: Any) -> None:
    """owner[key] += value, and its like."""
    note_items(owner)
    owner[key] = update(owner[key], name, value)


def del_item(owner: Any, key: Any) -> None:
    """del owner[key]."""
    note_items(owner)
    del owner[key]


def set_attr(value: Any, owner: Any, name: str) -> None:
    """owner.name = value."""
    note_attribute(owner, name)
    setattr(owner, name, value)


def update_attr(owner: Any, attribute: str, name: str, value: Any) -> None:
    """owner.attribute += value, and its like."""
    note_attribute(owner, attribute)
    setattr(owner, attribute, update(getattr(owner, attribute), name, value))


def del_attr(owner: Any, name: str) -> None:
    """del owner.name."""
    note_attribute(owner, name)
    delattr(owner, name)


def update(owner: Any, name: str, value: Any) -> Any:
    """The new value of owner after an in-place operator."""
    note_items(owner)
    return getattr(operator, name)(owner, value)


# branches and loops


class Known:
    """The places a branch or loop was found to change, as variables in front of its own."""

    def __init__(self) -> None:
        self.places: dict[Hashable, MutablePlace] = {}
        self.traces = 0

    def learn(self) -> None:
        """Raise FoundPlaces if the region being traced has changed places that are not known yet."""
        region = _region()
        if region is not None and self.traces < _MAX_TRACES:
            found = {key: place for key, (place, *_) in region.places.items() if key not in self.places}
            if found:
                raise FoundPlaces(found)

    def names(self) -> list[str]:
        return [name for place in self.places.values() for name in place.names()]

    def values(self) -> list[Any]:
        return [value for place in self.places.values() for value in place.values()]

    def shapes(self) -> list[Any]:
        return [place.shape() for place in self.places.values()]

    def write(self, shapes: Sequence[Any], values: Sequence[Any]) -> None:
        """Put these values where they belong."""
        rest = iter(values)
        region = _region()
        for (key, place), shape in zip(self.places.items(), shapes, strict=True):
            if region is not None:
                region.note(key, lambda place=place: place)
            count = 1 if isinstance(place, Attribute) else 0 if isinstance(shape, frozenset) else None
            if count is None:
                count = shape if isinstance(shape, int) else len(shape)
            place.write(shape, [next(rest) for _ in range(count)])

    def check(self, before: Sequence[Any], after: Sequence[Any], line: str, what: str, sides: tuple[str, str]) -> None:
        """Raise CaptureError if a container does not have as many items, or the same keys, in both."""
        for place, a, b in zip(self.places.values(), before, after, strict=True):
            if a != b:
                assert isinstance(place, Items)
                raise CaptureError(
                    f"{line}: {what} depends on a Tensor, and {place.name!r}, a {type(place.owner).__name__}, has "
                    f"{place.told(a)} {sides[0]} but {place.told(b)} {sides[1]}; how many there are must not depend on "
                    "a Tensor: use a Python number of steps, or write into a Tensor or list made long enough before"
                )


class FoundPlaces(Exception):
    """A trace changed places that were not known; trace again with them."""

    def __init__(self, places: dict[Hashable, MutablePlace]) -> None:
        super().__init__("new places")
        self.places = places


def accounting(build: Callable[[Known], Any]) -> Any:
    """build(known), again each time a trace finds that more is changed."""
    known = Known()
    while True:
        try:
            return build(known)
        except FoundPlaces as found:
            known.places.update(found.places)
            known.traces += 1
