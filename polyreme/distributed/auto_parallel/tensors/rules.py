"""What a placement rule says of an op, and how placements follow from it: SPMD propagation over one mesh.

A rule names the dims of an op's inputs and results by letters, as einsum does. A letter that a mesh dim
splits in an input is split in the results that have it; where no result has it, the results are Partial along that mesh
dim, if the rule says how its pieces join. rules_table.py holds the rules; values never depend on them, only layouts do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from polyreme.core import dtype as dtypes
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.placements import Partial, Placement, ReduceType, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh

Letters = tuple[str | None, ...]
"""The letter of each dim of a tensor; None for a dim that every device needs whole."""

Passes = Literal["no", "linear", "each", "moved"]
"""Which Partial inputs stay so: none; sums and averages, if every input is one alike ("linear": add) or exactly one is
("each": multiply); any kind, as elements are only moved ("moved": reshape)."""

LINEAR = frozenset({ReduceType.kRedSum, ReduceType.kRedAvg})


@dataclass(frozen=True)
class Dims:
    """Letters of inputs and results.

    reduce: how pieces of a letter that no result has join; None if results are joined at once. padding: what rows added
    to make uneven pieces even hold, so that they change no result; None if there is no such value. passes: which
    Partial inputs stay so; of: the inputs that "each" allows. aligned: letters split only where pieces are even.
    pieces: the op's function computes a piece of its results from the same pieces of its inputs, so that the gradient
    of an input without the letter is a sum of addends. kind: "mean" scales uneven pieces, "rows" looks up rows, "held"
    has inputs laid out by their letters before the op runs: XLA's partitioner aborts on some layouts of a convolution;
    "indexed" the same, where pieces are uneven.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    reduce: ReduceType | None = None
    padding: str | None = "zero"
    passes: Passes = "no"
    of: tuple[int, ...] | None = None
    aligned: frozenset[str] = frozenset()
    pieces: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Call:
    """An op call as rules see it: shape, dtype and parameter name of each array it takes, its other parameters, and
    shape and dtype of each result."""

    name: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    attrs: dict[str, Any]
    outs: tuple[tuple[int, ...], ...]
    out_dtypes: tuple[Any, ...]
    drawn: bool = False

    def shape(self, param: str) -> tuple[int, ...] | None:
        """Shape of the first array given for a parameter; None if it was left out."""
        return next((s for p, s in zip(self.params, self.shapes, strict=True) if p == param), None)

    def each(self, **letters: Letters) -> tuple[Letters, ...]:
        """The letters of every input: those given by parameter, none for the rest."""
        return tuple(
            letters.get(p, (None,) * len(s)) for p, s in zip(self.params, self.shapes, strict=True)
        )  # fmt: skip

    def dim(self, axis: int, param: str | None = None) -> int:
        """A dim counted from 0, of the first input by default."""
        ndim = len(self.shapes[0] if param is None else self.shape(param) or ())
        return axis % ndim if ndim else 0


@dataclass
class Flow:
    """What follows for one call: letter -> the mesh dims that split it; mesh dims along which inputs stay Partial, and
    those along which letters without a result make one; the Form of each result, None if none is known."""

    mesh: ProcessMesh
    split: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[int, ReduceType] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    outs: list[Form] = field(default_factory=list)

    def ways(self, letter: str) -> int:
        """Pieces of a letter."""
        return math.prod(self.mesh.get_dim_size(a) for a in self.split.get(letter, ()))

    @property
    def lead(self) -> list[int]:
        """Mesh dims along which results are Partial."""
        return sorted([*self.kept, *(a for axes in self.made.values() for a in axes)])


def flow(dims: Dims, forms: Sequence[Form | None], call: Call, mesh: ProcessMesh) -> Flow:
    """How the results of a call lie. forms: of each input, None for a dense one, which is whole everywhere.

    A mesh dim splits one letter: where inputs differ, that of the first input that has one.
    """
    found = Flow(mesh)
    _split(found, dims, forms)
    _drop_unaligned(found, dims, call)
    _keep_partial(found, dims, forms, call)
    _make_partial(found, dims, call)
    for letters, shape in zip(dims.outputs, call.outs, strict=True):
        found.outs.append(_placed(found, dims, letters, shape))
    return found


def _split(found: Flow, dims: Dims, forms: Sequence[Form | None]) -> None:
    owner: dict[int, str] = {}
    for letters, form in zip(dims.inputs, forms, strict=True):
        if form is None:
            continue
        for dim, letter in enumerate(letters):
            if letter is None or form.factor(dim) > 1 or form.shape[dim] == 0:
                continue
            for axis in form.axes(dim):
                if owner.setdefault(axis, letter) == letter and axis not in found.split.setdefault(letter, []):
                    found.split[letter].append(axis)
    found.split = {letter: axes for letter, axes in found.split.items() if axes}


def _sizes(dims: Dims, call: Call, letter: str) -> Iterable[int]:
    for letters, shape in zip((*dims.inputs, *dims.outputs), (*call.shapes, *call.outs), strict=True):
        yield from (n for at, n in zip(letters, shape, strict=True) if at == letter)


def even(found: Flow, dims: Dims, call: Call, letter: str) -> bool:
    """Whether the pieces of a letter are equal, wherever it stands."""
    return all(n % found.ways(letter) == 0 for n in _sizes(dims, call, letter))


def _drop_unaligned(found: Flow, dims: Dims, call: Call) -> None:
    for letter in dims.aligned & set(found.split):
        if not even(found, dims, call, letter):
            del found.split[letter]


def _keep_partial(found: Flow, dims: Dims, forms: Sequence[Form | None], call: Call) -> None:
    taken = {a for axes in found.split.values() for a in axes}
    if dims.passes == "no":
        return
    for axis in range(found.mesh.ndim):
        kinds = [None if f is None or axis not in f.partial else f.reduce_type(axis) for f in forms]
        partial = [i for i, k in enumerate(kinds) if k is not None]
        kind = {k for k in kinds if k is not None}
        if axis in taken or len(kind) != 1:
            continue
        alike = len(partial) == len(forms)
        fits = {
            "linear": alike and kind <= LINEAR,
            "each": len(partial) == 1 and kind <= LINEAR and (dims.of is None or partial[0] in dims.of),
            "moved": alike,
        }[dims.passes]
        given = {call.dtypes[i] for i in partial}
        if fits and commute(kind.union(found.kept.values())) and _exact(kind, dims, given, call.out_dtypes):
            found.kept[axis] = kind.pop()


def _exact(kind: set[ReduceType], dims: Dims, given: set[Any], out: Sequence[Any]) -> bool:
    """Whether addends of these dtypes join to the same value after the op as before it, but for rounding.

    Truth values and whole numbers join by other arithmetic than what they are cast to, and averages of whole numbers
    are rounded down.
    """
    if dims.passes == "moved":
        return len(given.union(out)) == 1 or (kind <= LINEAR and all(map(dtypes.is_inexact, given.union(out))))
    if all(map(dtypes.is_inexact, given)):
        return all(map(dtypes.is_inexact, out))
    return kind == {ReduceType.kRedSum} and dtypes.bool_ not in given and len(given.union(out)) == 1


def commute(types: set[ReduceType]) -> bool:
    """Whether joining by these, along one mesh dim after another, may be done in any order."""
    return len(types) <= 1 or types <= LINEAR


def _make_partial(found: Flow, dims: Dims, call: Call) -> None:
    if dims.reduce is None or not commute({dims.reduce, *found.kept.values()}):
        return
    ends = {letter for letters in dims.outputs for letter in letters}
    for letter, axes in found.split.items():
        if letter not in ends and (dims.padding is not None or even(found, dims, call, letter)):
            found.made[letter] = axes


def _placed(found: Flow, dims: Dims, letters: Letters, shape: tuple[int, ...]) -> Form:
    placements: list[Placement] = [Replicate()] * found.mesh.ndim
    for dim, letter in enumerate(letters):
        axes = found.split.get(letter or "", [])
        ordered = axes == sorted(axes)
        for order, axis in enumerate(axes):
            placements[axis] = Shard(dim, shard_order=0 if ordered else order)
    for axis, kind in found.kept.items():
        placements[axis] = Partial(kind)
    for axes in found.made.values():
        for axis in axes:
            placements[axis] = Partial(dims.reduce or ReduceType.kRedSum)
    return Form(found.mesh, tuple(placements), shape)
