"""constant_folding: what follows from constants alone is computed once, before the Program runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.core.symbol import Symbol
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.program import values
from polyreme.program.block import Block
from polyreme.program.operation import Call, Operation, autocast, call
from polyreme.program.passes.facts import ProgramFacts, kept_names, settle, symbol_of
from polyreme.program.program import Program

LIMIT = 1024  # elements: a constant is written into the Program, where a page of numbers is all that one should meet


def constant_folding(program: Program, keep: Any = (), held: bool = False, limit: int = LIMIT) -> Program:
    """program with the values in place of calls whose inputs are all constant.

    Constant are numbers, arrays in calls, and what follows from them; with held also Tensors that the Program holds and
    nothing in it writes, which then are what they are now for good. limit: results with more elements are left alone.
    So is what takes random numbers, writes, wants gradients, or follows from a shape (which is computed anyway).
    What the constants were computed from is left for dead_code.
    """
    folded = program.clone()
    facts = ProgramFacts(folded, kept_names(program, keep))
    known: dict[str, Tensor] = {}
    if held:
        known.update({n: t for n, t in folded.captured.items() if n not in facts.written and t.stop_gradient})
    with _as_called():
        _fold(folded.global_block(), known, facts, limit)
    return settle(folded)


@contextmanager
def _as_called() -> Iterator[None]:
    """What is called inside runs, in static mode too."""
    outer, state.watch.active = state.watch.active, None
    try:
        with tape.GradEnabled(False):
            yield
    finally:
        state.watch.active = outer


def _fold(block: Block, outer: dict[str, Tensor], facts: ProgramFacts, limit: int) -> None:
    known = {name: value for name, value in outer.items() if name not in block.takes}
    ops: list[Operation] = []
    for op in block.ops:
        found = _value(op, known, facts, limit) if isinstance(op, Call) else None
        if found is not None:
            known[op.outputs[0]] = Tensor(found)
            op = _constant(op, found)
        for inner in op.blocks:
            _fold(inner, known, facts, limit)  # type: ignore[arg-type]
        ops.append(op)
    block.ops = ops


def _constant(op: Operation, value: np.ndarray) -> Operation:
    if isinstance(op, Call) and op.name == "assign" and not op.reads():
        return op
    return Call(name="assign", args=(value,), outputs=op.outputs, scope=op.scope, taped=op.taped)  # type: ignore[attr-defined]


def _value(op: Call, known: dict[str, Tensor], facts: ProgramFacts, limit: int) -> np.ndarray | None:
    """What the call gives every time; None if that is not known, or not worth keeping."""
    if len(op.outputs) != 1 or any(name not in known for name in op.reads()):
        return None
    made = symbol_of(facts.likes, op.outputs[0])
    after = facts.like(op.outputs[0])
    if not isinstance(made, Symbol) or after is None or not after.stop_gradient or not _is_worth(made, limit):
        return None
    if not facts.is_pure(op):
        return None
    args, kwargs = values.resolve((op.args, op.kwargs), known.__getitem__)
    with autocast(op.policy):
        result = call(op.name, args, kwargs)
    found = values.tensors(result)
    return np.asarray(found[0]._array) if len(found) == 1 else None


def _is_worth(made: Symbol, limit: int) -> bool:
    return not made.follows_sizes and not made.weak_type and 0 <= made.size <= limit
