"""Whether a function computes each row of its results from the same row of its inputs, read off its jaxpr.

An array that is padded with more rows may go through such a function: the rows that were there before come out as
they do without the others. What sharding asks of dims is less (distributed/auto_parallel/dims): a dim that is summed
and spread again may well be split, as devices then talk to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend import core as jex

from polyreme.core.primitives import ELEMENTWISE, REDUCTIONS
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
        self.outputs = self._run(jaxpr, inputs)

    def _run(self, jaxpr: Any, inputs: Sequence[Dims]) -> list[Dims]:
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

    def _equation(self, eqn: Any, given: list[Dims]) -> list[Dims]:
        name = eqn.primitive.name
        rule = _RULES.get(name)
        if rule is None:
            if any(isinstance(d, PaddedDim) for dims in given for d in dims):
                raise MixedRows(f"nothing is known of rows in {name}")
            return [_unknown(v) for v in eqn.outvars]
        found = rule(self, eqn, given)
        return [
            tuple(SAME if n == 1 else d for n, d in zip(_shape(v), dims, strict=True))
            for v, dims in zip(eqn.outvars, found, strict=True)
        ]

    def joined(self, dims: Sequence[Dim]) -> Dim:
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


def _refuse_rows(dims: Sequence[Dim], what: str) -> None:
    if any(isinstance(d, PaddedDim) for d in dims):
        raise MixedRows(f"{what} goes along the rows")


Rule = Callable[[RowFlow, Any, list[Dims]], list[Dims]]


def _elementwise(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    arrays = [dims for dims in given if dims]
    if not arrays:
        return [_unknown(v) for v in eqn.outvars]
    joined = tuple(flow.joined(dims) for dims in zip(*arrays, strict=True))
    if any(len(_shape(v)) != len(joined) for v in eqn.outvars):  # bits of another width
        _refuse_rows(joined, eqn.primitive.name)
        return [_unknown(v) for v in eqn.outvars]
    return [joined] * len(eqn.outvars)


def _broadcast(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    shape = eqn.params["shape"]
    dims: list[Dim] = [SAME] * len(shape)
    sizes = _shape(eqn.invars[0])
    for at, size, dim in zip(eqn.params["broadcast_dimensions"], sizes, given[0], strict=True):
        dims[at] = SAME if size != shape[at] else dim
    return [tuple(dims)]


def _reshape(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    rest = SAME if all(d is SAME for d in given[0] if not isinstance(d, PaddedDim)) else None
    dims: list[Dim] = [rest] * len(after)
    starts = [math.prod(after[:j]) for j in range(len(after))]
    for i, dim in enumerate(given[0]):
        if dim is None or dim is SAME:
            continue
        at = next((j for j in range(len(after)) if after[j] == before[i] and starts[j] == math.prod(before[:i])), None)
        if at is not None:
            dims[at] = dim
        elif isinstance(dim, PaddedDim):
            raise MixedRows("a reshape joins rows with another dim")
        else:
            dims = [d if isinstance(d, PaddedDim) else None for d in dims]
    if eqn.params.get("dimensions") is not None:
        _refuse_rows(given[0], "a reshape in another order")
    return [tuple(dims)]


def _transpose(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    return [tuple(given[0][i] for i in eqn.params["permutation"])]


def _squeeze(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    return [tuple(d for i, d in enumerate(given[0]) if i not in eqn.params["dimensions"])]


def _expand_dims(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    left = iter(given[0])
    return [tuple(SAME if i in eqn.params["dimensions"] else next(left) for i in range(len(_shape(eqn.outvars[0]))))]


def _reduce(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    axes = eqn.params["axes"]
    for dims in given:
        _refuse_rows([dims[i] for i in axes if i < len(dims)], eqn.primitive.name)
    kept = tuple(d for i, d in enumerate(given[0]) if i not in axes)
    return [kept] * len(eqn.outvars)


def _cumulative(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    axis, dims = eqn.params["axis"], list(given[0])
    if eqn.params["reverse"]:
        _refuse_rows([dims[axis]], "a sum from the end")
        dims[axis] = None
    elif isinstance(dims[axis], PaddedDim):
        flow.is_copy = False
    elif dims[axis] is SAME:
        dims[axis] = PLACE
    return [tuple(dims)]


def _dot_general(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    a, b = given
    _refuse_rows([*(a[i] for i in lhs_sum), *(b[i] for i in rhs_sum)], "a product that sums")
    batch = [flow.joined([a[i], b[j]]) for i, j in zip(lhs_batch, rhs_batch, strict=True)]
    left = [d for i, d in enumerate(a) if i not in (*lhs_sum, *lhs_batch)]
    right = [d for i, d in enumerate(b) if i not in (*rhs_sum, *rhs_batch)]
    return [(*batch, *left, *right)]


def _convolution(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    numbers = eqn.params["dimension_numbers"]
    x, w = given[0], given[1]
    batch = numbers.lhs_spec[0]
    _refuse_rows([*(d for i, d in enumerate(x) if i != batch), *w], "a convolution")
    if eqn.params["batch_group_count"] != 1:
        _refuse_rows(x, "a convolution of groups of rows")
    dims = list(_unknown(eqn.outvars[0]))
    dims[numbers.out_spec[0]] = x[batch]
    return [tuple(dims)]


def _along(parameter: str) -> Rule:
    """The rule of what goes along one dim, and is element by element in the others."""

    def rule(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
        axis = eqn.params[parameter]
        arrays = [dims for dims in given if dims]
        _refuse_rows([dims[axis] for dims in arrays], eqn.primitive.name)
        joined = [flow.joined(dims) for dims in zip(*arrays, strict=True)]
        joined[axis] = None
        return [tuple(joined)] * len(eqn.outvars)

    return rule


def _pad(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    dims = list(given[0])
    for i, added in enumerate(eqn.params["padding_config"]):
        if any(added):
            _refuse_rows([dims[i]], "padding")
            dims[i] = None
    return [tuple(dims)]


def _slice(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    start, limit, dims = eqn.params["start_indices"], eqn.params["limit_indices"], list(given[0])
    strides = eqn.params["strides"] or [1] * len(dims)
    for i, size in enumerate(_shape(eqn.invars[0])):
        if (start[i], limit[i], strides[i]) != (0, size, 1) and dims[i] is not SAME:
            _refuse_rows([dims[i]], "a slice")
            dims[i] = None
    return [tuple(dims)]


def _dynamic_slice(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    dims = list(given[0])
    for i, (size, cut) in enumerate(zip(_shape(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)):
        if cut != size and dims[i] is not SAME:
            _refuse_rows([dims[i]], "a slice")
            dims[i] = None
    return [tuple(dims)]


def _reverse(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    dims = list(given[0])
    for i in eqn.params["dimensions"]:
        _refuse_rows([dims[i]], "a reversal")
        dims[i] = dims[i] if dims[i] is SAME else None
    return [tuple(dims)]


def _gather(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, index = given[0], given[1][:-1]
    _refuse_rows(given[1][-1:], "an index")
    shape = _shape(eqn.invars[0])
    met = list(index)
    windows: list[Dim] = []
    for i, dim in enumerate(operand):
        if i in numbers.operand_batching_dims:
            at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(i)]
            met[at] = flow.joined([dim, index[at]])
            continue
        is_whole = sizes[i] == shape[i] and i not in numbers.start_index_map
        if not is_whole:
            _refuse_rows([dim], "an index")
        if i not in numbers.collapsed_slice_dims:
            windows.append(dim if is_whole else None)
    left, inside = iter(met), iter(windows)
    count = len(_shape(eqn.outvars[0]))
    return [tuple(next(inside) if i in numbers.offset_dims else next(left) for i in range(count))]


def _iota(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    return [tuple(PLACE if i == eqn.params["dimension"] else SAME for i in range(len(eqn.params["shape"])))]


def _random_bits(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    # element i of a stream is computed from i alone, whatever is drawn after it
    first = PLACE if jax.config.jax_threefry_partitionable else None  # type: ignore[attr-defined]
    return [tuple(first if i == 0 else None for i in range(len(_shape(eqn.outvars[0]))))]


def _key(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    for dims in given:
        _refuse_rows(dims, "a random key")
    return [_unknown(v) for v in eqn.outvars]


def _call(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return flow._run(inner, given)


def _scan(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    consts, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    start, each = given[consts : consts + carried], given[consts + carried :]
    _refuse_rows([dims[0] for dims in each], "a loop")

    def body(carry: list[Dims]) -> list[Dims]:
        return flow._run(eqn.params["jaxpr"], [*given[:consts], *carry, *(dims[1:] for dims in each)])

    carry, ends = _steady(start, body, carried)
    return [*carry, *((None, *dims) for dims in ends[carried:])]


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


def _while(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = given[skip + consts :]
    around = given[skip : skip + consts]
    carry, _ = _steady(start, lambda now: flow._run(eqn.params["body_jaxpr"], [*around, *now]), len(start))
    flow._run(eqn.params["cond_jaxpr"], [*given[:skip], *carry])
    return carry


def _cond(flow: RowFlow, eqn: Any, given: list[Dims]) -> list[Dims]:
    first, *others = [flow._run(branch, given[1:]) for branch in eqn.params["branches"]]
    for other in others:
        first = [tuple(map(_either, a, b)) for a, b in zip(first, other, strict=True)]
    return first


_KINDS: dict[Rule, str] = {
    _elementwise: ELEMENTWISE,
    _reduce: REDUCTIONS,
    _cumulative: "cumsum cumprod cummax cummin cumlogsumexp",
    _call: "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call",
    _key: "random_wrap random_unwrap random_split random_fold_in random_seed",
    _along("dimension"): "concatenate sort",
    _along("axis"): "split top_k",
    _broadcast: "broadcast_in_dim",
    _cond: "cond",
    _convolution: "conv_general_dilated",
    _dot_general: "dot_general",
    _dynamic_slice: "dynamic_slice",
    _expand_dims: "expand_dims",
    _gather: "gather",
    _iota: "iota",
    _pad: "pad",
    _random_bits: "random_bits",
    _reshape: "reshape",
    _reverse: "rev",
    _scan: "scan",
    _slice: "slice",
    _squeeze: "squeeze",
    _transpose: "transpose",
    _while: "while",
}
_RULES = {name: rule for rule, names in _KINDS.items() for name in names.split()}
