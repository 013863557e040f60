"""Whether a function computes each row of its results from the same row of its inputs, read off its jaxpr.

An array that is padded with more rows may go through such a function: the rows that were there before come out as
they do without the others. What sharding asks of dims is less (distributed/auto_parallel/dims): a dim that is summed
and spread again may well be split, as devices then talk to each other.

Of each primitive one thing is said: which dims of its operands run along with each dim of its results. Rows at a dim
that runs along with none would be mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend import core as jex

from polyreme.core.taylor.primitives import ELEMENTWISE, REDUCTIONS
from polyreme.errors import ProgramError


class MixedRows(ProgramError):
    """A result would depend on rows that were added as padding."""


class PaddedDim:
    """The rows of padded arrays. size: how many there are with the padding."""

    def __init__(self, size: int) -> None:
        self.size = size

    def is_same(self, other: PaddedDim) -> bool:
        """Whether row i of one stands beside row i of the other, and both have as many true ones."""
        return self is other


SAME: Final = "same"
"""A dim along which all elements are equal, as after broadcasting."""
PLACE: Final = "place"
"""A dim whose elements depend on their index, whatever the size, as those of iota do."""
Dim = PaddedDim | str | None
"""What is known of a dim: which rows it is, SAME, PLACE or nothing."""
Dims = tuple[Dim, ...]
_LISTED = 64  # numbers of a constant; one with more is no list of sizes


class RowFlow:
    """What a function of padded arrays gives. outputs: Dims of each result; is_copy: whether rows that are copies of
    another row at the inputs are copies of it in the results.

    Raises MixedRows where a result would depend on other rows than its own.
    """

    def __init__(self, jaxpr: Any, inputs: Sequence[Dims]) -> None:
        self.is_copy = True
        self._sizes = {dim.size for dims in inputs for dim in dims if isinstance(dim, PaddedDim)}
        self.outputs = self.run(jaxpr, inputs)

    def run(self, jaxpr: Any, inputs: Sequence[Dims]) -> list[Dims]:
        """Dims of what a jaxpr gives."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, Dims] = dict(zip(inner.invars, inputs, strict=True))
        known.update((v, _unknown(v)) for v in inner.constvars)
        for const in getattr(jaxpr, "consts", ()):
            if np.size(const) <= _LISTED:
                self._check_numbers(const)

        def dims_of(atom: Any) -> Dims:
            if isinstance(atom, jex.Literal):
                self._check_numbers(atom.val)
                return _unknown(atom)
            return known[atom]

        for eqn in inner.eqns:
            known.update(zip(eqn.outvars, self._equation(eqn, [dims_of(v) for v in eqn.invars]), strict=True))
        return [dims_of(v) for v in inner.outvars]

    def _check_numbers(self, value: Any) -> None:
        """Refuse the number of rows, and what divides by it: with padding it is another one."""
        if getattr(value, "dtype", np.dtype(type(value))).kind not in "iuf":
            return
        numbers = np.asarray(value, np.float64)
        if any(np.any((numbers == size) | (np.abs(numbers * size - 1) < 1e-6)) for size in self._sizes):
            raise MixedRows(f"it computes with the number {value}, which may be the number of rows")

    def _equation(self, eqn: Any, operands: list[Dims]) -> list[Dims]:
        name = eqn.primitive.name
        if name in _WITH_BODIES:
            results = _WITH_BODIES[name](self, eqn.params, operands)
        else:
            results = self._follow(eqn, operands, _RULES.get(name))
        return [
            tuple(SAME if n == 1 else d for n, d in zip(_shape(v), dims, strict=True))
            for v, dims in zip(eqn.outvars, results, strict=True)
        ]

    def _follow(self, eqn: Any, operands: list[Dims], rule: Rule | None) -> list[Dims]:
        along = [] if rule is None else rule(eqn, operands)
        followed = {source for sources in along for source in sources}
        rows = {(o, i) for o, dims in enumerate(operands) for i, d in enumerate(dims) if isinstance(d, PaddedDim)}
        is_known = rule is not None and all(len(_shape(v)) == len(along) for v in eqn.outvars)
        if rows - followed or (rows and not is_known):
            raise MixedRows(f"nothing is known of rows in {eqn.primitive.name}, or it goes along them")
        if not is_known:
            return [_unknown(v) for v in eqn.outvars]
        met = [[operands[s[0]][s[1]] if isinstance(s, tuple) else s for s in sources] for sources in along]
        return [tuple(map(self._joined, met))] * len(eqn.outvars)

    def _joined(self, dims: Sequence[Dim]) -> Dim:
        """A dim of a result, of the dims that meet in it element by element."""
        rows = [d for d in dims if isinstance(d, PaddedDim)]
        if rows:
            if None in dims or not all(rows[0].is_same(r) for r in rows):
                raise MixedRows("rows of sequences meet rows of something else")
            if PLACE in dims:
                self.is_copy = False
            return rows[0]
        if None in dims:
            return None
        return PLACE if PLACE in dims else SAME


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _unknown(atom: Any) -> Dims:
    return tuple(SAME if n == 1 else None for n in _shape(atom))


# which dims of operands run along with each dim of the results

Source = tuple[int, int] | str | None
"""(operand, dim), or what is known of a dim that a primitive makes."""
Along = list[list[Source]]
"""For each dim of the results, what meets in it; nothing in one of equal elements."""
Rule = Callable[[Any, list[Dims]], Along]


def _elementwise(eqn: Any, operands: list[Dims], *without: int) -> Along:
    """Dim i of the results with dim i of each operand, but for dims `without`."""
    arrays = [place for place, dims in enumerate(operands) if dims]
    ndim = max(map(len, operands), default=0)
    return [[None] if i in without else [(place, i) for place in arrays] for i in range(ndim)]


def _lengthwise(parameter: str) -> Rule:
    """What goes along one dim, and is element by element in the others."""
    return lambda eqn, operands: _elementwise(eqn, operands, eqn.params[parameter])


def _whole_dims(are_whole: Sequence[bool]) -> Along:
    return [[(0, i)] if is_whole else [None] for i, is_whole in enumerate(are_whole)]


def _broadcast(eqn: Any, operands: list[Dims]) -> Along:
    along: Along = [[] for _ in eqn.params["shape"]]
    for i, (at, size) in enumerate(zip(eqn.params["broadcast_dimensions"], _shape(eqn.invars[0]), strict=True)):
        along[at] = [(0, i)] if size == eqn.params["shape"][at] else []
    return along


def _reshape(eqn: Any, operands: list[Dims]) -> Along:
    """A dim stays that has its size and as many elements before it."""
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if eqn.params.get("dimensions") is not None:  # in another order
        return [[None] for _ in after]
    starts = {(math.prod(before[:i]), n): i for i, n in enumerate(before)}
    places = [starts.get((math.prod(after[:j]), n)) for j, n in enumerate(after)]
    others = {d for i, d in enumerate(operands[0]) if i not in places}
    rest: list[Source] = [] if others <= {SAME} else [None]
    return [rest if i is None else [(0, i)] for i in places]


def _without(eqn: Any, operands: list[Dims], *gone: int) -> Along:
    return [[(0, i)] for i in range(len(operands[0])) if i not in gone]


def _expand_dims(eqn: Any, operands: list[Dims]) -> Along:
    left = iter(_without(eqn, operands))
    return [[] if i in eqn.params["dimensions"] else next(left) for i in range(len(_shape(eqn.outvars[0])))]


def _cumulative(eqn: Any, operands: list[Dims]) -> Along:
    along = _without(eqn, operands)
    along[eqn.params["axis"]] = [None] if eqn.params["reverse"] else [(0, eqn.params["axis"]), PLACE]
    return along


def _dot_general(eqn: Any, operands: list[Dims]) -> Along:
    summed, batch = eqn.params["dimension_numbers"]
    free = ([(o, i) for i in range(len(operands[o])) if i not in (*summed[o], *batch[o])] for o in (0, 1))
    return [*([(0, i), (1, j)] for i, j in zip(*batch, strict=True)), *([source] for dims in free for source in dims)]


def _convolution(eqn: Any, operands: list[Dims]) -> Along:
    numbers = eqn.params["dimension_numbers"]
    along: Along = [[None] for _ in operands[0]]
    if eqn.params["batch_group_count"] == 1:
        along[numbers.out_spec[0]] = [(0, numbers.lhs_spec[0])]
    return along


def _slice(eqn: Any, operands: list[Dims]) -> Along:
    p, shape = eqn.params, _shape(eqn.invars[0])
    cuts = zip(p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(shape), shape, strict=True)
    return _whole_dims([(start, limit, stride) == (0, n, 1) for start, limit, stride, n in cuts])


def _dynamic_slice(eqn: Any, operands: list[Dims]) -> Along:
    return _whole_dims([a == b for a, b in zip(_shape(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)])


def _gather(eqn: Any, operands: list[Dims]) -> Along:
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], _shape(eqn.invars[0])
    batch: Along = [[(1, i)] for i in range(len(operands[1]) - 1)]
    for i, at in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        batch[at].append((0, i))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = _whole_dims([n == sizes[i] and i not in numbers.start_index_map for i, n in enumerate(shape)])
    window, left = iter([sources for i, sources in enumerate(whole) if i not in gone]), iter(batch)
    return [next(window if i in numbers.offset_dims else left) for i in range(len(_shape(eqn.outvars[0])))]


def _iota(eqn: Any, operands: list[Dims]) -> Along:
    return [[PLACE] if i == eqn.params["dimension"] else [] for i in range(len(eqn.params["shape"]))]


def _random_bits(eqn: Any, operands: list[Dims]) -> Along:
    # element i of a stream is computed from i alone, whatever is drawn after it
    first = PLACE if jax.config.jax_threefry_partitionable else None  # type: ignore[attr-defined]
    return [[None if i else first] for i in range(len(_shape(eqn.outvars[0])))]


# primitives with jaxprs of their own


def _call(flow: RowFlow, params: Any, operands: list[Dims]) -> list[Dims]:
    return flow.run(params.get("jaxpr", params.get("call_jaxpr")), operands)


def _scan(flow: RowFlow, params: Any, operands: list[Dims]) -> list[Dims]:
    consts, carried = params["num_consts"], params["num_carry"]
    start, stacked = operands[consts : consts + carried], operands[consts + carried :]
    if any(isinstance(dims[0], PaddedDim) for dims in stacked):
        raise MixedRows("a loop goes along the rows")

    def body(carry: list[Dims]) -> list[Dims]:
        return flow.run(params["jaxpr"], [*operands[:consts], *carry, *(dims[1:] for dims in stacked)])

    carry, ends = _steady(start, body, carried)
    return [*carry, *((None, *dims) for dims in ends[carried:])]


def _while(flow: RowFlow, params: Any, operands: list[Dims]) -> list[Dims]:
    skip, consts = params["cond_nconsts"], params["body_nconsts"]
    start, around = operands[skip + consts :], operands[skip : skip + consts]
    carry, _ = _steady(start, lambda now: flow.run(params["body_jaxpr"], [*around, *now]), len(start))
    flow.run(params["cond_jaxpr"], [*operands[:skip], *carry])
    return carry


def _cond(flow: RowFlow, params: Any, operands: list[Dims]) -> list[Dims]:
    first, *others = [flow.run(branch, operands[1:]) for branch in params["branches"]]
    for other in others:
        first = [tuple(map(_either, a, b)) for a, b in zip(first, other, strict=True)]
    return first


def _steady(start: list[Dims], body: Callable[[list[Dims]], list[Dims]], count: int) -> tuple[list[Dims], list[Dims]]:
    """What a loop carries, and its body's results, once another step changes nothing of it."""
    carry = list(start)
    while True:
        ends = body(carry)
        new = [tuple(map(_either, a, b)) for a, b in zip(carry, ends[:count], strict=True)]
        if new == carry:
            return carry, ends
        carry = new


def _either(one: Dim, other: Dim) -> Dim:
    """A dim that is one or the other, as the code runs."""
    if isinstance(one, PaddedDim) and isinstance(other, PaddedDim) and one.is_same(other):
        return one
    if isinstance(one, PaddedDim) or isinstance(other, PaddedDim):
        raise MixedRows("a value has rows of sequences at one step or branch and others at the next")
    return one if one == other else None


_KINDS: dict[Rule, str] = {
    lambda eqn, operands: _without(eqn, operands, *eqn.params["axes"]): REDUCTIONS,
    lambda eqn, operands: _without(eqn, operands, *eqn.params["dimensions"]): "squeeze",
    lambda eqn, operands: [[(0, i)] for i in eqn.params["permutation"]]: "transpose",
    lambda eqn, operands: _whole_dims([not any(p) for p in eqn.params["padding_config"]]): "pad",
    lambda eqn, operands: _whole_dims([i not in eqn.params["dimensions"] for i in range(len(operands[0]))]): "rev",
    _elementwise: f"{ELEMENTWISE} reshard",  # what a device of several computes is placed, and stays as it is
    _lengthwise("dimension"): "concatenate sort",
    _lengthwise("axis"): "split top_k",
    _broadcast: "broadcast_in_dim",
    _convolution: "conv_general_dilated",
    _cumulative: "cumsum cumprod cummax cummin cumlogsumexp",
    _dot_general: "dot_general",
    _dynamic_slice: "dynamic_slice",
    _expand_dims: "expand_dims",
    _gather: "gather",
    _iota: "iota",
    _random_bits: "random_bits",
    _reshape: "reshape",
    _slice: "slice",
}
_RULES = {name: rule for rule, names in _KINDS.items() for name in names.split()}
_CALLS = "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call"
_WITH_BODIES: dict[str, Callable[[RowFlow, Any, list[Dims]], list[Dims]]] = {
    **dict.fromkeys(_CALLS.split(), _call),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
