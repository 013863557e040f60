"""Taking away what nothing needs: dead_code keeps every effect of a Program, prune only what given results need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from polyreme.program.block import Block, Variable
from polyreme.program.branches import Cond, Recompute
from polyreme.program.operation import Operation
from polyreme.program.passes.facts import ProgramFacts, kept_names, settle
from polyreme.program.program import Program
from polyreme.program.training import Backward
from polyreme.program.values import refs


def dead_code(program: Program, keep: Any = ()) -> Program:
    """program without the operations that nothing needs: no kept value, no write of a persistable one.

    keep: Variables and names that are fetched later. What takes random numbers stays, so that the numbers of the
    others stay what they were. Results of branches and gradients that nothing reads go too, and unused blocks.
    """
    made = program.clone()
    facts = ProgramFacts(made, kept_names(program, keep))
    _clear(made.global_block(), facts.kept_names, facts)
    return settle(made)


def prune(program: Program, keep: Any = (), feed: Any = ()) -> Program:
    """program with only what the kept values need, and the parameters and inputs that takes.

    feed: values that are fed, whatever computed them before. Writes stay where what is kept reads them afterwards;
    random numbers that nothing needs are not taken, so those of the others may differ from the whole Program's.
    """
    pruned = program.clone()
    fed = kept_names(program, feed)
    facts = ProgramFacts(pruned, kept_names(program, keep))
    block = pruned.global_block()
    for var in block.vars.values():
        if isinstance(var, Variable) and var._array.name in fed:
            var.is_data = True
    needed, left_ops = facts.kept_names - fed, []
    for op in reversed(block.ops):
        if needed.isdisjoint(op.outputs) and needed.isdisjoint(op.writes()):
            continue
        left = _without_unneeded(op, needed, facts) if facts.is_removable(op) else op
        left_ops.append(left)
        needed |= set(left.reads()) - fed
    block.ops = left_ops[::-1]
    needed |= facts.kept_names | fed | {name for op in block.ops for name in op.writes()}
    pruned.captured = {name: held for name, held in pruned.captured.items() if name in needed}
    block.vars = {n: v for n, v in block.vars.items() if n in needed or v._array.name in needed or _compute(v)}
    return settle(pruned)


def _compute(var: Any) -> bool:
    return isinstance(var, Variable) and not var.persistable and not var.is_data


def _clear(block: Block, wanted: Iterable[str], facts: ProgramFacts) -> None:
    """Take from block what is needed neither for wanted nor for an effect."""
    needed, ops = {*wanted, *refs(block.gives)}, []
    for op in reversed(block.ops):
        if facts.is_removable(op):
            if needed.isdisjoint(op.outputs):
                continue
            op = _without_unneeded(op, needed, facts)
        for inner in op.blocks:
            _clear(inner, (), facts)  # type: ignore[arg-type]
        ops.append(op)
        needed.update(op.reads())
    block.ops = ops[::-1]


def _without_unneeded(op: Operation, needed: set[str], facts: ProgramFacts) -> Operation:
    """op without the results that nothing needs, where it can be had without them."""
    keep = [i for i, name in enumerate(op.outputs) if name in needed]
    if len(keep) == len(op.outputs):
        return op
    outputs = [op.outputs[i] for i in keep]
    if isinstance(op, Backward):
        return replace(op, outputs=outputs, inputs=[op.inputs[i] for i in keep])
    if isinstance(op, (Cond, Recompute)):
        for block in op.blocks:
            block.gives = [block.gives[i] for i in keep]
        return replace(op, outputs=outputs)
    return op
