"""The sharding rule of an op that declares none, derived from the primitives that its function is made of."""

from __future__ import annotations

from typing import Any

from polyreme.core.sharding_rule import DimNames, ShardingRule
from polyreme.core.taylor.primitives import primitives
from polyreme.distributed.auto_parallel.dims.factors import Dims, Factor, fresh, leaves
from polyreme.distributed.auto_parallel.dims.facts import Facts, KnownArray, settle_runs
from polyreme.distributed.auto_parallel.dims.rules import RULES, run


def unknown_primitives(jaxpr: Any) -> list[str]:
    """Primitives of a closed jaxpr that say nothing of dims; an op with some of them has no derived rule."""
    return sorted(set(primitives(jaxpr.jaxpr)) - RULES.keys())


def derived_rule(jaxpr: Any) -> ShardingRule | None:
    """The rule of a function, from its closed jaxpr; None where a primitive of it says nothing of dims.

    A dim of a result that is a dim of an input, or begins with one, goes through; one whose elements depend on each
    other is whole. Nothing is left as addends.
    """
    if unknown_primitives(jaxpr):
        return None
    facts = Facts()
    inputs = [KnownArray(fresh(v.aval.shape)) for v in jaxpr.jaxpr.invars]
    outputs = run(jaxpr, inputs, facts)
    settle_runs(facts)
    mixed = {leaf for dim in facts.mixed for leaf in leaves(dim)}
    names: dict[Factor, str] = {}
    aligned: set[str] = set()

    def named(dims: Dims) -> DimNames:
        tensor: list[str | None] = []
        for dim in dims:
            factors = leaves(dim)
            # a split cuts the outermost factor of a dim
            name = names.setdefault(factors[0], f"f{len(names)}") if factors and factors[0] not in mixed else None
            if name is not None and len(factors) > 1:
                aligned.add(name)
            tensor.append(None if name in tensor else name)
        return tuple(tensor)

    ins, outs = (tuple(named(seen.dims) for seen in side) for side in (inputs, outputs))
    known = {name for tensor in ins for name in tensor}
    outs = tuple(tuple(name if name in known else None for name in tensor) for tensor in outs)
    # XLA's partitioner aborts on some layouts of what a function does inside, and miscounts others: an array cut out of
    # a split one is in uneven pieces, whose padding a scatter adds too
    return ShardingRule(ins, outs, aligned=frozenset(aligned), laid_out=True)
