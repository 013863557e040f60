"""When calls of a Program that fit a pattern may be replaced, and the call that stands in their place."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core.arguments import defaults_of
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.fusion.pattern import Bound, CallForm, Match, Pattern
from polyreme.program import infer
from polyreme.program.block import Block
from polyreme.program.operation import Call
from polyreme.program.passes.facts import ProgramFacts, inputs_of, results_of, symbol_of
from polyreme.program.values import Ref

_VIEWS = ("transpose",)
"""Calls that may stay for other readers: they cost nothing to have twice."""


class BlockCalls:
    """The calls of a block, each known by its place; values are Refs."""

    def __init__(self, block: Block, facts: ProgramFacts) -> None:
        self.block = block
        self.facts = facts
        self._places = {name: i for i, op in enumerate(block.ops) for name in op.outputs}

    def maker(self, value: Any) -> int | None:
        """The place of the operation that defines a value."""
        return self._places.get(value.name) if isinstance(value, Ref) else None

    def parts(self, call: int) -> tuple[str, dict[str, Any] | None]:
        """(name, arguments), no arguments for what is no Call with one result."""
        op = self.block.ops[call]
        if not isinstance(op, Call):
            return op.kind, None
        return op.name, None if len(op.outputs) != 1 or op.changes else op.by_parameter()

    def result(self, call: int) -> Ref:
        """What an operation with one result defines."""
        return Ref(self.block.ops[call].outputs[0])

    def kind(self, value: Any) -> tuple[tuple[int, ...], np.dtype] | None:
        """(shape, dtype) of a Ref whose value the Program says exactly."""
        symbol = symbol_of(self.facts.likes, value.name) if isinstance(value, Ref) else None
        return None if symbol is None else (tuple(symbol.shape), symbol.dtype)


def replaced(pattern: Pattern, match: Match) -> tuple[Call, list[int]] | None:
    """(the one call, places of those it makes superfluous), or None where the match must be left alone."""
    places, source = match.calls, match.source
    assert isinstance(source, BlockCalls)
    block, facts = source.block, source.facts
    calls: list[Call] = [block.ops[i] for i in places]  # type: ignore[misc]
    if len({(call.policy, call.taped) for call in calls}) > 1 or _is_written_between(block, places):
        return None
    gone = [places[0]]
    for place, call in zip(places[1:], calls[1:], strict=True):
        inside = sum(other.reads().count(call.outputs[0]) for other in calls)
        free = facts.readers[call.outputs[0]] == inside and call.outputs[0] not in facts.pinned
        if facts.cuts(call) or not (free or call.name in _VIEWS):
            return None
        if free:
            gone.append(place)
    if any(facts.draws(call) for call in calls) and not (pattern.redraws and _draws_alone(block, places, facts)):
        return None
    more = pattern.where(match)
    if more is None:
        return None
    call = _make(pattern.replacement, {**match.bound, **more}, calls[0])
    return (call, gone) if _gives_the_same(call, facts) else None


def _make(form: CallForm, bound: Bound, like: Call) -> Call:
    arguments = form.arguments(bound)
    args = []
    for parameter in defaults_of(form.op) or {}:
        if parameter not in arguments:
            break
        args.append(arguments.pop(parameter))
    return Call(
        name=form.op, args=tuple(args), kwargs=arguments, outputs=like.outputs, policy=like.policy, taped=like.taped,
        scope=like.scope,
    )  # fmt: skip


def _is_written_between(block: Block, places: list[int]) -> bool:
    """Whether something that the calls read is another value by the time of the last one."""
    reads = {name for i in places for name in block.ops[i].reads()}
    return any(not reads.isdisjoint(op.writes()) for op in block.ops[min(places) : places[0]])


def _draws_alone(block: Block, places: list[int], facts: ProgramFacts) -> bool:
    """Whether no other call takes random numbers between the first and the last of these."""
    return not any(facts.draws(block.ops[i]) for i in range(min(places), places[0]) if i not in places)


def _gives_the_same(call: Call, facts: ProgramFacts) -> bool:
    """Whether the call is possible and its result has the shape and dtype there were."""
    before, given = symbol_of(facts.likes, call.outputs[0]), inputs_of(call, facts.likes)
    if before is None or given is None:
        return False
    try:
        results, changes = results_of(call, given)
    except (ShapeError, DTypeError, ConfigError):
        return False
    first, last = results[0], results[-1]
    if changes or not isinstance(first, infer.InferredTensor):
        return False
    shape = infer.shape_of(first.array, last.array)
    return (shape, first.array.dtype) == (tuple(before.shape), before.dtype)
