"""Rules of the primitives that move elements: which dims stay as they are, are cut, joined or looked up."""

from __future__ import annotations

from typing import Any

from polyreme.distributed.auto_parallel.dims.factors import Factor, all_same, equal_part, fresh, reshaped, same
from polyreme.distributed.auto_parallel.dims.facts import (
    ElementRun,
    Facts,
    KnownArray,
    Lookup,
    Rule,
    outer_part,
    unknown,
)


def _along(key: str) -> Rule:
    """The dims stay, but along one of them the elements depend on each other."""

    def rule(eqn: Any, inputs: list[KnownArray], facts: Facts) -> list[KnownArray]:
        at = eqn.params[key]
        for i in at if isinstance(at, (tuple, list)) else (at,):
            facts.mixed += [x.dims[i] for x in inputs if len(x.dims) > i]
        for x in inputs[1:]:
            all_same(x.dims, inputs[0].dims)
        fits = [tuple(d.size for d in inputs[0].dims) == tuple(v.aval.shape) for v in eqn.outvars]
        return [
            KnownArray(inputs[0].dims if fit else fresh(v.aval.shape)) for fit, v in zip(fits, eqn.outvars, strict=True)
        ]

    return rule


def _broadcast_in_dim(eqn: Any, inputs: list[KnownArray], facts: Facts) -> list[KnownArray]:
    dims = list(fresh(eqn.params["shape"]))
    for dim, at in zip(inputs[0].dims, eqn.params["broadcast_dimensions"], strict=True):
        if dim.size == dims[at].size:
            dims[at] = dim
    grown = any(d.size not in (1, m) for d, m in zip(inputs[0].dims, eqn.params["shape"], strict=False))
    return [KnownArray(tuple(dims), None if grown else inputs[0].origin)]


def _reshape(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    if eqn.params.get("dimensions") is not None:
        return unknown([v.aval.shape for v in eqn.outvars], given, facts)
    return [KnownArray(reshaped(given[0].dims, eqn.outvars[0].aval.shape), given[0].origin)]


def _squeeze(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    axes = eqn.params["dimensions"]
    return [KnownArray(tuple(d for i, d in enumerate(given[0].dims) if i not in axes), given[0].origin)]


def _transpose(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    return [KnownArray(tuple(given[0].dims[i] for i in eqn.params["permutation"]), given[0].origin)]


def _run(dim: Factor, start: int | None, size: int, facts: Facts) -> Factor:
    """A run of a dim's elements from start on; None: from where is not known."""
    if size == dim.size:
        return dim
    factor = Factor(size)
    if start is None or size <= 1:
        facts.mixed.append(dim)
    else:
        facts.runs.append(ElementRun(dim, factor, start))
    return factor


def _slice(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"] or [1] * len(given[0].dims)
    made = []
    for dim, start, stride, size in zip(given[0].dims, starts, strides, eqn.outvars[0].aval.shape, strict=True):
        made.append(_run(dim, start if stride == 1 else None, size, facts))
    return [KnownArray(tuple(made))]


def _dynamic_slice(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    sizes = eqn.params["slice_sizes"]
    return [KnownArray(tuple(_run(d, None, n, facts) for d, n in zip(given[0].dims, sizes, strict=True)))]


def _dynamic_update_slice(eqn: Any, inputs: list[KnownArray], facts: Facts) -> list[KnownArray]:
    for dim, new in zip(inputs[0].dims, inputs[1].dims, strict=True):
        if dim.size == new.size:
            same(dim, new)
        else:
            facts.mixed += [dim, new]
    return [KnownArray(inputs[0].dims)]


def _concatenate(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    axis = eqn.params["dimension"]
    dims = list(fresh(eqn.outvars[0].aval.shape))
    sizes = {x.dims[axis].size for x in given}
    for x in given:
        for i, dim in enumerate(x.dims):
            if i != axis:
                same(dim, dims[i])
            elif len(sizes) == 1 and dim.size > 1:
                same(equal_part(dims[axis], dim.size), dim)
            else:
                facts.mixed.append(dim)
    facts.mixed.append(outer_part(dims[axis], sizes.pop()) if len(sizes) == 1 and min(sizes) > 1 else dims[axis])
    return [KnownArray(tuple(dims))]


def _split_rule(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    at, sizes, dims = eqn.params["axis"], eqn.params["sizes"], given[0].dims
    found, start = [], 0
    for size in sizes:
        found.append(KnownArray((*dims[:at], _run(dims[at], start, size, facts), *dims[at + 1 :])))
        start += size
    return found


def _tile(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    dims = list(fresh(eqn.outvars[0].aval.shape))
    for i, (dim, times) in enumerate(zip(given[0].dims, eqn.params["reps"], strict=True)):
        if times == 1:
            dims[i] = dim
        elif dim.size > 1:
            same(equal_part(dims[i], dim.size), dim)
    return [KnownArray(tuple(dims))]


def _reduce_window(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    results = []
    for x, var in zip(given, eqn.outvars, strict=False):
        dims = list(fresh(var.aval.shape))
        for i, (dim, window) in enumerate(zip(x.dims, eqn.params["window_dimensions"], strict=True)):
            if window == 1 and dim.size == dims[i].size:
                dims[i] = dim
            else:
                facts.mixed.append(dim)
        results.append(KnownArray(tuple(dims)))
    return results


def _stack(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    at = eqn.params["axis"]
    for x in given[1:]:
        all_same(x.dims, given[0].dims)
    return [KnownArray((*given[0].dims[:at], Factor(len(given)), *given[0].dims[at:]))]


def _top_k(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    dims = given[0].dims
    facts.mixed.append(dims[-1])
    return [KnownArray((*dims[:-1], Factor(v.aval.shape[-1]))) for v in eqn.outvars]


def _pad(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    dims = list(fresh(eqn.outvars[0].aval.shape))
    for i, (dim, config) in enumerate(zip(given[0].dims, eqn.params["padding_config"], strict=True)):
        if config == (0, 0, 0):
            dims[i] = dim
        else:
            facts.mixed += [dim, dims[i]]
    return [KnownArray(tuple(dims))]


def _gather(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    """Rows of a table: whole dims of the operand stay, those that are indexed give way to the indexes' dims."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indexes = given[0], given[1]
    dims = list(fresh(eqn.outvars[0].aval.shape))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(operand.dims)) if i not in gone]
    whole_dims = []
    for out_dim, i in zip(numbers.offset_dims, window, strict=True):
        if sizes[i] == operand.dims[i].size:
            dims[out_dim] = operand.dims[i]
            whole_dims.append(operand.dims[i])
        else:
            facts.mixed.append(operand.dims[i])
    outer = [i for i in range(len(dims)) if i not in numbers.offset_dims]
    for out_dim, dim in zip(outer, indexes.dims[:-1], strict=True):
        same(dims[out_dim], dim)
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        same(operand.dims[i], indexes.dims[j])
    rows = [operand.dims[i] for i in numbers.collapsed_slice_dims]
    facts.mixed += rows
    if len(rows) == 1:
        facts.lookups.append(Lookup(facts.where, operand.origin, rows[0], tuple(whole_dims), indexes.dims[:-1]))
    return [KnownArray(tuple(dims))]


def _scatter(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    numbers = eqn.params["dimension_numbers"]
    operand, updates = given[0], given[2]
    window = [
        i for i in range(len(operand.dims)) if i not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    for at, i in zip(numbers.update_window_dims, window, strict=True):
        same(updates.dims[at], operand.dims[i])
    facts.mixed += [operand.dims[i] for i in numbers.inserted_window_dims]
    return [KnownArray(operand.dims)]


def _unstack(eqn: Any, given: list[KnownArray], facts: Facts) -> list[KnownArray]:
    axis, dims = eqn.params["axis"], given[0].dims
    facts.mixed.append(dims[axis])
    return [KnownArray((*dims[:axis], *dims[axis + 1 :])) for _ in eqn.outvars]


MOVES: dict[str, Rule] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _reduce_window),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min", "scatter-sub"), _scatter),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split_rule,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
"""By the name of the primitive."""
