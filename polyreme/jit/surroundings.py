"""Python values that captured code reads from around it: each is a guard of the program.

A program computes with the values of globals, closure cells and attributes, and of what lists, dicts and small arrays
among them hold, as they were when it was captured. Which of them the code reads is taken from the names in it: in the
code of the user's functions that ran, and, for layers of this package, in that of their classes.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polyreme.core import state
from polyreme.core.alias import Alias
from polyreme.core.state import TensorState, Tracer
from polyreme.errors import CaptureError
from polyreme.jit.kept import ABSENT, KeptPlace
from polyreme.jit.structure import DICTS, contents, tensors_in

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NUMBERS = frozenset({int, float, complex})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
# parts of a list or dict, and bytes of an array, beyond which it is guarded as the object it is, not by what it holds
_MOST_PARTS, _MOST_BYTES = 1000, 1 << 16
# from a name to what it holds: cfg.model.rope.scale
_DEEPEST = 3
# "paddle" is what a Tensor's class says in scripts that import it
_LIBRARIES = frozenset({"polyreme", "paddle", "jax", "jaxlib", "numpy", "scipy", "malt"})


class _Names(NamedTuple):
    """Names that a code object loads: as globals, and as attributes of whatever. words: constants that might be names,
    as in hasattr(self, "cache")."""

    globals: frozenset[str]
    attributes: frozenset[str]
    words: frozenset[str]


@dataclass(frozen=True, slots=True)
class GuardedValue:
    """A value and where it is read from. what: that in words. form: its frozen form when the program was captured.
    fixed: whether it can only be replaced, not changed. used: ids of the Tensors that the code read or wrote."""

    what: str
    read: Callable[[], Any]
    seen: Any
    form: Any
    fixed: bool
    used: frozenset[int]

    @classmethod
    def of(cls, what: str, read: Callable[[], Any], used: frozenset[int]) -> GuardedValue:
        """A guard of the value that read gives now."""
        value = read()
        return cls(what, read, value, freeze(value, used), _is_fixed(value), used)

    def change(self) -> str | None:
        """The change of the value, in words; None if it is unchanged."""
        now = self.read()
        if self.fixed and now is self.seen:
            return None
        form = freeze(now, self.used)
        return None if form == self.form else _difference(self.what, self.form, form)


def _is_fixed(value: Any) -> bool:
    """True for a value that can only be replaced, not changed: what a Tensor holds is read at each call."""
    return value.__class__ in _PLAIN or isinstance(value, (*_FUNCTIONS, TensorState))


class _Identity:
    """Stands for an object that is guarded as itself."""

    __slots__ = ("_weak", "name", "of")

    def __init__(self, value: Any) -> None:
        self.name = type(value).__name__
        try:
            self.of, self._weak = weakref.ref(value), True
        except TypeError:
            self.of, self._weak = (lambda: value), False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.of() is other.of() is not None

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"one {self.name}"


def freeze(value: Any, used: frozenset[int] | None = None, budget: list[int] | None = None) -> Any:
    """A value that equals another's exactly where captured code could not tell the two apart.

    used: ids of the Tensors that the code read or wrote; others may be replaced by Tensors of their form. None: all.
    """
    cls = value.__class__
    if cls in _PLAIN:
        return cls, repr(value) if cls is float or cls is complex else value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "OV" and value.nbytes <= _MOST_BYTES:
        return cls, value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, _CONTAINERS):
        budget = [_MOST_PARTS] if budget is None else budget
        budget[0] -= len(value)
        if budget[0] >= 0:
            if isinstance(value, (set, frozenset)):
                return cls, frozenset(freeze(part, used, budget) for part in value)
            parts = value.items() if isinstance(value, dict) else value
            return cls, tuple(freeze(part, used, budget) for part in parts)
    if isinstance(value, (enum.Enum, np.dtype, type, types.MethodType)):
        return cls, value
    if isinstance(value, TensorState):
        if isinstance(value._array, Tracer):
            return cls  # made by the captured code, which left it here
        if used is not None and id(value) not in used:
            array = value._array
            how = " without gradient" if value.stop_gradient else " with history" if value._node is not None else ""
            return cls, f"a Tensor {list(array.shape)} of {array.dtype.name}{how}"
    return _Identity(value)


def _difference(what: str, old: Any, new: Any) -> str:
    """The first part of a value that is another one, in words."""
    if isinstance(old, tuple) and isinstance(new, tuple) and old[0] is new[0]:
        if _is_array(old) and old[1:3] == new[1:3]:
            return f"{what}: its values changed"
        if isinstance(old[-1], tuple) and len(old[-1]) == len(new[-1]):
            pairs = list(zip(old[-1], new[-1], strict=True))
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            if not issubclass(old[0], dict):
                return _difference(f"{what}[{at}]", *pairs[at])
            (_, (key, value)), (_, (new_key, new_value)) = pairs[at]
            return (
                _difference(f"{what}[{_describe(key)}]", value, new_value)
                if key == new_key
                else f"{what}: its keys changed"
            )
    if isinstance(old, _Identity) and (_is_tensor(new) or (isinstance(new, _Identity) and old.name == new.name)):
        return f"{what}: {_describe(old)} -> another {old.name}"
    return f"{what}: {_describe(old)} -> {_describe(new)}"


def _describe(form: Any) -> str:
    """A frozen form in words."""
    if not isinstance(form, tuple):
        return "nothing" if form is None else str(form)
    value = form[-1]
    if _is_tensor(form):
        return value
    if _is_array(form):
        return f"an array {list(form[1])} of {np.dtype(form[2]).name}"
    if isinstance(value, (tuple, frozenset)):
        return f"a {form[0].__name__} of {len(value)}"
    return str(value) if form[0] in (float, complex) else repr(value)


class _GuardTable(dict[Any, GuardedValue]):
    """Guards by their place. used: ids of the Tensors that the code read or wrote."""

    def __init__(self, used: frozenset[int]) -> None:
        super().__init__()
        self.used = used

    def add(self, key: Any, what: str, read: Callable[[], Any]) -> None:
        self[key] = GuardedValue.of(what, read, self.used)

    def leave_out(self, place: KeptPlace) -> None:
        """Drop the guards of a place, which has one of its own."""
        for key, guarded in list(self.items()):
            is_attribute = isinstance(key, tuple) and key[0] == id(place.owner) and key[-1] == place.name
            if is_attribute or (place.name is None and guarded.seen is place.owner):
                del self[key]


@dataclass
class Guards:
    """The values a program was captured with.

    always: looked at before each call. after_assignments: attributes of Layers, looked at again once an attribute of
    any Layer was assigned. changing: places that each run of the program changes, looked at before each call.
    """

    always: list[GuardedValue] = field(default_factory=list)
    after_assignments: list[GuardedValue] = field(default_factory=list)
    version: int = 0
    changing: list[GuardedValue] = field(default_factory=list)

    def change(self) -> str | None:
        """The first value that is another one now, in words; None if the program may serve."""
        for guarded in self.always:
            # asked here what its change() asks first, as this runs at each call of a program
            if not (guarded.fixed and guarded.read() is guarded.seen) and (now := guarded.change()) is not None:
                return now
        for guarded in self.changing:
            if (now := guarded.change()) is not None:
                return now
        if self.version == state.attributes.version:
            return None
        version = state.attributes.version
        for guarded in self.after_assignments:
            if (now := guarded.change()) is not None:
                return now
        self.version = version
        return None

    def forms(self) -> list[Any]:
        """The frozen form of each value now, to see which of them a run of the code changes."""
        return [freeze(guarded.read()) for guarded in (*self.always, *self.after_assignments)]

    def places_of(self, tensor: TensorState) -> int:
        """The number of values that are the Tensor, or hold it."""
        every = (*self.always, *self.after_assignments, *self.changing)
        return sum(tensor is part for guarded in every for part in tensors_in(guarded.seen))

    def leave_out_changed(self, before: list[Any], where: str) -> list[str]:
        """Stop guarding what a run of the code changed itself, a list that it appends to, say; raise CaptureError for a
        number, alone or in a list, dict or array: it counts. before: forms() at the run's start. where: the captured
        function. -> names of lists and dicts that it made longer or shorter.
        """
        changed, resized = set(), []
        for guarded, old in zip((*self.always, *self.after_assignments), before, strict=True):
            new = freeze(guarded.read())
            if old != new:
                changed.add(id(guarded))
                if _length(old) != _length(new):
                    resized.append(guarded.what)
                if (count := next(_counts(guarded.what, old, new), None)) is not None:
                    raise CaptureError(
                        f"{where}: {count} each time the function runs, but Python in a captured function runs only "
                        "when a program is made, so it would not count calls; count outside, or keep the number in a "
                        "Tensor (register_buffer) and change that"
                    )
        self.always = [g for g in self.always if id(g) not in changed]
        self.after_assignments = [g for g in self.after_assignments if id(g) not in changed]
        return resized


def _length(form: Any) -> int | None:
    """Number of parts of a frozen list, dict or set; None of anything else."""
    parts = form[-1] if isinstance(form, tuple) else None
    return len(parts) if isinstance(parts, (tuple, frozenset)) else None


def _counts(what: str, old: Any, new: Any) -> Iterator[str]:
    """The change of each number in a value that a run changed, in words; numbers in a container are compared by
    place."""
    if not isinstance(old, tuple) or not isinstance(new, tuple) or old == new:
        return
    if _is_array(old) and old[:3] == new[:3]:
        yield f"{what} changes its values"
    elif old[0] in _NUMBERS and new[0] in _NUMBERS:
        yield f"{what} goes from {_describe(old)} to {_describe(new)}"
    elif old[0] is new[0] and isinstance(old[1], tuple) and len(old[1]) == len(new[1]):
        for at, (before, after) in enumerate(zip(old[1], new[1], strict=True)):
            if not issubclass(old[0], dict):
                yield from _counts(f"{what}[{at}]", before, after)
            elif isinstance(before, tuple) and isinstance(after, tuple):  # not one of too many parts to look at
                (key, value), (new_key, new_value) = before[1], after[1]
                yield from _counts(f"{what}[{_describe(key)}]", value, new_value) if key == new_key else ()


def same_parts(before: Any, now: Any) -> bool:
    """Whether two lists, or two dicts, hold the very same parts."""
    if isinstance(before, dict):
        return list(before) == list(now) and all(before[key] is now[key] for key in before)
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _is_kept(value: Any) -> bool:
    """True for what a run of the code may leave in a place: data, not functions, objects or Layers."""
    return value is ABSENT or value.__class__ in _PLAIN or isinstance(value, (TensorState, *_CONTAINERS))


def _is_tensor(form: Any) -> bool:
    return isinstance(form, tuple) and issubclass(form[0], TensorState)


def _is_array(form: tuple) -> bool:
    return len(form) == 4


class NumbersDrawn:
    """Whether code draws from the generators of `random` and of NumPy, whose numbers a program would keep."""

    def __init__(self) -> None:
        self._before = self._states()

    def since(self) -> list[str]:
        """The generators that moved since this object was made."""
        return [name for name, state in self._states().items() if state != self._before[name]]

    def _states(self) -> dict[str, Any]:
        return {"random": random.getstate(), "numpy.random": freeze(np.random.get_state())}


class Surroundings:
    """Collects, while code is captured, what it may read from around it."""

    def __init__(self) -> None:
        self._functions: dict[int, types.FunctionType] = {}
        self._layers: dict[int, Any] = {}
        self._objects: dict[int, tuple[str, Any]] = {}
        self._before: dict[int, tuple[str, dict, dict]] = {}
        self._contents: dict[int, tuple[str, Any, Any]] = {}

    def called(self, fn: types.FunctionType) -> None:
        """A function of the user's is about to run."""
        if id(fn) in self._functions:
            return
        self._functions[id(fn)] = fn
        self._remember(fn.__module__ or "", fn.__globals__, _names_in(fn.__code__).globals)

    def met(self, name: str, value: Any) -> None:
        """An object that the code has under a name: a Layer that is called, the `self` of a method, an argument."""
        if id(value) in self._layers or id(value) in self._objects:
            return
        if is_layer(value):
            self._layers[id(value)] = value
            self._remember(type(value).__name__, vars(value))
        elif _has_settings(value):
            self._objects[id(value)] = (name, value)
            self._remember(name, vars(value))

    def _remember(self, what: str, space: dict, names: Iterable[str] | None = None) -> None:
        if id(space) not in self._before:
            self._before[id(space)] = (what, space, dict(space))
        for name in list(space) if names is None else names:
            if name not in _TABLES or name == "_buffers":
                self._remember_contents(f"{what}.{name}", space.get(name), _DEEPEST)

    def _remember_contents(self, what: str, value: Any, deepest: int) -> None:
        is_small = (value.__class__ is list or value.__class__ in DICTS) and len(value) <= _MOST_PARTS
        if not is_small or not deepest or id(value) in self._contents:
            return
        self._contents[id(value)] = (what, value, contents(value))
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            self._remember_contents(f"{what}[{key!r}]", part, deepest - 1)

    def changes(self) -> list[KeptPlace]:
        """Attributes, globals, lists and dicts that are not as they were when the code met them."""
        places = []
        for what, space, before in self._before.values():
            for name in {**before, **space}:
                old, new = before.get(name, ABSENT), space.get(name, ABSENT)
                if old is not new and _is_kept(old) and _is_kept(new):
                    places.append(KeptPlace(f"{what}.{name}", space, name, old))
        for what, container, before in self._contents.values():
            if not same_parts(before, contents(container)):
                places.append(KeptPlace(what, container, None, before))
        return places

    def restore_numbers(self) -> None:
        """Put numbers back that the code changed."""
        for _, space, before in self._before.values():
            for name, value in before.items():
                if value.__class__ in _NUMBERS and space.get(name, value) is not value:
                    space[name] = value

    def guards(self, used: frozenset[int], kept: Iterable[KeptPlace] = ()) -> Guards:
        """The places that the code may have read, with what is there now. used: ids of the Tensors that it read or
        wrote. changing: places that each run changes."""
        names = [_names_in(fn.__code__) for fn in self._functions.values()]
        attributes = frozenset().union(*(n.attributes for n in names))
        always, assigned = _GuardTable(used), _GuardTable(used)
        for fn, loaded in zip(self._functions.values(), names, strict=True):
            for name in loaded.globals:
                if name in fn.__globals__:
                    self._add_root(always, name, fn.__globals__, attributes)
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
                self._add_cell(always, name, cell, attributes)
            for name, read in _defaults_of(fn):
                if not _is_fixed(value := read()):
                    if _is_value(value):
                        always.add((id(fn), name), name, read)
                    self._add_object(always, name, value, attributes, _DEEPEST)
        for name, value in self._objects.values():
            self._add_object(always, name, value, attributes, _DEEPEST)
        for layer in with_sublayers(self._layers.values()):
            self._add_layer(always, assigned, layer, attributes)
        loaded = attributes.union(*(n.globals | n.words for n in names))
        changing = []
        for place in kept:
            for table in (always, assigned):
                table.leave_out(place)
            if place.name is None or place.name in loaded:
                changing.append(
                    GuardedValue.of(place.what, place.get, used - {id(place.before)} if place.is_state else used)
                )
        return Guards(list(always.values()), list(assigned.values()), state.attributes.version, changing)

    def _add_root(self, places: _GuardTable, name: str, space: dict, attributes: frozenset[str]) -> None:
        value = space[name]
        if isinstance(value, types.ModuleType):
            if _is_users_module(value):
                _add_names(places, value.__name__, vars(value), attributes)
        elif isinstance(value, type):
            _add_class(places, value, {}, attributes)
        elif not _is_code(value):
            _add(places, name, space, name)
            self._add_object(places, name, value, attributes, _DEEPEST)

    def _add_cell(self, places: _GuardTable, name: str, cell: Any, attributes: frozenset[str]) -> None:
        value = _content(cell)
        if value is ABSENT or isinstance(value, types.ModuleType) or _is_made_inside(value):
            return
        places.add(id(cell), name, functools.partial(_content, cell))
        if isinstance(value, type):
            _add_class(places, value, {}, attributes)
        self._add_object(places, name, value, attributes, _DEEPEST)

    def _add_object(self, places: _GuardTable, what: str, value: Any, attributes: frozenset[str], deepest: int) -> None:
        if not deepest or not _has_settings(value):
            return
        space = vars(value)
        _add_names(places, what, space, attributes)
        _add_class(places, type(value), space, attributes)
        for name in attributes & space.keys():
            self._add_object(places, f"{what}.{name}", space[name], attributes, deepest - 1)

    def _add_layer(self, always: _GuardTable, assigned: _GuardTable, layer: Any, attributes: frozenset[str]) -> None:
        space, what = vars(layer), type(layer).__name__
        aliases = _aliases_of(type(layer))
        loaded = (aliases.get(name, name) for name in attributes | _names_of_ours(type(layer)))
        names = space.keys() & set(loaded) - _TABLES
        for name in names:
            value = space[name]
            if _is_value(value):
                _add(
                    assigned if _is_fixed(value) else always,
                    f"{what}.{name}",
                    space,
                    name,
                )
            elif _has_settings(value):
                _add(assigned, f"{what}.{name}", space, name)
                self._add_object(always, f"{what}.{name}", value, attributes, _DEEPEST)
        _add_class(always, type(layer), space, attributes)


def _add(places: _GuardTable, what: str, space: Any, name: str) -> None:
    if not _is_made_inside(space[name]):
        places.add((id(space), name), what, functools.partial(space.get, name, ABSENT))


def _add_names(places: _GuardTable, what: str, space: dict, names: frozenset[str]) -> None:
    for name in names & space.keys():
        if _is_value(space[name]) or _has_settings(space[name]):
            _add(places, f"{what}.{name}", space, name)


def _add_class(places: _GuardTable, cls: type, space: dict, names: frozenset[str]) -> None:
    """Attributes that an object has from its class; of the class itself where space is empty."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES and base is not object:
            values = vars(base)
            for name in (names & values.keys()) - space.keys():
                value = values[name]
                if _is_value(value) and not isinstance(value, _FUNCTIONS) and not _is_made_inside(value):
                    read = functools.partial(_attribute, space, values, name)
                    places.add((id(space), id(base), name), f"{base.__name__}.{name}", read)


def _defaults_of(fn: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each parameter with a default, and what reads that, which lists and objects among them may change."""
    code, values = fn.__code__, fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    for at, name in enumerate(names):
        yield name, functools.partial(operator.getitem, values, at)
    for name in (keywords := fn.__kwdefaults__ or {}):
        yield name, functools.partial(operator.getitem, keywords, name)


def _attribute(space: dict, values: Any, name: str) -> Any:
    """The attribute of an object under a name, its own or its class's."""
    return space[name] if name in space else values.get(name, ABSENT)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


_TABLES = frozenset(
    (
        *("training", "_parameters", "_buffers", "_sub_layers"),
        *("_forward_pre_hooks", "_forward_post_hooks", "_forward_post_hooks_always_called", "_state_dict_hooks"),
        *("_forward_pre_hooks_with_kwargs_flag", "_forward_post_hooks_with_kwargs_flag"),
    )
)


def is_layer(value: Any) -> bool:
    """True for a Layer."""
    return hasattr(value, "training") and "_sub_layers" in getattr(value, "__dict__", {})


def with_sublayers(layers: Iterable[Any]) -> Iterator[Any]:
    """Layers, and those inside them, each once."""
    seen: set[int] = set()
    for layer in layers:
        for part in layer.sublayers(include_self=True):
            if id(part) not in seen:
                seen.add(id(part))
                yield part


def _is_made_inside(value: Any) -> bool:
    return isinstance(value, TensorState) and isinstance(value._array, Tracer)


def _is_value(value: Any) -> bool:
    """True for what code computes with as it stands, and for functions."""
    return value.__class__ in _PLAIN or isinstance(
        value, (TensorState, *_CONTAINERS, *_FUNCTIONS, np.ndarray, np.generic, np.dtype, enum.Enum)
    )


def _is_code(value: Any) -> bool:
    """True for what only redefinition changes: functions and classes with a name in a module."""
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type))


def _has_settings(value: Any) -> bool:
    """True for an object of a class of the user's own, or a namespace: its attributes are looked at."""
    cls = type(value)
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(
        value, (type, types.ModuleType, BaseException, *_FUNCTIONS)
    ):
        return False
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return True
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__ if base is not object}
    return not roots & (_LIBRARIES | {"builtins"}) and cls.__module__.partition(".")[0] not in sys.stdlib_module_names


def _is_users_module(module: types.ModuleType) -> bool:
    root = module.__name__.partition(".")[0]
    return root not in _LIBRARIES and root not in sys.stdlib_module_names


_names: Any = weakref.WeakKeyDictionary()


def _names_in(code: types.CodeType) -> _Names:
    """The names that code loads, and code written inside it."""
    names = _names.get(code)
    if names is None:
        loaded: dict[str, set[str]] = {"GLOBAL": set(), "NAME": set(), "ATTR": set(), "METHOD": set()}
        for step in dis.get_instructions(code):
            kind = step.opname.removeprefix("LOAD_")
            if kind in loaded and step.opname != kind:
                loaded[kind].add(step.argval)
        inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
        names = _names[code] = _Names(
            frozenset(loaded["GLOBAL"] | loaded["NAME"]).union(*(n.globals for n in inner)),
            frozenset(loaded["ATTR"] | loaded["METHOD"]).union(*(n.attributes for n in inner)),
            frozenset(c for c in code.co_consts if isinstance(c, str) and c.isidentifier()).union(
                *(n.words for n in inner)
            ),
        )
    return names


@functools.cache
def _aliases_of(cls: type) -> dict[str, str]:
    """Second names of attributes -> the first."""
    members = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return {name: value.target for name, value in members.items() if isinstance(value, Alias)}


@functools.cache
def _names_of_ours(cls: type) -> frozenset[str]:
    """Attributes that the methods of a Layer's classes in this package load."""
    names: frozenset[str] = frozenset()
    for base in cls.__mro__:
        if base.__module__.startswith("polyreme.") and base.__module__ != "polyreme.nn.layer":
            for member in vars(base).values():
                if isinstance(member, types.FunctionType) and member.__name__ != "__init__":
                    names |= _names_in(member.__code__).attributes
    return names
