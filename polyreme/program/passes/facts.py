"""What passes ask of a Program: who reads and writes what, what an operation may do besides giving its results.

Values are assigned once; persistable ones (parameters, statistics, held Tensors) are not: whoever writes one
between two reads keeps these apart.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from polyreme.core import rng
from polyreme.core.op import KEY
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ProgramError
from polyreme.program import infer, values
from polyreme.program.block import Block, Variable
from polyreme.program.branches import Cond, Recompute, While
from polyreme.program.executor import fetched
from polyreme.program.operation import Assign, Call, Operation, autocast, function_of
from polyreme.program.program import Program
from polyreme.program.training import Backward, Optimize
from polyreme.program.values import Ref, SizeOf, refs

KNOWN = (Call, Assign, Cond, While, Recompute, Backward, Optimize)
"""Kinds of operations that passes see through; any other kind stays as and where it is, with what it reads."""

ON_HOST = ("printed", "called")
"""Calls that do something outside the Program when they run: static.Print and static.py_func."""


def kept_names(program: Program, keep: Any) -> set[str]:
    """Names of the values that must stay: Variables and names, as a fetch_list has them.

    Raises ProgramError for what the Program does not have.
    """
    return set(fetched(program, keep if isinstance(keep, (str, Tensor)) else list(keep or ())))


def direct(op: Operation) -> list[str]:
    """Names it reads itself, not through its blocks."""
    if isinstance(op, Cond):
        return refs(op.pred)
    if isinstance(op, While):
        return refs(op.init)
    if isinstance(op, Recompute):
        return list(op.inputs)
    return op.reads()


class ProgramFacts:
    """What holds of a Program as it is.

    readers: how often each name is read, results of blocks included. written: persistable values that something writes.
    pinned: names that must keep meaning what they mean, for gradients are taken of or to them, blocks take them anew,
    an operation of an unknown kind reads them, or the caller keeps them.
    """

    kept_names: set[str]
    pinned: set[str]
    likes: dict[str, Tensor]

    def __init__(self, program: Program, keep: Iterable[str] = ()) -> None:
        self.program = program
        self.kept_names = set(keep)
        self.readers: Counter[str] = Counter()
        self.written: set[str] = set()
        self.pinned = set(self.kept_names)
        for block in program.blocks:
            self.readers.update(refs(block.gives))
            self.pinned.update(block.takes)
            for op in block.ops:
                self.readers.update(direct(op))
                self.written.update(op.writes())
                if isinstance(op, Backward) or not isinstance(op, KNOWN):
                    self.pinned.update(op.reads())
        self.likes = likes(program)
        self._drawing: dict[int, tuple[Operation, bool]] = {}  # with the operation, so that its id stays its own

    def like(self, name: str) -> Tensor | None:
        """The Variable, parameter or held Tensor that a name stands for; None if the Program does not say."""
        return self.likes.get(name)

    def draws(self, op: Operation) -> bool:
        """Whether it takes random numbers: then it keeps its place among those that do."""
        if isinstance(op, Call):
            if id(op) not in self._drawing:
                self._drawing[id(op)] = op, _call_draws(op, self.likes)
            return self._drawing[id(op)][1]
        return any(self.draws(inner) for block in op.blocks for inner in block.ops)  # type: ignore[attr-defined]

    def is_pure(self, op: Operation) -> bool:
        """Whether its results follow from what it reads and nothing else comes of it."""
        return isinstance(op, Call) and op.name not in ON_HOST and not op.changes and not self.draws(op)

    def is_removable(self, op: Operation) -> bool:
        """Whether nothing is missed when nobody needs its results."""
        if isinstance(op, (Cond, While, Recompute)):
            return all(self.is_removable(inner) for block in op.blocks for inner in block.ops)
        return isinstance(op, Backward) or self.is_pure(op)

    def cuts(self, op: Operation) -> bool:
        """Whether a gradient that reaches its results goes no further though its inputs want it."""
        outs = [self.like(name) for name in op.outputs]
        ins = [self.like(name) for name in op.reads()]
        return any(v is None or v.stop_gradient for v in outs) and any(v is None or not v.stop_gradient for v in ins)


def likes(program: Program) -> dict[str, Tensor]:
    """Name of a value -> a Tensor like it. A Variable that was changed in place stands for its last value first."""
    result: dict[str, Tensor] = {**program.captured}
    for block in program.blocks:
        for var in block.vars.values():
            if isinstance(var._array, Symbol):
                result[var._array.name] = var
    for block in program.blocks:
        for name, var in block.vars.items():
            result.setdefault(name, var)
    return result


def symbol_of(likes: Mapping[str, Tensor], name: str) -> Any:
    """The Symbol, or the array of a held Tensor, that a name stands for; None if the Program does not say exactly."""
    found = likes.get(name)
    if found is None or (isinstance(found._array, Symbol) and found._array.name != name):
        return None
    return found._array


def inputs_of(call: Call, likes: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """What the call reads, by name, for inference; None if the Program does not say exactly what one is like."""
    names = call.reads()
    if any(symbol_of(likes, name) is None for name in names):
        return None
    return {name: likes[name] for name in names}


def results_of(call: Call, given: Mapping[str, Tensor]) -> tuple[list[Any], list[str]]:
    """What a call gives, for each probe size, under the autocast policy it carries, and what it would write."""
    with autocast(call.policy):
        return infer.call_results(replace(call, changes=[], outputs=[]), given)  # type: ignore[arg-type]


def _call_draws(call: Call, likes: Mapping[str, Tensor]) -> bool:
    declared = getattr(function_of(call.name), "op", None)
    if declared is not None:
        arguments = call.by_parameter() or {}
        keys = [arguments.get(name) for name, kind in zip(declared.names, declared.kinds, strict=True) if kind is KEY]
        return any(key is None or key is inspect.Parameter.empty for key in keys)
    known = getattr(function_of(call.name), "draws", None)
    if known is not None:
        return known
    arguments = inputs_of(call, likes)
    if arguments is None:
        return True
    before = rng.default_generator.drawn
    try:
        results_of(call, arguments)
    except CaptureError:  # what it does follows from values that it meets when the Program runs
        return True
    return rng.default_generator.drawn != before


# ---- changing ----


def renamed(op: Operation, names: Mapping[str, str]) -> Operation:
    """op, reading other values under the names in names; itself if it reads none of them."""
    if not names or names.keys().isdisjoint(direct(op)):
        return op

    def put(value: Any) -> Any:
        value = values.replace(value, Ref, lambda ref: Ref(names.get(ref.name, ref.name)))
        return values.replace(value, SizeOf, lambda size: SizeOf(names.get(size.name, size.name), size.dim))

    def names_in(listed: Iterable[str]) -> list[str]:
        return [names.get(name, name) for name in listed]

    if isinstance(op, Call):
        return replace(op, args=put(op.args), kwargs=put(op.kwargs))
    if isinstance(op, Assign):
        return replace(op, source=put(op.source))
    if isinstance(op, Cond):
        return replace(op, pred=put(op.pred))
    if isinstance(op, While):
        return replace(op, init=put(op.init))
    if isinstance(op, Recompute):
        return replace(op, inputs=names_in(op.inputs))
    if isinstance(op, Optimize):
        pairs = [(p, names.get(g, g)) for p, g in op.pairs]
        return replace(op, pairs=pairs, rate=None if op.rate is None else names.get(op.rate, op.rate))
    raise ProgramError(f"a pass renamed {sorted(names)}, which {op.kind} reads; its values are pinned")


def rename(block: Block, names: Mapping[str, str]) -> None:
    """Let the operations and results of a block of a Program being made read other values."""
    if names:
        block.ops = [renamed(op, names) for op in block.ops]
        give_instead(block, names)


def give_instead(block: Block, names: Mapping[str, str]) -> None:
    """Let a block of a Program being made give other values."""

    def put(ref: Ref) -> Ref:
        return Ref(names.get(ref.name, ref.name))

    block.gives = [values.replace(v, Ref, put) for v in block.gives]


def settle(program: Program) -> Program:
    """Take away blocks that nothing runs and Variables that nothing defines, from a Program being made."""
    reached = [program.global_block()]
    for block in reached:
        reached += [inner for op in block.ops for inner in op.blocks if inner not in reached]  # type: ignore[misc]
    program.blocks = [block for block in program.blocks if block in reached]
    for index, block in enumerate(program.blocks):
        block.idx = index
        made = {name for op in block.ops for name in op.outputs} | set(block.takes)
        block.vars = {n: v for n, v in block.vars.items() if _stays(v, n, made)}
    program.changed()
    return program


def _stays(var: Tensor, name: str, made: set[str]) -> bool:
    if not isinstance(var, Variable) or var.persistable or var.is_data:
        return True
    return name in made or var._array.name in made
