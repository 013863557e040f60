"""What a Program's operations are in evaluation: without backward and updates, dropout and statistics switched off."""

from __future__ import annotations

from polyreme.program.operation import Call, Operation
from polyreme.program.training import Backward, Optimize


def as_in_evaluation(ops: list[Operation]) -> list[Operation]:
    """ops without backward, updates and what follows from them, and what is of training alone.

    What is computed of updated parameters stays, as a decoder recorded after minimize(): it reads them as they are.
    What such operations keep, as averages of parameters do, belongs to training.
    """
    gone, updated, left = set[str](), set[str](), []
    for op in ops:
        reads = set(op.reads())
        if isinstance(op, Optimize):
            updated |= set(op.writes())
        elif isinstance(op, Backward) or op.of_training or gone & reads or (updated & reads and _evaluate(op).writes()):
            gone |= {*op.outputs, *op.writes()}
        else:
            left.append(op)
            updated |= set(op.outputs) if updated & reads else set()
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
