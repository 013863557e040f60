"""What whole ops say of dims where their kernels differ by device, or hide what they compute: attention and losses."""

from __future__ import annotations

import math
from collections.abc import Callable

from polyreme.distributed.auto_parallel.dims.factors import Factor, align, fresh, same
from polyreme.distributed.auto_parallel.dims.facts import Facts, Product, Seen, settle_runs, unknown
from polyreme.distributed.auto_parallel.dims.rules import run
from polyreme.distributed.auto_parallel.dims.trace import Traced, TracedOp, TracedValue

OpRule = Callable[[TracedOp, dict[str, Seen], Facts], list[Seen]]


def propagate(traced: Traced) -> tuple[dict[TracedValue, Seen], Facts]:
    """What is known of every value, and what the ops say of the dims, once all have been looked at."""
    values = {v: Seen(fresh(v.shape), v.name) for v in traced.parameters.values()}
    facts, jaxprs = Facts(), {}
    batch = Factor(traced.batch)
    for value in (*traced.inputs, *traced.labels):
        values[value] = Seen(fresh(value.shape))
        for dim in values[value].dims[:1]:
            same(dim, batch)
    for at, op in enumerate(traced.ops):
        facts.where = at
        given = [values.setdefault(v, Seen(fresh(v.shape))) for v in op.inputs]
        if op.name in OP_RULES:
            found = OP_RULES[op.name](op, dict(zip(op.names, given, strict=True)), facts)
        else:
            if op.key not in jaxprs:
                jaxprs[op.key] = op.jaxpr()
            found = run(jaxprs[op.key], given, facts)
        if len(found) != len(op.outputs):
            found = unknown([v.shape for v in op.outputs], given, facts)
        values.update(zip(op.outputs, found, strict=True))
    settle_runs(facts)
    return values, facts


def _attention(op: TracedOp, given: dict[str, Seen], facts: Facts) -> list[Seen]:
    """[*b, s, heads, d] attends [*b, t, kv_heads, d]; each key head serves a run of query heads."""
    q, k, v = given["query"].dims, given["key"].dims, given["value"].dims
    for a, b in zip((*q[:-3], q[-1]), (*k[:-3], k[-1]), strict=True):
        same(a, b)
    for a, b in zip(k[:-1], v[:-1], strict=True):
        same(a, b)
    heads, served = q[-2], k[-2]
    if heads.size == served.size:
        same(heads, served)
    elif served.size > 1 and heads.size % served.size == 0:
        align([heads], [served, Factor(heads.size // served.size)])
    facts.heads.append((heads, served))
    return [Seen((*q[:-1], v[-1]))]


def _cross_entropy(op: TracedOp, given: dict[str, Seen], facts: Facts) -> list[Seen]:
    scores, label = given["input"].dims, given["label"].dims
    at = op.attributes.get("axis", -1) % len(scores)
    rest = scores[:at] + scores[at + 1 :]
    if len(label) == len(rest):
        for a, b in zip(rest, label, strict=True):
            same(a, b)
    facts.classes.append(scores[at])
    return _loss(op, rest)


def _linear_cross_entropy(op: TracedOp, given: dict[str, Seen], facts: Facts) -> list[Seen]:
    hidden, weight, label = given["hidden"], given["weight"], given["label"].dims
    classes, width = weight.dims if op.attributes.get("transpose_weight") else reversed(weight.dims)
    same(hidden.dims[-1], width)
    rest = hidden.dims[:-1]
    for a, b in zip(rest, label, strict=False):
        same(a, b)
    flops = 2.0 * math.prod(d.size for d in hidden.dims) * classes.size
    sums = ((hidden.dims[-1],), (width,))
    facts.products.append(Product(facts.where, (hidden.origin, weight.origin), sums, (), rest, (classes,), flops))
    facts.classes.append(classes)
    return _loss(op, rest)


def _loss(op: TracedOp, rest: tuple[Factor, ...]) -> list[Seen]:
    shape = op.outputs[0].shape
    return [Seen(rest if tuple(d.size for d in rest) == shape else fresh(shape))]


OP_RULES: dict[str, OpRule] = {
    "attention": _attention,
    "attention_with_dropout": _attention,
    "cross_entropy_of_classes": _cross_entropy,
    "linear_cross_entropy_of_classes": _linear_cross_entropy,
}
"""By the op's name."""
