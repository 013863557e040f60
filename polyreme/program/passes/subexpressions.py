"""common_subexpression: what was computed already is not computed again."""

from __future__ import annotations

from typing import Any

from polyreme.fusion.values import frozen
from polyreme.program.block import Block
from polyreme.program.operation import Call, Operation
from polyreme.program.passes.facts import ProgramFacts, kept_names, rename, renamed, settle
from polyreme.program.program import Program


def common_subexpression(program: Program, keep: Any = ()) -> Program:
    """program in which of several equal calls the first serves all: the same op, inputs, attributes, autocast and tape.

    Left apart: what takes random numbers or writes; reads of a persistable value with a write between; results that
    are kept, that gradients are taken of or to, or of which one stops gradients and the other does not.
    """
    made = program.clone()
    facts = ProgramFacts(made, kept_names(program, keep))
    _merge(made.global_block(), {}, {}, facts)
    return settle(made)


def _merge(block: Block, known: dict[Any, Call], names: dict[str, str], facts: ProgramFacts) -> None:
    """Merge what block computes; known: calls made before it, names: what is read instead of what."""
    writes: dict[str, int] = {}
    ops: list[Operation] = []
    for op in block.ops:
        op = renamed(op, names)
        for name in op.writes():
            writes[name] = writes.get(name, 0) + 1
        key = _key(op, block, writes, facts)
        first = None if key is None else known.setdefault(key, op)  # type: ignore[arg-type]
        if isinstance(op, Call) and first is not None and first is not op and _alike(first, op, facts):
            names.update(zip(op.outputs, first.outputs, strict=True))
            continue
        ops.append(op)
        for inner in op.blocks:
            _merge(inner, dict(known), dict(names), facts)  # type: ignore[arg-type]
    block.ops = ops
    rename(block, names)


def _alike(first: Call, op: Call, facts: ProgramFacts) -> bool:
    both = [(facts.like(a), facts.like(b)) for a, b in zip(first.outputs, op.outputs, strict=True)]
    same = all(a is not None and b is not None and a.stop_gradient == b.stop_gradient for a, b in both)
    return same and facts.pinned.isdisjoint([*first.outputs, *op.outputs])


def _key(op: Operation, block: Block, writes: dict[str, int], facts: ProgramFacts) -> Any:
    """What two calls have in common if one of them is enough; None for what is not merged."""
    if not isinstance(op, Call) or not op.outputs:
        return None
    reads = set(op.reads()) & facts.written
    # a value that is written is another one after each write, and in each block
    moving = (block.idx, tuple((name, writes.get(name, 0)) for name in sorted(reads))) if reads else None
    try:
        key = (op.name, frozen(op.args), frozen(op.kwargs), op.policy, op.taped, moving)
        hash(key)
    except TypeError:
        return None
    return key if facts.is_pure(op) else None
