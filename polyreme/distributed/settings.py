"""Settings: values for a table of fields, checked as they are set, read by key or by attribute.

A field is HONOURED (it changes the Plan or how the job is run), HARMLESS (the result is the same either way, for the
reason noted) or REFUSED (any value but the default is an error, which says what to do instead). Settings remember which
fields were set, as the saved form of a strategy holds those alone.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np

from polyreme.errors import StrategyError, did_you_mean

HONOURED, HARMLESS, REFUSED = "honoured", "harmless", "refused"


class Field(NamedTuple):
    """One setting. default also gives the type: a bool, a whole number, a number, a text, or a list or None (then
    `item` says of what). note: what it maps to, why it changes nothing, or what to do instead.
    """

    default: Any
    kind: str
    note: str
    item: type | None = None


Table = Mapping[str, "Field | Table"]


def honoured(default: Any, note: str, item: type | None = None) -> Field:
    """A field that is honoured."""
    return Field(default, HONOURED, note, item)


def same(default: Any, note: str, item: type | None = None) -> Field:
    """A field that is harmless."""
    return Field(default, HARMLESS, note, item)


def no(default: Any, note: str, item: type | None = None) -> Field:
    """A field that is refused."""
    return Field(default, REFUSED, note, item)


def autocast(scaler: str) -> dict[str, Field]:
    """Fields of loss scaling, noted as those of `scaler`, and of autocast's lists."""
    scaling = {
        "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
        "use_dynamic_loss_scaling": True,
    }
    lists = ("custom_white_list", "custom_black_list")
    return {
        **{name: honoured(default, scaler) for name, default in scaling.items()},
        **{name: honoured([], f"amp.auto_cast({name})", str) for name in lists},
    }


def walk(table: Table, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """(dotted name, Field) of every setting."""
    for name, entry in table.items():
        if isinstance(entry, Field):
            yield prefix + name, entry
        else:
            yield from walk(entry, f"{prefix}{name}.")


class Settings(MutableMapping[str, Any]):
    """A group of settings. Setting a group from a dict changes the keys given and leaves the others as they are.

    Raises StrategyError for a name that is not in the table, with the closest that is, and for a value of another type.
    Reading an unknown name is a KeyError as a key and an AttributeError as an attribute.
    """

    __slots__ = ("_name", "_owner", "_table", "_values")

    def __init__(self, name: str, table: Table, owner: str = "DistributedStrategy") -> None:
        """name: of the group within its owner, dotted; "" for the whole of it. owner: what messages call it."""
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_values", {})
        for key, entry in table.items():
            if not isinstance(entry, Field):
                self._values[key] = type(self)(f"{name}.{key}" if name else key, entry, owner)

    # reading

    def __getitem__(self, key: str) -> Any:
        if key not in self._values and isinstance(self._table[key], Field):
            default = self._table[key].default
            if not isinstance(default, list):
                return default
            self._values[key] = list(default)  # the caller may append to it
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key not in self._table:
            raise AttributeError(f"{self._where()} has no setting {key!r}{did_you_mean(key, self._table)}")
        return self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return repr({key: self[key] for key in self})

    # changing

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._table:
            raise StrategyError(f"{self._where()} has no setting {key!r}{did_you_mean(key, self._table)}")
        entry = self._table[key]
        if isinstance(entry, Field):
            self._values[key] = _check(f"{self._where()}.{key}", entry, value)
        else:
            self._values[key].assign(value)

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delitem__(self, key: str) -> None:
        raise StrategyError(
            f"{self._where()}: a setting cannot be removed; set {key!r} to {self[key]!r} or another value"
        )

    def assign(self, values: Any) -> None:
        """Set the keys given."""
        if not isinstance(values, Mapping):
            raise StrategyError(
                f"{self._where()} is a group of settings, got {values!r}; give a dict with any of {', '.join(self)}"
            )
        for key, value in values.items():
            self[key] = value

    # what was set

    def given(self) -> dict[str, Any]:
        """The settings that were set, groups as dicts; a list still at its default is not one."""
        result: dict[str, Any] = {}
        for key in self._table:
            if key not in self._values:
                continue
            value = self._values[key]
            entry = self._table[key]
            if isinstance(entry, Field):
                if not isinstance(value, list) or value != entry.default:
                    result[key] = value
            elif inner := value.given():
                result[key] = inner
        return result

    def changed(self) -> dict[str, Any]:
        """Dotted name -> value of the settings that differ from their defaults."""
        result: dict[str, Any] = {}
        for key, entry in self._table.items():
            name = f"{self._name}.{key}" if self._name else key
            if not isinstance(entry, Field):
                result.update(self[key].changed())
            elif self[key] != entry.default:
                result[name] = self[key]
        return result

    def __deepcopy__(self, memo: dict[Any, Any]) -> Settings:
        copied = type(self)(self._name, self._table, self._owner)
        copied._values.update(copy.deepcopy(self._values, memo))
        return copied

    def _where(self) -> str:
        return f"{self._owner}.{self._name}" if self._name else self._owner


def _check(name: str, field: Field, value: Any) -> Any:
    """value as the field's type, a plain Python value."""
    default = field.default
    if default is None:  # a setting that may be left open
        return None if value is None else _as(name, field.item, value)
    if isinstance(default, list):
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise _wrong(name, f"a list of {_WORDS[field.item]}", value)
        if default and not value:  # the saved form cannot tell an empty list from one that was not set
            raise _wrong(name, "a list of at least one name", value)
        return [_as(name, field.item, each) for each in value]
    return _as(name, type(default), value)


_WORDS: dict[Any, str] = {
    bool: "True or False", int: "a whole number", float: "a number", str: "a text", dict: "a dict",
}  # fmt: skip


def _as(name: str, kind: Any, value: Any) -> Any:
    is_flag = isinstance(value, (bool, np.bool_))
    accepted = {
        bool: is_flag,
        int: isinstance(value, numbers.Integral) and not is_flag,
        float: isinstance(value, numbers.Real) and not is_flag,
        str: isinstance(value, str),
        dict: isinstance(value, Mapping),
    }
    if not accepted[kind]:
        raise _wrong(name, _WORDS[kind], value)
    return kind(value)


def _wrong(name: str, want: str, value: Any) -> StrategyError:
    return StrategyError(f"{name} is {want}, got {value!r} of type {type(value).__name__}")
