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
class CallForm:
    """`op(...)` in a pattern; operands: parameter -> a name that stands for anything, or a literal in a tuple."""

    op: str
    operands: dict[str, Any]

    @classmethod
    def read(cls, call: Any) -> CallForm:
        """The form that the syntax of a call stands for, or of x[index]."""
        if isinstance(call, ast.Subscript):
            return cls("Tensor.__getitem__", {"self": call.value.id, "index": call.slice.id})  # type: ignore[attr-defined]
        names = list(defaults_of(call.func.id) or ())
        listed = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        return cls(call.func.id, {n: v.id if isinstance(v, ast.Name) else (ast.literal_eval(v),) for n, v in listed})

    def arguments(self, bound: Bound) -> dict[str, Any]:
        """The arguments that differ from their defaults, names filled in from bound."""
        given = {p: term[0] if isinstance(term, tuple) else bound[term] for p, term in self.operands.items()}
        defaults = defaults_of(self.op) or {}
        return {p: v for p, v in given.items() if plain(v) != plain(defaults[p])}


@dataclass(frozen=True)
class Line:
    """`out = op(...)` of a pattern; `out = op(...) or other(...) or x`: a call of one of these forms, or x itself."""

    out: str
    forms: tuple[CallForm, ...]
    same: str | None = None

    @classmethod
    def read(cls, text: str) -> Line:
        """The line a text stands for, such as "y = matmul(x, w, transpose_y=True)"."""
        statement: Any = ast.parse(text).body[0]
        value = statement.value
        choices = value.values if isinstance(value, ast.BoolOp) else [value]
        same = choices.pop().id if isinstance(choices[-1], ast.Name) else None
        return cls(statement.targets[0].id, tuple(map(CallForm.read, choices)), same)


def anything(_: Match) -> Bound:
    """No condition, and nothing worked out."""
    return {}


@dataclass(frozen=True)
class Pattern:
    """Calls that one call replaces.

    find: the calls as lines, the last one, of one form, giving the result; parameters that a line does not name have
    their defaults, and a line is passed over where nothing takes its result. give: the call instead. where: what else
    must hold, from a Match to further names for give, or None if it does not. redraws: it takes as many random keys as
    before and makes other numbers of them.
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

    @property
    def ending(self) -> str:
        """The op that gives the result."""
        return self.lines[0].forms[0].op

    @functools.cached_property
    def replacement(self) -> CallForm:
        """give."""
        return Line.read(self.give).forms[0]

    @property
    def ops(self) -> set[str]:
        """The ops of all calls, of the one that is given too."""
        return {form.op for line in self.lines for form in line.forms} | {self.replacement.op}


class Calls(Protocol):
    """What is known of the calls among which patterns are looked for. A call is whatever the implementer names it by;
    values are what its arguments hold."""

    def maker(self, value: Any) -> Any:
        """The call that gave a value, None for what is no value or comes from elsewhere."""
        ...

    def parts(self, call: Any) -> tuple[str, dict[str, Any] | None]:
        """(name, arguments by parameter); None in place of the arguments if it can be part of no pattern."""
        ...

    def result(self, call: Any) -> Any:
        """The value that a call gave, of a call with arguments."""
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

    def dtype(self, name: str) -> np.dtype | None:
        """Dtype of what a name stands for, None if that is no value."""
        kind = self.source.kind(self.bound[name])
        return None if kind is None else kind[1]

    def is_floating(self, name: str) -> bool:
        """Whether a name stands for a value of a floating dtype."""
        dtype = self.dtype(name)
        return dtype is not None and dtypes.is_floating(dtype)


def matches(pattern: Pattern, result: Any, source: Calls) -> Iterator[Match]:
    """Every way in which the pattern's result can be the one of the call `result`."""
    if source.parts(result)[1] is not None:
        start = Match(source, [], {pattern.lines[0].out: source.result(result)})
        yield from _follow(pattern.lines, start, result)


def _follow(left: Sequence[Line], match: Match, result: Any) -> Iterator[Match]:
    """Every way in which a match goes on over the lines that are left."""
    if not left:
        yield match
        return
    line, rest = left[0], left[1:]
    source, calls, bound = match.source, match.calls, match.bound
    if line.out not in bound:
        yield from _follow(rest, match, result)
        return
    call = result if not calls else source.maker(bound[line.out])
    name, given = ("", None) if call is None else source.parts(call)
    for form in line.forms:
        if given is not None and form.op == name:
            for further in _unify(form, given, bound):
                yield from _follow(rest, Match(source, [*calls, call], further), result)
    if line.same is not None and plain(bound.get(line.same, bound[line.out])) == plain(bound[line.out]):
        yield from _follow(rest, Match(source, calls, {**bound, line.same: bound[line.out]}), result)


def _unify(form: CallForm, arguments: dict[str, Any], bound: Bound) -> Iterator[Bound]:
    """bound with what the form's names stand for in a call of its op; nothing where the arguments do not fit."""
    yield from _fit(form, arguments, bound)
    if form.op in _SWAPPED:
        x, y = _SWAPPED[form.op]
        yield from _fit(form, {**arguments, x: arguments[y], y: arguments[x]}, bound)


def _fit(form: CallForm, given: dict[str, Any], bound: Bound) -> Iterator[Bound]:
    known, defaults = dict(bound), defaults_of(form.op) or {}
    for parameter, value in given.items():
        term = form.operands.get(parameter, (defaults[parameter],))
        if isinstance(term, tuple):
            if plain(value) != plain(term[0]):
                return
        elif plain(known.setdefault(term, value)) != plain(value):
            return
    yield known
