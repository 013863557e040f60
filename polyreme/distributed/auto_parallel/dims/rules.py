"""Rules of primitives: which dims of the inputs and outputs are the same, which are summed, which are mixed.

The facts about an op follow from the primitives it is made of, so one set of rules serves all ops; those whose kernels
differ by device, such as attention and losses, declare theirs (core/sharding_rule.py; op_rules.py reads it). A
primitive without a rule mixes all dims of its inputs, so that none of them is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from polyreme.core.taylor.primitives import ELEMENTWISE, REDUCTIONS
from polyreme.distributed.auto_parallel.dims.factors import Factor, all_same, fresh, same
from polyreme.distributed.auto_parallel.dims.facts import Facts, KnownArray, Product, Rule, unknown
from polyreme.distributed.auto_parallel.dims.moves import MOVES


def run(jaxpr: Any, given: Sequence[KnownArray], facts: Facts) -> list[KnownArray]:
    """The dims of a jaxpr's outputs. jaxpr: open or closed; given: the dims of its inputs."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, KnownArray] = dict(zip(inner.invars, given, strict=True))
    for var in inner.constvars:
        env[var] = KnownArray(fresh(var.aval.shape))

    def seen(atom: Any) -> KnownArray:
        if isinstance(atom, jex.Literal):
            return KnownArray(fresh(np.shape(atom.val)))
        return env[atom]

    for eqn in inner.eqns:
        rule = RULES.get(eqn.primitive.name, _unknown)
        found = rule(eqn, [seen(v) for v in eqn.invars], facts)
        env.update(zip(eqn.outvars, found, strict=True))
    return [seen(v) for v in inner.outvars]


def _unknown(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    return unknown([getattr(v.aval, "shape", ()) for v in eqn.outvars], given, facts)


def _elementwise(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    """Dims that are one with those of the inputs that have their size; a dim of size 1 may grow."""
    arrays = [x for x in given if x.dims]
    results = []
    for var in eqn.outvars:
        dims = fresh(var.aval.shape)
        same_rank = [x for x in arrays if len(x.dims) == len(dims)]
        for x in same_rank:
            all_same(x.dims, dims)
        alone = len(arrays) == len(same_rank) == 1 and all(
            a.size == b.size for a, b in zip(arrays[0].dims, dims, strict=True)
        )
        results.append(KnownArray(dims, arrays[0].origin if alone else None))
    return results


def _pass_through(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    """Each output is the input at the same position."""
    return given[: len(eqn.outvars)]


def _dot_general(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
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
    return [KnownArray((*batch, *left, *right))]


def _convolution(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    numbers = eqn.params["dimension_numbers"]
    x, w = given[0], given[1]
    dims = list(fresh(eqn.outvars[0].aval.shape))
    if eqn.params["batch_group_count"] == 1:
        dims[numbers.out_spec[0]] = x.dims[numbers.lhs_spec[0]]
    dims[numbers.out_spec[1]] = w.dims[numbers.rhs_spec[0]]
    if eqn.params["feature_group_count"] == 1:
        same(x.dims[numbers.lhs_spec[1]], w.dims[numbers.rhs_spec[1]])
    facts.mixed += [x.dims[i] for i in numbers.lhs_spec[2:]]
    facts.mixed += [w.dims[i] for i in numbers.rhs_spec[2:]]
    facts.channels += [x.dims[numbers.lhs_spec[1]], *(w.dims[i] for i in numbers.rhs_spec[:2])]
    taps = math.prod(w.dims[i].size for i in numbers.rhs_spec[1:])
    facts.convolutions.append((facts.where, 2.0 * facts.times * taps * math.prod(d.size for d in dims)))
    return [KnownArray(tuple(dims))]


def _reduce(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    axes = eqn.params["axes"]
    dims = given[0].dims
    facts.reduced += [dims[i] for i in axes]
    kept = tuple(d for i, d in enumerate(dims) if i not in axes)
    return [KnownArray(kept) for _ in eqn.outvars]


def _call(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None:
        return _unknown(eqn, given, facts)
    return run(inner, given, facts)


def _scan(eqn: Any, inputs: list[KnownArray], facts: Facts) -> list[KnownArray]:
    consts, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    start = inputs[consts : consts + carried]
    each = inputs[consts + carried :]
    facts.mixed += [x.dims[0] for x in each]
    outer, facts.times, facts.loops = facts.times, facts.times * eqn.params["length"], facts.loops + 1
    ends = run(eqn.params["jaxpr"], [*inputs[:consts], *start, *(KnownArray(x.dims[1:]) for x in each)], facts)
    facts.times, facts.loops = outer, facts.loops - 1
    for before, after in zip(start, ends[:carried], strict=True):
        all_same(before.dims, after.dims)
    stacked = [KnownArray((Factor(eqn.params["length"]), *y.dims)) for y in ends[carried:]]
    return [*(KnownArray(x.dims) for x in start), *stacked]


def _while(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = given[skip + consts :]
    facts.loops += 1
    ends = run(eqn.params["body_jaxpr"], given[skip:], facts)
    facts.loops -= 1
    for before, after in zip(start, ends, strict=True):
        all_same(before.dims, after.dims)
    return [KnownArray(x.dims) for x in start]


def _cond(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    first, *others = [run(branch, given[1:], facts) for branch in eqn.params["branches"]]
    for other in others:
        for a, b in zip(first, other, strict=True):
            all_same(a.dims, b.dims)
    return [KnownArray(x.dims) for x in first]


_CALLS = """
jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
custom_lin linear_call run_state
"""
CALLS = frozenset(_CALLS.split())
"""Primitives that call a function."""


_CONSTANTS = """
iota random_bits random_seed random_split random_wrap random_unwrap random_gamma threefry2x32 create_token empty
platform_index
"""


_MATRICES = "cholesky eig eigh lu qr schur svd triangular_solve tridiagonal"


def _matrices(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    """Functions of the matrices in the last two dims: batches go through."""
    batch = given[0].dims[:-2]
    for x in given:
        all_same(x.dims[: len(batch)], batch)
        facts.mixed += x.dims[len(batch) :]
    return [KnownArray((*batch, *fresh(v.aval.shape[len(batch) :]))) for v in eqn.outvars]


def _pivots(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    *batch, rows = given[0].dims
    facts.mixed.append(rows)
    return [KnownArray((*batch, *fresh(eqn.outvars[0].aval.shape[-1:])))]


def _fft(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    count = len(eqn.params["fft_lengths"])
    batch, last = given[0].dims[:-count], given[0].dims[-count:]
    facts.mixed += last
    return [KnownArray((*batch, *fresh(eqn.outvars[0].aval.shape[-count:])))]


def _linear_solve(eqn: Any, arrays: list[KnownArray], facts: Facts) -> list[KnownArray]:
    """The solution, by the function that solves; the others are for derivatives."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    sides = arrays[sum(lengths) :]
    return run(eqn.params["jaxprs"].solve, [*arrays[start : start + lengths.solve], *sides], facts)


def _constant(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    return [KnownArray(fresh(getattr(v.aval, "shape", ()))) for v in eqn.outvars]


RULES: dict[str, Rule] = {
    **MOVES,
    **dict.fromkeys((*ELEMENTWISE.split(), "sharding_constraint", "device_put", "pvary"), _elementwise),
    **dict.fromkeys(REDUCTIONS.split(), _reduce),
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(_CONSTANTS.split(), _constant),
    **dict.fromkeys(_MATRICES.split(), _matrices),
    "cond": _cond,
    "conv_general_dilated": _convolution,
    "custom_linear_solve": _linear_solve,
    "dot_general": _dot_general,
    "fft": _fft,
    "lu_pivots_to_permutation": _pivots,
    "optimization_barrier": _pass_through,
    "scan": _scan,
    "while": _while,
}
"""By the name of the primitive."""
