"""Patterns: several calls, written as lines of text, and the one call that does the same.

A pattern is data. This file reads the lines, finds them in a block, and says when they may be replaced.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.program import infer
from polyreme.program.block import Block
from polyreme.program.operation import Call
from polyreme.program.passes.arguments import arguments_of, defaults_of
from polyreme.program.passes.facts import Facts, inputs_of, results_of, symbol_of
from polyreme.program.passes.subexpressions import frozen
from polyreme.program.values import Ref

Bound = dict[str, Any]
_SWAPPED = {"add": ("x", "y"), "multiply": ("x", "y")}
_VIEWS = ("transpose",)
"""Calls that may stay for other readers: they cost nothing to have twice."""


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


@dataclass
class Match:
    """Calls of a block that fit a pattern: their places, the result's first, and what the names stand for."""

    block: Block
    facts: Facts
    places: list[int]
    bound: Bound

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of what a name stands for, -1 where they are not known; () if it is no value of the Program."""
        found = self._symbol(name)
        return () if found is None else tuple(found.shape)

    def is_floating(self, name: str) -> bool:
        """Whether a name stands for a value of a floating dtype."""
        found = self._symbol(name)
        return found is not None and dtypes.is_floating(found.dtype)

    def _symbol(self, name: str) -> Any:
        value = self.bound[name]
        return symbol_of(self.facts.likes, value.name) if isinstance(value, Ref) else None

    @property
    def calls(self) -> list[Call]:
        """The calls, the one with the result first."""
        return [self.block.ops[i] for i in self.places]  # type: ignore[misc]


def matches(pattern: Pattern, block: Block, index: int, maker_of: Mapping[str, int], facts: Facts) -> Iterator[Match]:
    """Every way in which the pattern's result can be the one of the call at this place.

    made: name -> the place in block where it is defined.
    """

    def follow(left: Sequence[Line], places: list[int], bound: Bound) -> Iterator[Match]:
        if not left:
            yield Match(block, facts, places, bound)
            return
        value = Ref(block.ops[index].outputs[0]) if not places else bound.get(left[0].out)
        place = maker_of.get(value.name) if isinstance(value, Ref) else None
        if place is None:
            return
        for further in _unify(left[0], block.ops[place], bound):
            yield from follow(left[1:], [*places, place], further)

    if isinstance(block.ops[index], Call) and block.ops[index].outputs:
        yield from follow(pattern.lines, [], {})


def _unify(line: Line, op: Any, bound: Bound) -> Iterator[Bound]:
    """bound with what the line's names stand for in op; nothing where op does not fit."""
    if not isinstance(op, Call) or op.name != line.op or len(op.outputs) != 1 or op.changes:
        return
    arguments = arguments_of(op)
    if arguments is None:
        return
    yield from _fit(line, arguments, bound)
    if line.op in _SWAPPED:
        x, y = _SWAPPED[line.op]
        yield from _fit(line, {**arguments, x: arguments[y], y: arguments[x]}, bound)


def _fit(line: Line, given: dict[str, Any], bound: Bound) -> Iterator[Bound]:
    known, defaults = dict(bound), defaults_of(line.op) or {}
    for parameter, value in given.items():
        term = line.given.get(parameter, (defaults[parameter],))
        if isinstance(term, tuple):
            if _plain(value) != _plain(term[0]):
                return
        elif _plain(known.setdefault(term, value)) != _plain(value):
            return
    yield known


def _plain(value: Any) -> Any:
    """An argument to compare; lists and tuples of the same are the same."""
    return frozen(tuple(value) if isinstance(value, list) else value)


def replaced(pattern: Pattern, match: Match) -> tuple[Call, list[int]] | None:
    """(the one call, places of those it makes superfluous), or None where the match must be left alone."""
    calls, facts = match.calls, match.facts
    if len({(call.policy, call.taped) for call in calls}) > 1 or _is_written_between(match):
        return None
    gone = [match.places[0]]
    for place, call in zip(match.places[1:], calls[1:], strict=True):
        inside = sum(other.reads().count(call.outputs[0]) for other in calls)
        free = facts.readers[call.outputs[0]] == inside and call.outputs[0] not in facts.pinned
        if facts.cuts(call) or not (free or call.name in _VIEWS):
            return None
        if free:
            gone.append(place)
    if any(facts.draws(call) for call in calls) and not (pattern.redraws and _draws_alone(match)):
        return None
    more = pattern.where(match)
    if more is None:
        return None
    made = _make(pattern.replacement, {**match.bound, **more}, calls[0])
    return (made, gone) if _gives_the_same(made, match.facts) else None


def _make(line: Line, bound: Bound, like: Call) -> Call:
    arguments = {p: term[0] if isinstance(term, tuple) else bound[term] for p, term in line.given.items()}
    defaults = defaults_of(line.op) or {}
    arguments = {p: v for p, v in arguments.items() if _plain(v) != _plain(defaults[p])}
    args = []
    for parameter in defaults:
        if parameter not in arguments:
            break
        args.append(arguments.pop(parameter))
    return Call(
        name=line.op, args=tuple(args), kwargs=arguments, outputs=like.outputs, policy=like.policy, taped=like.taped,
        scope=like.scope,
    )  # fmt: skip


def _is_written_between(match: Match) -> bool:
    """Whether something that the calls read is another value by the time of the last one."""
    reads = {name for call in match.calls for name in call.reads()}
    return any(not reads.isdisjoint(op.writes()) for op in match.block.ops[min(match.places) : match.places[0]])


def _draws_alone(match: Match) -> bool:
    """Whether no other call takes random numbers between the first and the last of these."""
    span = range(min(match.places), match.places[0])
    return not any(match.facts.draws(match.block.ops[i]) for i in span if i not in match.places)


def _gives_the_same(call: Call, facts: Facts) -> bool:
    """Whether the call is possible and its result has the shape and dtype there were."""
    before, given = symbol_of(facts.likes, call.outputs[0]), inputs_of(call, facts.likes)
    if before is None or given is None:
        return False
    try:
        results, changes = results_of(call, given)
    except (ShapeError, DTypeError, ConfigError):
        return False
    first, last = results[0], results[-1]
    if changes or not isinstance(first, infer.Seen):
        return False
    shape = infer.shape_of(first.array, last.array)
    return (shape, first.array.dtype) == (tuple(before.shape), before.dtype)
