"""Facts about the dims of a traced model, from the declared rules of its ops where these say more, else from
primitives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyreme.core.op import freeze
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.distributed.auto_parallel.dims.factors import Factor, align, fresh, same
from polyreme.distributed.auto_parallel.dims.facts import Facts, KnownArray, Product, settle_runs, unknown
from polyreme.distributed.auto_parallel.dims.rules import run
from polyreme.distributed.auto_parallel.dims.trace import Traced, TracedOp, TracedValue


def propagate(traced: Traced) -> tuple[dict[TracedValue, KnownArray], Facts]:
    """The dims of every traced value, and the facts about them, after all ops have been looked at."""
    values = {v: KnownArray(fresh(v.shape), v.name) for v in traced.parameters.values()}
    facts, jaxprs = Facts(), {}
    batch = Factor(traced.batch)
    for value in (*traced.inputs, *traced.labels):
        values[value] = KnownArray(fresh(value.shape))
        for dim in values[value].dims[:1]:
            same(dim, batch)
    for index, op in enumerate(traced.ops):
        facts.where = index
        inputs = [values.setdefault(v, KnownArray(fresh(v.shape))) for v in op.inputs]
        rule = _rule_with_roles(op)
        if rule is not None:
            outputs = _by_rule(rule, op, inputs, facts)
        else:
            if op.key not in jaxprs:
                jaxprs[op.key] = op.jaxpr()
            outputs = run(jaxprs[op.key], inputs, facts)
        if len(outputs) != len(op.outputs):
            outputs = unknown([v.shape for v in op.outputs], inputs, facts)
        values.update(zip(op.outputs, outputs, strict=True))
    settle_runs(facts)
    return values, facts


def _rule_with_roles(op: TracedOp) -> ShardingRule | None:
    """The declared rule of a call, if it tells more than the function's primitives: what its dims are to a model."""
    if op.op.rule is None:
        return None
    attrs = {name: freeze(value) for name, value in op.attributes.items()}
    rule = op.op.rule(OpCall.of(op.name, op.names, op.inputs, attrs, op.outputs))
    return rule if rule is not None and rule.roles else None


def _by_rule(rule: ShardingRule, op: TracedOp, inputs: Sequence[KnownArray], facts: Facts) -> list[KnownArray]:
    """The outputs of one call, whose dims of one name are one."""
    dims: dict[str, list[Factor]] = {}
    for names, seen in zip(rule.inputs, inputs, strict=True):
        for name, dim in zip(names, seen.dims, strict=True):
            if name is not None:
                dims.setdefault(name, []).append(dim)
    for first, *others in dims.values():
        for other in others:
            _say_same(first, other)
    for name, role in rule.roles:
        if role == "heads":
            queries, keys, *_ = dims[name]
            facts.heads.append((queries, keys))
            facts.attentions.add(facts.where)
        elif role == "classes":
            facts.classes.append(dims[name][0])
            facts.losses.add(facts.where)
        else:
            facts.products.append(_product(name, rule, inputs, facts))
    outputs = []
    for names, value in zip(rule.outputs, op.outputs, strict=True):
        sizes = zip(names, value.shape, strict=True)
        known = (next((d for d in dims.get(name or "", ()) if d.size == n), Factor(n)) for name, n in sizes)
        outputs.append(KnownArray(tuple(known)))
    return outputs


def _say_same(dim: Factor, other: Factor) -> None:
    """Say that two dims of one name are one: of unequal ones, each element of `other` serves a run of `dim`'s."""
    if dim.size == other.size:
        same(dim, other)
    elif other.size > 1 and dim.size % other.size == 0:
        align([dim], [other, Factor(dim.size // other.size)])


def _product(name: str, rule: ShardingRule, inputs: Sequence[KnownArray], facts: Facts) -> Product:
    """The product that sums over a name, of the first two inputs that have it."""
    sides = [(names, seen) for names, seen in zip(rule.inputs, inputs, strict=True) if name in names]
    (left_names, left), (right_names, right) = sides[0], sides[1]
    summed = tuple((seen.dims[names.index(name)],) for names, seen in sides[:2])
    shared = set(left_names) & set(right_names)
    batch = tuple(d for n, d in zip(left_names, left.dims, strict=True) if n in shared and n != name)
    rows, columns = (
        tuple(d for n, d in zip(names, seen.dims, strict=True) if n not in shared) for names, seen in sides[:2]
    )
    flops = 2.0 * math.prod(d.size for d in (*left.dims, *columns))
    return Product(facts.where, (left.origin, right.origin), (summed[0], summed[1]), batch, rows, columns, flops)
