"""Patterns: several calls, written as lines of text, and the one call that does the same.

A pattern is data. This file reads the lines and finds them among calls, wherever these come from: Calls says what a
Program or a capture knows of its calls.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core.arguments import defaults_of
from polyreme.fusion.values import plain

Bound = dict[str, Any]
_SWAPPED = {"add": ("x", "y"), "multiply": ("x", "y")}


@dataclass(frozen=True)
class Line:
    """`out = op(...)` of a pattern; given: parameter -> a name that stands for anything, or a literal in a tuple."""

    out: str
    op: str
    given: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> Line:
        """The line a text stands for, such as "y = matmul(x, w, transpose_y=True)"."""
        (statement,) = ast.parse(text).body
        call: Any = statement.value  # type: ignore[attr-defined]
        names = list(defaults_of(call.func.id) or ())
        listed = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        given = {n: v.id if isinstance(v, ast.Name) else (ast.literal_eval(v),) for n, v in listed}
        return cls(statement.targets[0].id, call.func.id, given)  # type: ignore[attr-defined]

    def arguments(self, bound: Bound) -> dict[str, Any]:
        """The arguments that differ from their defaults, names filled in from bound."""
        given = {p: term[0] if isinstance(term, tuple) else bound[term] for p, term in self.given.items()}
        defaults = defaults_of(self.op) or {}
        return {p: v for p, v in given.items() if plain(v) != plain(defaults[p])}


def anything(_: Match) -> Bound:
    """No condition, and nothing worked out."""
    return {}


@dataclass(frozen=True)
class Pattern:
    """Calls that one call replaces.

    find: the calls as lines, the last one giving the result; parameters that a line does not name have their defaults.
    give: the call instead. where: what else must hold, from a Match to further names for give, or None if it does not.
    redraws: it takes as many random keys as before and makes other numbers of them.
    """

    name: str
    find: tuple[str, ...]
    give: str
    where: Callable[[Match], Bound | None] = anything
    redraws: bool = False

    @functools.cached_property
    def lines(self) -> list[Line]:
        """find, the result first."""
        return [Line.read(text) for text in reversed(self.find)]

    @functools.cached_property
    def replacement(self) -> Line:
        """give."""
        return Line.read(self.give)


class Calls(Protocol):
    """What is known of the calls among which patterns are looked for. A call is whatever the implementer names it by;
    values are what its arguments hold."""

    def maker(self, value: Any) -> Any:
        """The call that gave a value, None for what is no value or comes from elsewhere."""
        ...

    def parts(self, call: Any) -> tuple[str, dict[str, Any] | None]:
        """(name, arguments by parameter); None in place of the arguments if it can be part of no pattern."""
        ...

    def kind(self, value: Any) -> tuple[tuple[int, ...], np.dtype] | None:
        """(shape, dtype) of a value, sizes -1 where they are not known; None for what is no value."""
        ...


@dataclass
class Match:
    """Calls that fit a pattern, the one with the result first, and what the names stand for."""

    source: Calls
    calls: list[Any]
    bound: Bound

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of what a name stands for, -1 where they are not known; () if it is no value."""
        kind = self.source.kind(self.bound[name])
        return () if kind is None else kind[0]

    def is_floating(self, name: str) -> bool:
        """Whether a name stands for a value of a floating dtype."""
        kind = self.source.kind(self.bound[name])
        return kind is not None and dtypes.is_floating(kind[1])


def matches(pattern: Pattern, result: Any, source: Calls) -> Iterator[Match]:
    """Every way in which the pattern's result can be the one of the call `result`."""

    def follow(left: Sequence[Line], calls: list[Any], bound: Bound) -> Iterator[Match]:
        if not left:
            yield Match(source, calls, bound)
            return
        call = result if not calls else source.maker(bound.get(left[0].out))
        if call is None:
            return
        name, given = source.parts(call)
        if name != left[0].op or given is None:
            return
        for further in _unify(left[0], given, bound):
            yield from follow(left[1:], [*calls, call], further)

    yield from follow(pattern.lines, [], {})


def _unify(line: Line, arguments: dict[str, Any], bound: Bound) -> Iterator[Bound]:
    """bound with what the line's names stand for in a call of its op; nothing where the arguments do not fit."""
    yield from _fit(line, arguments, bound)
    if line.op in _SWAPPED:
        x, y = _SWAPPED[line.op]
        yield from _fit(line, {**arguments, x: arguments[y], y: arguments[x]}, bound)


def _fit(line: Line, given: dict[str, Any], bound: Bound) -> Iterator[Bound]:
    known, defaults = dict(bound), defaults_of(line.op) or {}
    for parameter, value in given.items():
        term = line.given.get(parameter, (defaults[parameter],))
        if isinstance(term, tuple):
            if plain(value) != plain(term[0]):
                return
        elif plain(known.setdefault(term, value)) != plain(value):
            return
    yield known
