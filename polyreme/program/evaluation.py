"""What a Program's operations are in evaluation: without backward and updates, dropout and statistics switched off."""

from __future__ import annotations

from polyreme.program.operation import Call, Operation
from polyreme.program.training import Backward, Optimize


def as_in_evaluation(ops: list[Operation]) -> list[Operation]:
    """ops without backward, updates and what follows from them."""
    gone: set[str] = set()
    left = []
    for op in ops:
        if isinstance(op, (Backward, Optimize)) or not gone.isdisjoint(op.reads()):
            gone |= {*op.outputs, *op.writes()}
        else:
            left.append(op)
    for_rates = _behind_rates(left, {op.rate for op in ops if isinstance(op, Optimize) and op.rate is not None})
    return [_evaluate(op) for op in left if id(op) not in for_rates]


def _behind_rates(ops: list[Operation], wanted: set[str]) -> set[int]:
    """ids of the operations that only serve to compute learning rates: their counters stand still in evaluation."""
    result, used = set[int](), set[str]()
    for op in reversed(ops):
        gives = {*op.outputs, *op.writes()}
        if gives and gives <= wanted - used:
            result.add(id(op))
            wanted |= set(op.reads())
        else:
            used |= set(op.reads())
    return result


def _evaluate(op: Operation) -> Operation:
    if not isinstance(op, Call):
        return op
    call = op.with_argument("training", False)
    return call if call is op else _without_changes(call)


def _without_changes(call: Call) -> Call:
    call.changes = []
    return call
