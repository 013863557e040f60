"""recompute: what lies between checkpoints is not kept for backward, but computed again there.

Source: arXiv:1604.06174. The operations up to each checkpoint become a block of a Recompute operation, of
which backward keeps what goes in; what comes after the last checkpoint stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from polyreme.core.symbol import Symbol
from polyreme.errors import ConfigError
from polyreme.program.block import Block, copy_var
from polyreme.program.branches import Cond, Recompute, While
from polyreme.program.executor import fetched
from polyreme.program.operation import Assign, Call, Operation
from polyreme.program.passes.facts import ON_HOST, kept_names, likes, settle
from polyreme.program.program import Program
from polyreme.program.training import Backward
from polyreme.program.values import Ref


def _runs_again(op: Operation) -> bool:
    """Whether it may run twice. Anything else stays where it is and divides what is around it."""
    if isinstance(op, Call):
        return op.name not in ON_HOST
    inner = (each for block in op.blocks for each in block.ops)
    return isinstance(op, (Assign, Cond, While, Recompute)) and all(map(_runs_again, inner))


def recompute(program: Program, keep: Any = (), checkpoints: Any = ()) -> Program:
    """program in which backward keeps the checkpoints, and computes again what lies before and between them.

    checkpoints: Variables or names, in any order. keep: values inside that are fetched later; others no longer can be.
    Loss and gradients are those of program, random numbers included. Raises ConfigError without checkpoints, and for
    one that is not computed before backward.
    """
    made = program.clone()
    block = made.global_block()
    kept = kept_names(program, keep)
    wrap(block, checkpoint_names(program, checkpoints), kept)
    return settle(made)


def checkpoint_names(program: Program, checkpoints: Any) -> list[str]:
    """Names of the values that checkpoints are."""
    names = fetched(program, checkpoints)
    if not names:
        raise ConfigError("recompute: checkpoints is empty; name the Variables that backward is to keep")
    return names


def wrap(block: Block, checkpoints: Sequence[str], keep: Collection[str] | None) -> None:
    """Make Recompute operations of what block computes up to each checkpoint.

    kept: names that are needed later besides what operations read; None for all.
    """
    end = next((i for i, op in enumerate(block.ops) if isinstance(op, Backward)), len(block.ops))
    maker_of = {name: i for i, op in enumerate(block.ops[:end]) for name in op.outputs}
    lost = [name for name in checkpoints if name not in maker_of]
    if lost:
        raise ConfigError(
            f"recompute: checkpoints {lost} are not computed before backward; choose among {list(maker_of)[:20]}"
        )
    done: list[Operation] = []
    start = 0
    for place in sorted({maker_of[name] for name in checkpoints}):
        for run in _runs(block.ops[start : place + 1]):
            start += len(run)
            needed = None if keep is None else {*keep, *_reads(block.ops[start:])}
            done += _as_one(block, run, needed) if _runs_again(run[0]) and len(run) > 1 else run
    block.ops = done + block.ops[start:]


def _reads(ops: Sequence[Operation]) -> set[str]:
    return {name for op in ops for name in op.reads()}


def _runs(ops: Sequence[Operation]) -> list[list[Operation]]:
    """ops cut into longest runs of those that may be run again and those that may not."""
    runs: list[list[Operation]] = []
    for op in ops:
        if runs and _runs_again(runs[-1][0]) == _runs_again(op):
            runs[-1].append(op)
        else:
            runs.append([op])
    return runs


def _as_one(outer: Block, ops: list[Operation], needed: set[str] | None) -> list[Operation]:
    """ops as one Recompute operation, and after it those again whose values follow from shapes: these are computed
    while compiling, which what comes out of a block is not.
    """
    known = likes(outer.program)
    again: list[Operation] = []
    computed = {name for op in ops for name in op.outputs}
    wanted = computed if needed is None else computed & needed
    for op in reversed(ops):
        if not wanted.isdisjoint(op.outputs) and all(_of_shapes(known.get(name)) for name in op.outputs):
            again.append(op)
            wanted = (wanted - set(op.outputs)) | (computed & set(op.reads()))
    block = outer.program.add_block(outer)
    block.ops = list(ops)
    block.vars = {n: copy_var(outer.vars[n], block) for n in computed if n in outer.vars}
    for op in ops:
        for inner in op.blocks:
            inner.parent = block  # type: ignore[attr-defined]
    outputs = [name for op in ops for name in op.outputs if name in wanted]
    block.gives = [Ref(name) for name in outputs]
    return [Recompute(inputs=[], block=block, outputs=outputs, scope=ops[0].scope), *reversed(again)]


def _of_shapes(like: Any) -> bool:
    return like is not None and isinstance(like._array, Symbol) and like._array.known is not None
