"""Logical dims of a model that names none, found from its own ops; printed as a table, overridden by name.

What is inferred decides where tensors live, never what is computed: the partitioner keeps a program's
meaning whatever the placement. A dim of which nothing sure is known stays without a name, whole on every device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyreme.distributed.auto_parallel.dims.factors import Factor
from polyreme.distributed.auto_parallel.dims.facts import Facts, KnownArray
from polyreme.distributed.auto_parallel.dims.op_rules import propagate
from polyreme.distributed.auto_parallel.dims.roles import Roles, is_split_by_mp, roles_of
from polyreme.distributed.auto_parallel.dims.trace import BATCH, Traced, TracedValue, trace
from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer

Names = tuple[str | None, ...]

_OF_PARAMETERS = ("embed", "heads", "kv_heads", "ffn", "vocab", "expert")


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter as the report lists it: its shape, the factors of each dim, its dims, the ops they are from, what to
    know about it, and how many parts each dim can be cut into (0: any that divide its size)."""

    name: str
    shape: tuple[int, ...]
    factors: tuple[str, ...]
    dims: Names
    source: str
    note: str = ""
    parts: tuple[int, ...] = ()


@dataclass
class Inferred:
    """The dims of a model's parameters and activations.

    rows: of each parameter, by name. values, facts, roles: of which the rows are made; what a Graph is made of too.
    overridden: names of the parameters whose dims were overridden.
    """

    traced: Traced
    rows: dict[str, Row]
    values: dict[TracedValue, KnownArray]
    facts: Facts
    roles: Roles
    overridden: frozenset[str] = field(default_factory=frozenset)

    @property
    def dims(self) -> dict[str, Names]:
        """Parameter -> the logical dim of each of its dims."""
        return {name: row.dims for name, row in self.rows.items()}

    def dims_of(self, value: TracedValue) -> Names:
        """The logical dims of an activation; seq inside attention and feed-forward is block_seq."""
        names = [self.roles.name(dim) for dim in self.values[value].dims]
        if any(is_split_by_mp(name) for name in names):
            names = ["block_seq" if name == "seq" else name for name in names]
        return tuple(name if name is None or names.index(name) == at else None for at, name in enumerate(names))

    def fitted(self, plan: Plan) -> tuple[dict[str, Names], list[str]]:
        """(dims of every parameter, names that were left out): a name is left out where the plan's axes do not divide
        the dim, or would cut a head in two. What was overridden stays as it is."""
        fitted, left = {}, []
        rule, movable = plan.strategy.rule("param"), plan.strategy.rule("param").get("*", ())
        for name, row in self.rows.items():
            dims = list(row.dims)
            for at, dim in enumerate(row.dims):
                ways = math.prod(plan.mesh.degree(a) for a in rule.get(dim or "", ()) if a not in movable)
                if name not in self.overridden and (row.parts[at] or row.shape[at]) % ways:
                    dims[at] = None
                    left.append(f"{name}: {dim} in {row.parts[at] or row.shape[at]} parts is not cut in {ways}")
            fitted[name] = tuple(dims)
        return fitted, left

    def set_dims(self, plan: Plan | None = None) -> list[str]:
        """Set the inferred dims on the model's parameters, if a plan is given only those that fit it; returns what was
        left out."""
        dims, left = (self.dims, []) if plan is None else self.fitted(plan)
        for name, parameter in self.traced.model.named_parameters():
            if name in dims:
                parameter.dims = dims[name]
        return left

    def __str__(self) -> str:
        head = ("parameter", "shape", "factors", "dims", "from")
        lines = [head, *_collapse(self.rows.values())]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def infer_dims(
    model: Layer,
    inputs: Sequence[Any],
    labels: Sequence[Any] = (),
    loss: Callable[..., Any] | None = None,
    overrides: Mapping[str, Sequence[str | None]] | None = None,
    batch: int = BATCH,
) -> Inferred:
    """The logical dims of a model's parameters and activations, from one forward that is recorded and not run.

    inputs, labels, loss, batch: as trace takes them; the first dim of each input is the batch. overrides: {parameter's
    dotted name, or a regular expression that matches all of it: dims}, which go before what is inferred. A parameter
    that has dims already (those of annotated layers) keeps them. The model is not changed: see set_dims.

    Raises ConfigError for an override that matches no parameter, or has not one entry for each dim; and as trace does.

    >>> from polyreme.hapi import InputSpec
    >>> from polyreme.nn import Linear, ReLU, Sequential
    >>> print(infer_dims(Sequential(Linear(8, 32), ReLU(), Linear(32, 8)), [InputSpec([None, 8])]))
    parameter  shape    factors  dims        from
    0.weight   [8, 32]  8, 32    embed, ffn  linear: columns
    0.bias     [32]     32       ffn         linear
    2.weight   [32, 8]  32, 8    ffn, embed  linear: rows
    2.bias     [8]      8        embed       linear
    """
    return dims_of_traced(trace(model, inputs, labels, loss, batch), overrides)


def dims_of_traced(traced: Traced, overrides: Mapping[str, Sequence[str | None]] | None = None) -> Inferred:
    """infer_dims of a model that was traced already."""
    values, facts = propagate(traced)
    roles = roles_of(traced, values, facts)
    sources = _sources(traced, roles)
    rows, gates = {}, _gates(roles)
    named = dict(traced.model.named_parameters())
    for name in traced.parameters:
        parameter = named[name]
        seen = values[traced.parameters[name]]
        logical_dims = _parameter_dims(roles, seen, name in gates and len(seen.dims) == 2)
        marked = tuple(parameter.dims)
        source = sources.get(name, "not used")
        if any(marked):
            logical_dims, source = marked, "marked"
        parts = tuple(_parts(roles, dim, logical) for dim, logical in zip(seen.dims, logical_dims, strict=True))
        shown = tuple(map(repr, seen.dims))
        cut = [dim for dim, logical in zip(seen.dims, logical_dims, strict=True) if is_split_by_mp(logical)]
        note = "" if all(map(roles.is_outermost, cut)) else "its parts are not outermost: using it moves them"
        rows[name] = Row(name, tuple(parameter.shape), shown, logical_dims, source, note, parts)
    made = Inferred(traced, rows, values, facts, roles)
    _override(made, overrides or {})
    return made


def _gates(roles: Roles) -> set[str]:
    """Weights that score experts: each device needs all the scores, so they stay whole."""
    return {u.weight for u in roles.uses if any(roles.names.get(leaf) == "expert" for leaf in (*u.rows, *u.columns))}


def _parameter_dims(roles: Roles, seen: KnownArray, is_gate: bool) -> Names:
    """Names that parameters have, each once, and one of those that the same axis splits."""
    names: list[str | None] = []
    for dim in seen.dims:
        name = roles.name(dim)
        taken = name in names or (is_split_by_mp(name) and any(map(is_split_by_mp, names)))
        whole = name == "expert" and (is_gate or len(seen.dims) == 1)
        names.append(name if name in _OF_PARAMETERS and not taken and not whole else None)
    return tuple(names)


def _parts(roles: Roles, dim: Factor, name: str | None) -> int:
    """Equal parts that a dim can be cut into without cutting through a head; 0 for any that divide it."""
    return roles.num_heads(dim) if name in ("heads", "kv_heads") and roles.num_heads(dim) > 1 else 0


def _sources(traced: Traced, roles: Roles) -> dict[str, str]:
    """Parameter -> the ops that read it, and as what."""
    sources: dict[str, dict[str, None]] = {}
    for value, ops in traced.uses().items():
        if value.source == "parameter":
            sources[value.name] = dict.fromkeys(op.name for op in ops)
    for use in roles.uses:
        parts = [("rows", use.rows), ("columns", use.columns), ("batch", use.batch)]
        split = [what for what, side in parts if any(leaf in roles.names for leaf in side)]
        name = traced.ops[use.product.where].name
        if split and name in sources.get(use.weight, {}):
            sources[use.weight] = {
                f"{op}: {' and '.join(split)}" if op == name else op: None for op in sources[use.weight]
            }
    return {name: ", ".join(ops) for name, ops in sources.items()}


def _override(inferred: Inferred, overrides: Mapping[str, Sequence[str | None]]) -> None:
    overridden = set()
    for pattern, dims in overrides.items():
        names = [name for name in inferred.rows if name == pattern or re.fullmatch(pattern, name)]
        if not names:
            raise ConfigError(
                f"overrides: no parameter is named {pattern!r}{did_you_mean(pattern, list(inferred.rows))}"
            )
        for name in names:
            row = inferred.rows[name]
            if isinstance(dims, str) or len(dims) != len(row.shape):
                raise ConfigError(
                    f"overrides: {pattern!r} gives dims {dims!r} to {name} of shape {list(row.shape)}; give a tuple "
                    "with one entry for each dim, None for one without a name"
                )
            inferred.rows[name] = Row(name, row.shape, row.factors, tuple(dims), "override", "", row.parts)
            overridden.add(name)
    inferred.overridden = frozenset(overridden)


def _collapse(rows: Any) -> list[tuple[str, ...]]:
    """Lines of the table; parameters of repeated blocks, equal but for a number in their names, share one."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"\b\d+(?=\.)", "*", row.name)
        groups.setdefault((pattern, row.shape, row.factors, row.dims, row.source), []).append(row)
    lines = []
    for (pattern, *_), group in groups.items():
        row = group[0]
        name = row.name if len(group) == 1 else f"{pattern} ({len(group)})"
        source = f"{row.source} ({row.note})" if row.note else row.source
        dims = ", ".join(d or "-" for d in row.dims)
        lines.append((name, str(list(row.shape)), ", ".join(row.factors), dims, source))
    return lines
