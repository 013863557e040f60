"""What a primitive says of dims: which of its inputs' and outputs' are the same, which are summed, which are mixed.

Floor: 5.  An op's rule is that of the primitives it is made of, so there is one set of rules for all ops; attention and
losses, whose kernels differ by device, have rules of their own (op_rules.py). A primitive without a rule says nothing,
and its inputs' dims are mixed: not to be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core as jex

from polyreme.distributed.auto_parallel.factors import Dims, Factor, all_same, equal_part, fresh, reshaped, root, same


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of an array: its dims; origin: the parameter of which it is a rearrangement or cast."""

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
class Run:
    """Some of a dim's elements that follow each other, from start on."""

    whole: Factor
    part: Factor
    start: int


@dataclass
class Facts:
    """All that was found.

    mixed: dims whose parts depend on each other; reduced: summed or the like; classes: over which a loss normalizes;
    heads: (of queries, of keys) of attention; channels: of convolutions; convolutions: (op, its FLOP); pieces: (dim, a
    run of it) where the runs are not its equal parts. where: index of the op that is looked at; times: how often its
    loops, of which there are so many around each other, run what is looked at.
    """

    products: list[Product] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    mixed: list[Factor] = field(default_factory=list)
    reduced: list[Factor] = field(default_factory=list)
    classes: list[Factor] = field(default_factory=list)
    heads: list[tuple[Factor, Factor]] = field(default_factory=list)
    channels: list[Factor] = field(default_factory=list)
    convolutions: list[tuple[int, float]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    pieces: list[tuple[Factor, Factor]] = field(default_factory=list)
    where: int = 0
    times: int = 1
    loops: int = 0


Rule = Callable[[Any, list[Seen], Facts], list[Seen]]


def run(jaxpr: Any, given: Sequence[Seen], facts: Facts) -> list[Seen]:
    """What is known of a jaxpr's outputs; jaxpr: open or closed."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Seen] = dict(zip(inner.invars, given, strict=True))
    for var in inner.constvars:
        env[var] = Seen(fresh(var.aval.shape))

    def seen(atom: Any) -> Seen:
        if isinstance(atom, jex.Literal):
            return Seen(fresh(np.shape(atom.val)))
        return env[atom]

    for eqn in inner.eqns:
        rule = RULES.get(eqn.primitive.name, _unknown)
        found = rule(eqn, [seen(v) for v in eqn.invars], facts)
        env.update(zip(eqn.outvars, found, strict=True))
    return [seen(v) for v in inner.outvars]


def unknown(shapes: Sequence[Sequence[int]], given: Sequence[Seen], facts: Facts) -> list[Seen]:
    """Outputs of these shapes, of which nothing is known."""
    facts.mixed += [dim for x in given for dim in x.dims]
    return [Seen(fresh(shape)) for shape in shapes]


def _unknown(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    return unknown([getattr(v.aval, "shape", ()) for v in eqn.outvars], given, facts)


def _elementwise(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    arrays = [x for x in given if x.dims]
    first = max(arrays, key=lambda x: math.prod(d.size for d in x.dims), default=Seen(()))
    for x in arrays:
        if len(x.dims) == len(first.dims):
            all_same(x.dims, first.dims)
    origin = arrays[0].origin if len(arrays) == 1 else None
    found = []
    for var in eqn.outvars:
        fits = tuple(d.size for d in first.dims) == tuple(var.aval.shape)
        found.append(Seen(first.dims if fits else fresh(var.aval.shape), origin if fits else None))
    return found


def _each(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    """Each output is the input of its place."""
    return given[: len(eqn.outvars)]


def _dot_general(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    a, b = given[0], given[1]
    for i, j in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        same(a.dims[i], b.dims[j])
    left = tuple(d for i, d in enumerate(a.dims) if i not in (*lhs_sum, *lhs_batch))
    right = tuple(d for i, d in enumerate(b.dims) if i not in (*rhs_sum, *rhs_batch))
    batch = tuple(a.dims[i] for i in lhs_batch)
    sums = (tuple(a.dims[i] for i in lhs_sum), tuple(b.dims[j] for j in rhs_sum))
    if facts.loops:  # split, it would be summed over devices in every round
        facts.mixed += [dim for side in (a, b) if side.origin is not None for dim in side.dims]
    every = [d.size for dims in (batch, left, right, sums[0]) for d in dims]
    flops = 2.0 * facts.times * math.prod(every)
    facts.products.append(Product(facts.where, (a.origin, b.origin), sums, batch, left, right, flops))
    return [Seen((*batch, *left, *right))]


def _convolution(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    numbers = eqn.params["dimension_numbers"]
    x, w = given[0], given[1]
    made = list(fresh(eqn.outvars[0].aval.shape))
    if eqn.params["batch_group_count"] == 1:
        made[numbers.out_spec[0]] = x.dims[numbers.lhs_spec[0]]
    made[numbers.out_spec[1]] = w.dims[numbers.rhs_spec[0]]
    if eqn.params["feature_group_count"] == 1:
        same(x.dims[numbers.lhs_spec[1]], w.dims[numbers.rhs_spec[1]])
    facts.mixed += [x.dims[i] for i in numbers.lhs_spec[2:]]
    facts.mixed += [w.dims[i] for i in numbers.rhs_spec[2:]]
    facts.channels += [x.dims[numbers.lhs_spec[1]], *(w.dims[i] for i in numbers.rhs_spec[:2])]
    taps = math.prod(w.dims[i].size for i in numbers.rhs_spec[1:])
    facts.convolutions.append((facts.where, 2.0 * facts.times * taps * math.prod(d.size for d in made)))
    return [Seen(tuple(made))]


def _reduce(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    axes = eqn.params["axes"]
    dims = given[0].dims
    facts.reduced += [dims[i] for i in axes]
    kept = tuple(d for i, d in enumerate(dims) if i not in axes)
    return [Seen(kept) for _ in eqn.outvars]


def _along(key: str) -> Rule:
    """The dims stay, but along one of them the elements depend on each other."""

    def rule(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
        at = eqn.params[key]
        for i in at if isinstance(at, (tuple, list)) else (at,):
            facts.mixed += [x.dims[i] for x in given if len(x.dims) > i]
        for x in given[1:]:
            all_same(x.dims, given[0].dims)
        fits = [tuple(d.size for d in given[0].dims) == tuple(v.aval.shape) for v in eqn.outvars]
        return [Seen(given[0].dims if fit else fresh(v.aval.shape)) for fit, v in zip(fits, eqn.outvars, strict=True)]

    return rule


def _broadcast_in_dim(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    made = list(fresh(eqn.params["shape"]))
    for dim, at in zip(given[0].dims, eqn.params["broadcast_dimensions"], strict=True):
        if dim.size == made[at].size:
            made[at] = dim
    grown = any(d.size not in (1, m) for d, m in zip(given[0].dims, eqn.params["shape"], strict=False))
    return [Seen(tuple(made), None if grown else given[0].origin)]


def _reshape(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    if eqn.params.get("dimensions") is not None:
        return _unknown(eqn, given, facts)
    return [Seen(reshaped(given[0].dims, eqn.outvars[0].aval.shape), given[0].origin)]


def _squeeze(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    axes = eqn.params["dimensions"]
    return [Seen(tuple(d for i, d in enumerate(given[0].dims) if i not in axes), given[0].origin)]


def _transpose(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    return [Seen(tuple(given[0].dims[i] for i in eqn.params["permutation"]), given[0].origin)]


def _run(dim: Factor, start: int | None, size: int, facts: Facts) -> Factor:
    """A run of a dim's elements from start on; None: from where is not known."""
    if size == dim.size:
        return dim
    made = Factor(size)
    if start is None or size <= 1:
        facts.mixed.append(dim)
    else:
        facts.runs.append(Run(dim, made, start))
    return made


def settle_runs(facts: Facts) -> None:
    """Say of each dim that runs are taken of what that means, once all of them are known.

    Equal runs that begin at multiples of their size are the parts of the dim: its inner factor; which part it is, the
    outer one, is mixed. Others, such as the q, k and v of grouped heads in one weight, say nothing of its factors.
    """
    of: dict[Factor, list[Run]] = {}
    for each in facts.runs:
        of.setdefault(root(each.whole), []).append(each)
    for whole, runs in of.items():
        size = runs[0].part.size
        if whole.size % size == 0 and all(r.part.size == size and r.start % size == 0 for r in runs):
            for each in runs:
                same(equal_part(whole, size), each.part)
            facts.mixed.append(_outer(whole, size))
        else:
            facts.mixed.append(whole)
            facts.pieces += [(whole, each.part) for each in runs]


def _outer(dim: Factor, inner: int) -> Factor:
    """The factor of a dim that counts its equal parts of size inner."""
    outer = Factor(dim.size // inner)
    equal = Factor(dim.size)
    equal.parts = (outer, Factor(inner))
    same(equal, dim)
    return outer


def _slice(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"] or [1] * len(given[0].dims)
    made = []
    for dim, start, stride, size in zip(given[0].dims, starts, strides, eqn.outvars[0].aval.shape, strict=True):
        made.append(_run(dim, start if stride == 1 else None, size, facts))
    return [Seen(tuple(made))]


def _dynamic_slice(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    sizes = eqn.params["slice_sizes"]
    return [Seen(tuple(_run(d, None, n, facts) for d, n in zip(given[0].dims, sizes, strict=True)))]


def _dynamic_update_slice(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    for dim, new in zip(given[0].dims, given[1].dims, strict=True):
        if dim.size == new.size:
            same(dim, new)
        else:
            facts.mixed += [dim, new]
    return [Seen(given[0].dims)]


def _concatenate(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    at = eqn.params["dimension"]
    made = list(fresh(eqn.outvars[0].aval.shape))
    sizes = {x.dims[at].size for x in given}
    for x in given:
        for i, dim in enumerate(x.dims):
            if i != at:
                same(dim, made[i])
            elif len(sizes) == 1 and dim.size > 1:
                same(equal_part(made[at], dim.size), dim)
            else:
                facts.mixed.append(dim)
    facts.mixed.append(_outer(made[at], sizes.pop()) if len(sizes) == 1 and min(sizes) > 1 else made[at])
    return [Seen(tuple(made))]


def _split(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    at, sizes, dims = eqn.params["axis"], eqn.params["sizes"], given[0].dims
    found, start = [], 0
    for size in sizes:
        found.append(Seen((*dims[:at], _run(dims[at], start, size, facts), *dims[at + 1 :])))
        start += size
    return found


def _tile(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    made = list(fresh(eqn.outvars[0].aval.shape))
    for i, (dim, times) in enumerate(zip(given[0].dims, eqn.params["reps"], strict=True)):
        if times == 1:
            made[i] = dim
        elif dim.size > 1:
            same(equal_part(made[i], dim.size), dim)
    return [Seen(tuple(made))]


def _reduce_window(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    found = []
    for x, var in zip(given, eqn.outvars, strict=False):
        made = list(fresh(var.aval.shape))
        for i, (dim, window) in enumerate(zip(x.dims, eqn.params["window_dimensions"], strict=True)):
            if window == 1 and dim.size == made[i].size:
                made[i] = dim
            else:
                facts.mixed.append(dim)
        found.append(Seen(tuple(made)))
    return found


def _stack(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    at = eqn.params["axis"]
    for x in given[1:]:
        all_same(x.dims, given[0].dims)
    return [Seen((*given[0].dims[:at], Factor(len(given)), *given[0].dims[at:]))]


def _top_k(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    dims = given[0].dims
    facts.mixed.append(dims[-1])
    return [Seen((*dims[:-1], Factor(v.aval.shape[-1]))) for v in eqn.outvars]


def _pad(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    made = list(fresh(eqn.outvars[0].aval.shape))
    for i, (dim, config) in enumerate(zip(given[0].dims, eqn.params["padding_config"], strict=True)):
        if config == (0, 0, 0):
            made[i] = dim
        else:
            facts.mixed += [dim, made[i]]
    return [Seen(tuple(made))]


def _gather(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    """Rows of a table: whole dims of the operand stay, those that are indexed give way to the indexes' dims."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indexes = given[0], given[1]
    made = list(fresh(eqn.outvars[0].aval.shape))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(operand.dims)) if i not in gone]
    kept = []
    for at, i in zip(numbers.offset_dims, window, strict=True):
        if sizes[i] == operand.dims[i].size:
            made[at] = operand.dims[i]
            kept.append(operand.dims[i])
        else:
            facts.mixed.append(operand.dims[i])
    outer = [i for i in range(len(made)) if i not in numbers.offset_dims]
    for at, dim in zip(outer, indexes.dims[:-1], strict=True):
        same(made[at], dim)
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        same(operand.dims[i], indexes.dims[j])
    rows = [operand.dims[i] for i in numbers.collapsed_slice_dims]
    facts.mixed += rows
    if len(rows) == 1:
        facts.lookups.append(Lookup(facts.where, operand.origin, rows[0], tuple(kept), indexes.dims[:-1]))
    return [Seen(tuple(made))]


def _scatter(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    numbers = eqn.params["dimension_numbers"]
    operand, updates = given[0], given[2]
    window = [
        i for i in range(len(operand.dims)) if i not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    for at, i in zip(numbers.update_window_dims, window, strict=True):
        same(updates.dims[at], operand.dims[i])
    facts.mixed += [operand.dims[i] for i in numbers.inserted_window_dims]
    return [Seen(operand.dims)]


def _call(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None:
        return _unknown(eqn, given, facts)
    return run(inner, given, facts)


def _scan(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    consts, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    start = given[consts : consts + carried]
    each = given[consts + carried :]
    facts.mixed += [x.dims[0] for x in each]
    outer, facts.times, facts.loops = facts.times, facts.times * eqn.params["length"], facts.loops + 1
    ends = run(eqn.params["jaxpr"], [*given[:consts], *start, *(Seen(x.dims[1:]) for x in each)], facts)
    facts.times, facts.loops = outer, facts.loops - 1
    for before, after in zip(start, ends[:carried], strict=True):
        all_same(before.dims, after.dims)
    stacked = [Seen((Factor(eqn.params["length"]), *y.dims)) for y in ends[carried:]]
    return [*(Seen(x.dims) for x in start), *stacked]


def _while(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = given[skip + consts :]
    facts.loops += 1
    ends = run(eqn.params["body_jaxpr"], given[skip:], facts)
    facts.loops -= 1
    for before, after in zip(start, ends, strict=True):
        all_same(before.dims, after.dims)
    return [Seen(x.dims) for x in start]


def _cond(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    first, *others = [run(branch, given[1:], facts) for branch in eqn.params["branches"]]
    for other in others:
        for a, b in zip(first, other, strict=True):
            all_same(a.dims, b.dims)
    return [Seen(x.dims) for x in first]


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or
polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta name
sharding_constraint device_put pvary
bitcast_convert_type
"""
_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
_CALLS = """
jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
custom_lin linear_call run_state
"""
_CONSTANTS = "iota random_bits random_seed random_wrap random_unwrap threefry2x32 create_token empty"


def _constant(eqn: Any, given: list[Seen], facts: Facts) -> list[Seen]:
    return [Seen(fresh(getattr(v.aval, "shape", ()))) for v in eqn.outvars]


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(_CALLS.split(), _call),
    **dict.fromkeys(_CONSTANTS.split(), _constant),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _reduce_window),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max", "scatter_min"), _scatter),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "cond": _cond,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "optimization_barrier": _each,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "scan": _scan,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split,
    "stack": _stack,
    "squeeze": _squeeze,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "while": _while,
}
"""By the name of the primitive."""
