"""Registry: a table of records by name, which a script may add to. Reference: code that a record names, loaded late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

from polyreme.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reference(Generic[T]):
    """An object of a module, which is loaded when the object is asked for: a record names code so, and is read without.

    >>> Reference("math", "sqrt").load()(9.0), str(Reference("math", "sqrt"))
    (3.0, 'math:sqrt')
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def load(self) -> T:
        """The object. Raises ConfigError for a name that the module has not, ImportError for a module that is none."""
        names: dict[str, Any] = vars(import_module(self.module))
        if self.name not in names:
            raise ConfigError(f"module {self.module} has no {self.name!r}{did_you_mean(self.name, names)}")
        return names[self.name]


@dataclass(frozen=True, slots=True)
class Result(Reference[T]):
    """What a function of a module gives for an argument, called when it is asked for.

    >>> Result("math", "sqrt", 9.0).load()
    3.0
    """

    argument: Any

    def load(self) -> T:
        """What the function gives. Raises as Reference.load."""
        function: Any = Reference.load(self)
        return function(self.argument)


class Named(Protocol):
    """What a Registry asks of its records. aliases: other spellings of the name, which lists do not show."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Sequence[str]: ...


R = TypeVar("R", bound=Named)


class Registry(Mapping[str, R]):
    """Records by name, in the order they came. what: the noun of a record, for errors.

    >>> from types import SimpleNamespace
    >>> ships = Registry("ship", [SimpleNamespace(name="trireme", aliases=("trieres",))])
    >>> list(ships), ships.canonical_name("trieres")
    (['trireme'], 'trireme')
    """

    def __init__(self, what: str, records: Sequence[R] = ()) -> None:
        self.what = what
        self._records: dict[str, R] = {}
        for record in records:
            self.register(record)

    def __getitem__(self, name: str) -> R:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Registry({self.what!r}: {', '.join(self)})"

    def named(self, name: str) -> R:
        """The record of this name. Raises ConfigError for an unknown one, with the closest that is known."""
        if name not in self._records:
            raise ConfigError(f"unknown {self.what} {name!r}{did_you_mean(name, self)}")
        return self._records[name]

    def canonical_name(self, name: str) -> str:
        """The name of the record that has this alias; any other name as it is."""
        return next((record.name for record in self.values() if name in record.aliases), name)

    def register(self, record: R) -> None:
        """Add a record after the others. Raises ConfigError where its name or an alias is taken."""
        for name in (record.name, *record.aliases):
            if self.canonical_name(name) in self._records:
                raise ConfigError(f"there is a {self.what} {name!r} already; give this one another name")
        self._records[record.name] = record

    @contextmanager
    def registered(self, record: R) -> Iterator[R]:
        """A record that is there inside the with block only."""
        self.register(record)
        try:
            yield record
        finally:
            del self._records[record.name]
