"""Facts about dims that follow from ops: products, lookups, and dims that are summed, mixed or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyreme.distributed.auto_parallel.dims.factors import Dims, Factor, equal_part, fresh, root, same


@dataclass(frozen=True, slots=True)
class KnownArray:
    """The dims of a traced array. origin: the parameter that it is a rearrangement or cast of, else None."""

    dims: Dims
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A product: what it sums over (both sides), what both sides carry along (batch), and what only one has.

    weights: the parameter on the left and right, None for an activation. where: index of the op. flops: multiplications
    and additions.
    """

    where: int
    weights: tuple[str | None, str | None]
    contracted: tuple[Dims, Dims]
    batch: Dims
    left: Dims
    right: Dims
    flops: float

    @property
    def of_activations(self) -> bool:
        """Neither side is a parameter."""
        return self.weights == (None, None)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows taken from a table by indexes that were computed: the table's parameter, its row dim, the indexes' dims."""

    where: int
    table: str | None
    rows: Factor
    width: Dims
    indexes: Dims


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Some of a dim's elements that follow each other, from start on."""

    whole: Factor
    part: Factor
    start: int


@dataclass
class Facts:
    """All facts collected from one traced model.

    mixed: dims whose parts depend on each other; reduced: summed or the like; classes: over which a loss normalizes;
    losses: the ops that do; heads: (of queries, of keys) of attention; attentions: the ops that have them; channels: of
    convolutions; convolutions: (op, its FLOP); pieces: (dim, a run of it) where the runs are not its equal parts.
    where: index of the op that is looked at; times: how often its loops, of which there are so many around each other,
    run what is looked at.
    """

    products: list[Product] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    mixed: list[Factor] = field(default_factory=list)
    reduced: list[Factor] = field(default_factory=list)
    classes: list[Factor] = field(default_factory=list)
    losses: set[int] = field(default_factory=set)
    heads: list[tuple[Factor, Factor]] = field(default_factory=list)
    attentions: set[int] = field(default_factory=set)
    channels: list[Factor] = field(default_factory=list)
    convolutions: list[tuple[int, float]] = field(default_factory=list)
    runs: list[ElementRun] = field(default_factory=list)
    pieces: list[tuple[Factor, Factor]] = field(default_factory=list)
    where: int = 0
    times: int = 1
    loops: int = 0


Rule = Callable[[Any, list[KnownArray], Facts], list[KnownArray]]


def unknown(shapes: Sequence[Sequence[int]], given: Sequence[KnownArray], facts: Facts) -> list[KnownArray]:
    """Outputs of these shapes, of which nothing is known."""
    facts.mixed += [dim for x in given for dim in x.dims]
    return [KnownArray(fresh(shape)) for shape in shapes]


def settle_runs(facts: Facts) -> None:
    """Say of each dim that runs are taken of what that means, once all of them are known.

    Equal runs that begin at multiples of their size are the parts of the dim: its inner factor; which part it is, the
    outer one, is mixed. Others, such as the q, k and v of grouped heads in one weight, say nothing of its factors.
    """
    of: dict[Factor, list[ElementRun]] = {}
    for run in facts.runs:
        of.setdefault(root(run.whole), []).append(run)
    for whole, runs in of.items():
        size = runs[0].part.size
        if whole.size % size == 0 and all(r.part.size == size and r.start % size == 0 for r in runs):
            for run in runs:
                same(equal_part(whole, size), run.part)
            facts.mixed.append(outer_part(whole, size))
        else:
            facts.mixed.append(whole)
            facts.pieces += [(whole, run.part) for run in runs]


def outer_part(dim: Factor, inner: int) -> Factor:
    """The factor of a dim that counts its equal parts of size inner."""
    outer = Factor(dim.size // inner)
    equal = Factor(dim.size)
    equal.parts = (outer, Factor(inner))
    same(equal, dim)
    return outer
