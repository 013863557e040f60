"""Captured code gets the table of patterns too: several calls that fit a pattern give what the one call gives.

The calls are noted as they are made. At the call that ends a pattern the one call is made as well; its value takes the
place of the result, and the tape learns of a shortcut from the result to the inputs of the pattern. What lies between
stays as it was for whoever else reads it, asks for its gradient or hooks it; the compiler drops what nobody does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme import flags
from polyreme.core import amp_policy
from polyreme.core.arguments import arguments_of
from polyreme.core.checked import checked
from polyreme.core.op import function_of
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.fusion.pattern import Match, Pattern, matches
from polyreme.fusion.table import PATTERNS

_FLAG = flags.FLAGS["FLAGS_fuse_captured"]


class _Fusing:
    """is_on: whether captured code is fused."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.follow()

    def follow(self) -> None:
        """Take the flag's value."""
        self.is_on = bool(_FLAG.value)


fusing: _Fusing = _Fusing()
_FLAG.changed.append(fusing.follow)


class _Table:
    """The patterns by the call that ends them, and the names of all calls in them; read on first use, when every op is
    declared."""

    def __init__(self) -> None:
        self.ending: dict[str, list[Pattern]] = defaultdict(list)
        for pattern in PATTERNS:
            if not pattern.redraws:
                self.ending[pattern.ending].append(pattern)
        self.names = {op for patterns in self.ending.values() for p in patterns for op in p.ops}


_tables: list[_Table] = []


def _table() -> _Table:
    if not _tables:
        _tables.append(_Table())
    return _tables[0]


@dataclass(eq=False)
class CallOperand:
    """A Tensor as an argument of noted calls, with the array it held then; equal to itself alone."""

    tensor: TensorState
    array: Any


@dataclass(eq=False)
class Noted:
    """A call: what it was given, what it gave, the modes in force, and where gradients of all these went then."""

    name: str
    arguments: dict[str, Any]
    result: CallOperand
    modes: tuple[Any, ...]

    def __post_init__(self) -> None:
        self._edges = self._edges_now()

    def inputs(self) -> list[CallOperand]:
        """The Tensors it was given."""
        return [v for v in self.arguments.values() if isinstance(v, CallOperand)]

    def is_current(self) -> bool:
        """Whether nothing that it was given or gave was changed since, in place or in where its gradient goes."""
        same = all(v.tensor._array is v.array for v in (*self.inputs(), self.result))
        return same and self._edges == self._edges_now()

    def _edges_now(self) -> list[Any]:
        return [tape.edge_key(tape.edge_of(v.tensor)) for v in (*self.inputs(), self.result)]


class CapturedCalls:
    """The calls of a capture so far, each known by what was noted of it; values are Values."""

    def __init__(self) -> None:
        self._noted: dict[int, Noted] = {}  # by the id of the result, which the note keeps alive
        self._values: dict[tuple[int, int], CallOperand] = {}
        self.fused: list[str] = []

    def add(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Notes a call; where it ends a pattern, result takes the one call's value."""
        table = _table()
        if name not in table.names or not isinstance(result, TensorState) or result.own_form:
            return
        arguments = arguments_of(name, args, kwargs)
        if arguments is None or any(v is result or getattr(v, "own_form", False) for v in arguments.values()):
            return
        arguments = {p: self._value(v) if isinstance(v, TensorState) else v for p, v in arguments.items()}
        modes = (amp_policy.active.policy, tape.grad_mode.enabled)
        noted = self._noted[id(result)] = Noted(name, arguments, self._value(result), modes)
        if checked.is_on or tape.saved_hooks.pair is not None:
            return  # they are told of every call as it was written
        for pattern in table.ending.get(name, ()):
            for match in matches(pattern, noted, self):
                if self._apply(pattern, match, result):
                    return

    def _value(self, tensor: TensorState) -> CallOperand:
        key = (id(tensor), id(tensor._array))
        if key not in self._values:
            self._values[key] = CallOperand(tensor, tensor._array)
        return self._values[key]

    # what matching asks

    def maker(self, value: Any) -> Noted | None:
        """The call that gave a value."""
        noted = self._noted.get(id(value.tensor)) if isinstance(value, CallOperand) else None
        return noted if noted is not None and noted.result is value else None

    def parts(self, call: Noted) -> tuple[str, dict[str, Any] | None]:
        """(name, arguments by parameter)."""
        return call.name, call.arguments

    def result(self, call: Noted) -> CallOperand:
        """The value that a call gave."""
        return call.result

    def kind(self, value: Any) -> tuple[tuple[int, ...], np.dtype] | None:
        """(shape, dtype)."""
        return (tuple(value.array.shape), value.array.dtype) if isinstance(value, CallOperand) else None

    # applying

    def _apply(self, pattern: Pattern, match: Match, result: TensorState) -> bool:
        calls: list[Noted] = match.calls
        if any(c.modes != calls[0].modes or not c.is_current() for c in calls):
            return False
        one = pattern.replacement.op
        if _is_listed(calls[0].modes[0], one, calls):
            return False
        more = pattern.where(match)
        if more is None:
            return False
        values = pattern.replacement.arguments({**match.bound, **more})
        given = {p: v.tensor if isinstance(v, CallOperand) else v for p, v in values.items()}
        try:
            fused = function_of(one)(**given)
        except (ShapeError, DTypeError, ConfigError):
            return False  # the one call takes less than the several
        alike = fused._array.shape == result._array.shape and fused._array.dtype == result._array.dtype
        if not alike or fused.stop_gradient is not result.stop_gradient or not _join(result, fused):
            return False
        result._array = fused._array
        self._noted[id(result)] = Noted(one, arguments_of(one, (), values) or {}, self._value(result), calls[0].modes)
        self.fused.append(pattern.name)
        return True


def _is_listed(policy: amp_policy.Policy | None, one: str, calls: Sequence[Noted]) -> bool:
    """Whether the user says of one of these ops by name in which dtype it runs."""
    if policy is None or not policy.white | policy.black:
        return False
    listed = policy.white | policy.black
    return one in listed or any(c.name in listed for c in calls)


def _join(result: TensorState, fused: TensorState) -> bool:
    """Gives result the one call's way back; False where that does not lead wherever result's own does."""
    if result._node is None:
        return fused._node is None
    node, other = result._node, fused._node
    if not (isinstance(node, tape.KernelNode) and isinstance(other, tape.KernelNode)):
        return False
    ends = {tape.edge_key(e) for e in other.edges if e is not None}
    between: dict[tape.Node, None] = {}
    stack = [node]
    while stack:
        for edge in stack.pop().edges:
            if edge is None or tape.edge_key(edge) in ends:
                continue
            if not isinstance(edge, tuple):
                return False
            if edge[0] not in between:
                between[edge[0]] = None
                stack.append(edge[0])
    tape.shortcuts[node] = tape.Shortcut(other, tuple(between))
    return True
