"""How the division into sequences travels through a Program, and comes in and out with LoDTensors.

A Variable's `lod` holds a Variable of offsets for each level. A sequence layer sets it; every other
operation passes on that of its first input that has one to results with as many rows. The length of the longest
sequence, which padded forms need as a size, is fed beside the offsets, as the size of an array: `<offsets>@MAX`; and
one that is at least as large, `<offsets>@ROOM`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.core.symbol import DYNAMIC, PROBES, DynamicSize
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError, ShapeError
from polyreme.ops import OPS
from polyreme.program import infer, values
from polyreme.program.block import Block, Variable
from polyreme.program.control import alias
from polyreme.program.current import defaults, inside
from polyreme.program.infer import InferredTensor
from polyreme.program.operation import Call, Operation, depends, function_of
from polyreme.program.padded_rows import steps_for
from polyreme.program.program import Program
from polyreme.program.values import Ref, SizeOf
from polyreme.sequences.lod_tensor import LoDTensor, create_lod_tensor

Lod = tuple[Variable, ...]


class _SequenceNotes:
    """What sequence layers remember of a Program while it is recorded.

    version: up to which every result has its lod; any: whether there is one that is not (). By name of a Variable:
    lengths, those of offsets; chosen, of offsets of some of a level's sequences, that level; padded, of lengths that
    sequence_pad gave, the sequences and the rectangle. rebound: by block, Variables divided anew in it.
    """

    def __init__(self) -> None:
        self.version, self.any = -1, False
        self.lengths: dict[str, Variable] = {}
        self.chosen: dict[str, Variable] = {}
        self.padded: dict[str, tuple[Variable, Variable]] = {}
        self.rebound: dict[int, list[_Rebound]] = {}

    @staticmethod
    def of(program: Program) -> _SequenceNotes:
        """A Program's notes, kept with it; a copy of the Program begins with none."""
        found = program.__dict__.get("_sequence_notes")
        if found is None:
            found = program.__dict__["_sequence_notes"] = _SequenceNotes()
        return found


# which sequences a Variable's rows are divided into


def variable(what: str, value: Any) -> Variable:
    """value, which must be a Variable. Raises ProgramError for anything else, as outside static mode."""
    if not state.recording():
        raise ProgramError(f"{what} belongs to static mode; call enable_static() first")
    if not isinstance(value, Variable):
        raise ProgramError(f"{what} takes Variables of a Program, got {type(value).__name__}; make one with data()")
    return value


def lod_of(value: Any) -> Lod:
    """The offsets of each level of a Variable, outermost first; () for one whose rows are no sequences."""
    if not isinstance(value, Variable):
        return ()
    _settle(value.block.program)
    return value.lod


def sequences(what: str, value: Any) -> tuple[Variable, Lod]:
    """(value, its lod). Raises ProgramError if its rows are no sequences."""
    sequence = variable(what, value)
    lod = lod_of(sequence)
    if not lod:
        raise ProgramError(
            f"{what}: {sequence.name!r} of shape {list(sequence.shape)} has no sequences; give data(..., lod_level=1) "
            "what a LoDTensor is fed to, or divide it with lod_reset"
        )
    return sequence, lod


def divided(value: Any, lod: Sequence[Variable]) -> Variable:
    """value with this lod."""
    value.lod = tuple(lod)
    return value


def _is_settled(value: Tensor | None) -> bool:
    return not isinstance(value, Variable) or "lod" in value.__dict__


def _settle(program: Program) -> bool:
    """Give every result of a Program its lod, once for each version of it; returns whether any has sequences."""
    notes = _SequenceNotes.of(program)
    if notes.version == program.version:
        return notes.any
    for block in program.blocks:
        for op in block.ops:
            if isinstance(op, Call) and not all(_is_settled(block.vars.get(name)) for name in op.outputs):
                _pass_on(op, block)
    notes.version = program.version
    notes.any = any(isinstance(v, Variable) and v.lod for v in program.list_vars())
    return notes.any


def _pass_on(op: Call, block: Block) -> None:
    names = op.reads()
    inputs: dict[str, TensorState] = {name: v for name in names if (v := _input(block, name)) is not None}
    source = next((v for v in inputs.values() if isinstance(v, Variable) and v.lod and v.shape[0] == DYNAMIC), None)
    # what is in the scope alone, from another Program, has a size that is not known here
    is_known = len(inputs) == len(set(names))
    if (
        not is_known
        or op.name in _PICK_ROWS
        or getattr(function_of(op.name), "__module__", "").startswith(_SEQUENCE_OPS)
    ):
        source = None
    passing: set[int] = set()
    if source is not None and any(_many_rows(block.vars.get(name)) for name in op.outputs):
        # an unknown size may be any other one: only what follows the rows under both probes has as many
        probed = [source._array.at(probe).shape[:1] for probe in PROBES]
        every = [list(_leaves(result)) for result in infer.call_results(op, inputs)[0]]
        passing = {i for i, seen in enumerate(zip(*every, strict=True)) if [s.array.shape[:1] for s in seen] == probed}
    for i, name in enumerate(op.outputs):
        result = block.vars.get(name)
        if not _is_settled(result):
            divided(result, source.lod if source is not None and i in passing else ())


_PICK_ROWS = {"gather", "gather_nd", "index_select", "masked_select", "nonzero", "take", "index_sample"}
"""Ops whose result has as many rows as their index, or as there are choices, which may be as unknown as those of what
they pick from."""
_SEQUENCE_OPS = ("polyreme.ops.sequences.", "polyreme.ops.losses.alignment", "polyreme.sequences.")
"""The modules whose ops hand nothing on of themselves: the layer that calls one says what its result is."""


def _leaves(result: Any) -> Any:
    return infer.values.leaves(result, InferredTensor)


def _many_rows(value: Tensor | None) -> bool:
    return value is not None and value.shape[:1] == [DYNAMIC]


def _input(block: Block, name: str) -> Tensor | None:
    found = block.find_var(name)
    return block.program.captured.get(name) if found is None else found


# sizes that depend on the sequences


def rows(value: Tensor) -> Any:
    """The number of rows, as a size that ops take."""
    return value._array.shape[0]


def longest(lod: Lod) -> Any:
    """The length of the longest innermost sequence as a size, or None if it is fed by nobody."""
    return _fed_size(lod[-1], _longest_name(lod[-1]))


def room(x: Variable, lod: Lod) -> Any:
    """A size that no sequence of x, rows that the last of these levels divides, is longer than, for what more changes
    nothing of. Fed rounded up, so that few Programs are compiled; the number of rows if nobody feeds it.
    """
    level = _SequenceNotes.of(defaults.main).chosen.get(lod[-1]._array.name, lod[-1])
    size = _fed_size(level, _room_name(level))
    return rows(x) if size is None else size


def _fed_size(level: Variable, name: str) -> Any:
    if not _is_fed(level):
        return None
    block = level.block
    found = block.vars.get(name)
    if not isinstance(found, Variable):
        found = block.create_var(name, [None], "bool")
        found.is_data = True
    return rows(found)


def _longest_name(level: Variable) -> str:
    return f"{level.name}@MAX"


def _room_name(level: Variable) -> str:
    return f"{level.name}@ROOM"


def fed_beside(value: Any) -> list[Variable]:
    """What is fed with a Variable that is fed: the offsets of its levels, and where asked for the longest length and
    the room."""
    levels = [level for level in getattr(value, "lod", ()) if level.is_data]
    asked = [level.block.vars.get(name(level)) for level in levels for name in (_longest_name, _room_name)]
    return [*levels, *(v for v in asked if isinstance(v, Variable))]


def counted(counts: Any, most: Any = None) -> Any:
    """The sum of an integer Variable, as a size. A Program that uses it is not compiled but run op by op.

    most: a size that the sum is not above. With it the Program is compiled, and the size is that in place of the sum.
    """
    size = SizeOf(most.symbol.name, most.dim) if isinstance(most, DynamicSize) else most
    return rows(uninferred("sequence_room", (counts, size), [((DYNAMIC,), np.bool_, 0)])[0])


def _is_fed(level: Variable) -> bool:
    """Whether these offsets are those that were fed, and nothing gave them another value since."""
    return level.is_data and level._array.name == level.name


def _record(name: str, x: Variable, dtype: Any) -> Variable:
    """The call of an op that gives one unknown size of its own, which cannot be inferred."""
    return uninferred(name, (x,), [((DYNAMIC,), dtype, 0)])[0]


def uninferred(name: str, args: tuple[Any, ...], results: Sequence[tuple[Sequence[int], Any, int]]) -> list[Variable]:
    """The call of an op whose results cannot be inferred: each of this shape, in which sizes that are not known are all
    one size and so many more, and of this dtype."""
    recorder = state.require_recorder(name)
    named = values.replace(args, TensorState, lambda tensor: Ref(recorder.name_of(tensor)))
    seen = [
        [
            InferredTensor(
                jax.ShapeDtypeStruct(tuple(probe + more if s == DYNAMIC else s for s in shape), np.dtype(dtype)),
                not dtypes.is_floating(np.dtype(dtype)),
            )
            for shape, dtype, more in results
        ]
        for probe in PROBES
    ]
    return [divided(v, ()) for v in recorder.defined(Call(name=name, args=named), seen, name)]


def lengths(level: Variable) -> Variable:
    """The length of each sequence of a level, [n], which is what ops take."""
    known = _SequenceNotes.of(defaults.main).lengths
    key = level._array.name
    result = known.get(key)
    # one of a branch is not known outside of it; in a loop, offsets from outside may be others at the next step
    if result is None or result.block is not defaults.block:
        # offsets that are fed are one more than a batch, whose size stands for the number of sequences
        fed = level.is_data or key != level.name
        result = _record("diff", level, np.int64) if fed else OPS["diff"](level)
        known[key] = divided(result, ())
    return result


def rebind(what: str, target: Variable, source: Any) -> None:
    """Give target the sequences of source, whose value it was given. In a loop or branch, after which it may have
    either, one without sequences goes on without; ProgramError is raised for another number of levels.
    """
    have, new = lod_of(target), lod_of(source)
    if [level._array.name for level in have] == [level._array.name for level in new]:
        return
    if target.block is defaults.block:
        divided(target, new)
        return
    if not have:
        return
    if len(have) != len(new):
        raise ProgramError(
            f"{what}: {target.name!r} has {len(have)} levels of sequences outside of this block, and is given "
            f"{len(new)}; divide it as it was with lod_reset"
        )
    own = [alias(level) for level in _own_levels(what, target, have, new)]
    divided(target, own)
    for level, other in zip(own, new, strict=True):
        state.write(level, other._array)


@dataclass(frozen=True)
class _Rebound:
    """A Variable that a loop divides anew under the names of levels that it shares: partners have to be, likewise."""

    target: Variable
    new: tuple[str, ...]
    partners: tuple[Variable, ...]


def _own_levels(what: str, target: Variable, have: Lod, new: Lod) -> Lod:
    """The levels that the recorded block knows target's sequences by.

    What a loop gives a new value stands, from its second step on, for that value wherever its body reads the name. So
    target gets copies of the levels that it shares, made in front of the loop, and the body's operations on it alone
    read those. Where an operation is on target and on others together the names stay, for check_rebound to look at.
    """
    block, recorder = defaults.block, state.require_recorder(what)
    names = {level._array.name for level in have}
    lengths_of = {
        output for op in block.ops if isinstance(op, Call) and op.name == "diff" and names & set(op.reads())
        for output in op.outputs
    }  # fmt: skip
    on_levels = [set(op.reads()) for op in block.ops if (names | lengths_of) & set(op.reads())]
    mine = depends(block.ops, {recorder.in_front(target).name})
    partners = []
    for v in defaults.main.list_vars():
        if isinstance(v, Variable) and v.lod and v is not target and v.block is not block:
            theirs = depends(block.ops, {recorder.in_front(v).name})
            if any(read & mine and read & theirs for read in on_levels):
                partners.append(v)
    notes = _SequenceNotes.of(block.program).rebound
    if partners:
        notes.setdefault(block.idx, []).append(
            _Rebound(target, tuple(level._array.name for level in new), tuple(partners))
        )
        return have
    with inside(target.block):
        own = tuple(divided(OPS["assign"](level), ()) for level in have)
    _rename(block, {a._array.name: b.name for a, b in zip(have, own, strict=True)}, mine)
    return own


def _rename(block: Block, renamed: dict[str, str], mine: set[str]) -> None:
    """Have a block's operations on these values read levels, and the lengths that follow from them, by other names."""
    ops: list[Operation] = []
    for op in block.ops:
        ops.append(op)
        if not isinstance(op, Call) or renamed.keys().isdisjoint(op.reads()):
            continue
        args, kwargs = values.replace((op.args, op.kwargs), Ref, lambda r: Ref(renamed.get(r.name, r.name)))
        if op.name == "diff":
            copy = replace(op, args=args, kwargs=kwargs, outputs=[])
            for output in op.outputs:
                like = block.vars[output]._array
                made = block.create_var(None, like.shape, like.dtype, probed=like.sizes)
                made._node = copy
                copy.outputs.append(divided(made, ()).name)
                renamed[output] = made.name
            ops.append(copy)
        elif not mine.isdisjoint(op.reads()):
            ops[-1] = replace(op, args=args, kwargs=kwargs)
    block.ops[:] = ops
    block.program.changed()


def check_rebound(what: str, block: Block) -> None:
    """Raise ProgramError if a loop's body divides a Variable anew that it uses together with others of the same
    sequences, and does not give those the same new ones.
    """
    every = _SequenceNotes.of(block.program).rebound.pop(block.idx, [])
    new = {id(entry.target): entry.new for entry in every}
    for entry in every:
        for left in entry.partners:
            levels = new.get(id(left), ())
            if len(levels) == len(entry.new) and all(map(_Recipes(block).are_same, levels, entry.new)):
                continue
            raise ProgramError(
                f"{what}: {entry.target.name!r} is divided anew in a loop that uses it together with {left.name!r}, "
                "which shares its sequences and keeps them; give both the same, or divide one by offsets of its own "
                "(lod_reset) in front of the loop"
            )


_ROWS_FIRST = {"sequence_expand", "sequence_concat"}
"""Ops whose first argument is rows, on which the lengths that they give do not depend."""


class _Recipes:
    """How values of a block are computed."""

    def __init__(self, block: Block) -> None:
        self._makers = {name: (op, i) for op in block.ops for i, name in enumerate(op.outputs)}

    def are_same(self, one: str, other: str) -> bool:
        """Whether two values are computed in the same way of the same values."""
        if one == other:
            return True
        (a, i), (b, j) = (self._makers.get(name, (None, 0)) for name in (one, other))
        if not isinstance(a, Call) or not isinstance(b, Call) or (a.name, i) != (b.name, j):
            return False
        skipped = 1 if a.name in _ROWS_FIRST and i else 0
        return self._are_alike((a.args[skipped:], a.kwargs), (b.args[skipped:], b.kwargs))

    def _are_alike(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, Ref):
            return self.are_same(one.name, other.name)
        if isinstance(one, SizeOf):
            return one.dim == other.dim and self.are_same(one.name, other.name)
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(self._are_alike, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(self._are_alike(one[k], other[k]) for k in one)
        return bool(np.array_equal(one, other))


def inner(lod: Lod) -> Variable:
    """The lengths of the innermost sequences."""
    return lengths(lod[-1])


def offsets(of: Tensor, chosen_from: Variable | None = None) -> Variable:
    """A level of sequences of these lengths, which are some of another level's if that is named."""
    made, notes = divided(OPS["sequence_offsets"](of), ()), _SequenceNotes.of(defaults.main)
    notes.lengths[made.name] = of
    if chosen_from is not None:
        notes.chosen[made.name] = notes.chosen.get(chosen_from._array.name, chosen_from)
    return made


def remember_padded(length: Variable, x: Variable, rectangle: Variable) -> None:
    """Note what sequence_pad made, for what undoes it."""
    _SequenceNotes.of(defaults.main).padded[length.name] = x, rectangle


def padded_from(length: Variable) -> tuple[Variable, Variable] | None:
    """(sequences, rectangle) if sequence_pad gave these lengths."""
    return _SequenceNotes.of(defaults.main).padded.get(length.name)


def offsets_given(what: str, given: Any) -> Variable:
    """Offsets that a user wrote down, as a Variable."""
    array = np.asarray(given)
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2 or array[0] != 0 or np.any(np.diff(array) < 0):
        raise ShapeError(f"{what}: target_lod={given!r}; needs offsets that rise from 0 to the number of rows")
    return divided(OPS["assign"](Tensor(array.astype(np.int64))), ())


# running


def with_longest(program: Program, feed: Mapping[str, Any]) -> dict[str, Any]:
    """A feed with the length of the longest sequence, and the room for it, of each LoDTensor whose Program asks."""
    full = dict(feed)
    block = program.global_block()
    for name, value in feed.items():
        target = block.vars.get(name)
        if not isinstance(target, Variable) or not target.lod or not isinstance(value, LoDTensor):
            continue
        if not value.lod():
            continue
        for level, counts in zip(target.lod, value.recursive_sequence_lengths(), strict=False):
            length = max(counts, default=0)
            for asked, size in ((_longest_name, length), (_room_name, steps_for(length))):
                if asked(level) in block.vars:
                    full[asked(level)] = np.zeros(size, bool)
    return full


def run(
    executor: Any, program: Program | None, feed: Any, fetch_list: Any, scope: Any = None, return_numpy: bool = True
) -> list[Any]:
    """Executor.run with LoDTensors in and, with return_numpy=False, out.

    Raises ProgramError for return_numpy with a fetched Variable that has sequences, as an ndarray has none.
    """
    program = defaults.main if program is None else program
    if return_numpy and not _settle(program):
        return executor.run(program, feed, fetch_list, scope=scope)
    full = with_longest(program, feed) if isinstance(feed, Mapping) else feed
    wanted = [fetch_list] if isinstance(fetch_list, (str, Tensor)) else list(fetch_list or ())
    lods = [lod_of(program.global_block().find_var(v) if isinstance(v, str) else v) for v in wanted]
    if return_numpy:
        cut = [w if isinstance(w, str) else w.name for w, lod in zip(wanted, lods, strict=True) if lod]
        if cut:
            raise ProgramError(f"fetch_list: {cut} have sequences, which ndarrays have not; use return_numpy=False")
        return executor.run(program, full, wanted, scope=scope)
    levels = list({level._array.name: None for lod in lods for level in lod})
    found = executor.run(program, full, [*wanted, *levels], scope=scope)
    known = dict(zip(levels, found[len(wanted) :], strict=True))
    return [_with_lod(a, [known[v._array.name] for v in lod]) for a, lod in zip(found, lods, strict=False)]


def _with_lod(array: np.ndarray, lod: list[np.ndarray]) -> LoDTensor:
    if not lod:
        made = LoDTensor()
        made.set(array, "cpu")
        return made
    # what lies behind the last sequence is none of it
    return create_lod_tensor(array[: int(lod[-1][-1])], [np.diff(level).tolist() for level in lod], "cpu")
