"""The role of each factor of a model's dims: batch, sequence, width of the residual stream, heads, hidden, vocabulary,
experts.

A factor can be split over devices that then work on their parts alone if some weights make it (their columns
are split) and other weights sum over it (their rows are), and nothing between mixes its parts: Megatron's pairs,
arXiv:1909.08053, found in any graph. No weight is split in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polyreme.distributed.auto_parallel.dims.factors import Dims, Factor, count, leaves
from polyreme.distributed.auto_parallel.dims.facts import Facts, KnownArray, Product
from polyreme.distributed.auto_parallel.dims.trace import Traced, TracedValue

WIDE = 4
"""A last layer with this many times as many classes as inputs is split like a vocabulary."""

_MP = ("heads", "kv_heads", "ffn", "vocab")


@dataclass(frozen=True, slots=True)
class Use:
    """A weight in a product: its leaves that are summed over, that it gives to the result, and that both sides have;
    summed: the dims of the first.
    """

    product: Product
    weight: str
    rows: tuple[Factor, ...]
    columns: tuple[Factor, ...]
    batch: tuple[Factor, ...]
    summed: Dims

    @property
    def all(self) -> tuple[Factor, ...]:
        """Every leaf of the weight."""
        return (*self.rows, *self.columns, *self.batch)


@dataclass
class Roles:
    """Names of factors, derived from facts. names: factor -> dim; heads: factors that count attention heads; uses: of
    weights in products; embed: factors of the residual stream's width."""

    names: dict[Factor, str] = field(default_factory=dict)
    heads: set[Factor] = field(default_factory=set)
    uses: list[Use] = field(default_factory=list)
    embed: set[Factor] = field(default_factory=set)
    grouped: dict[Factor, int] = field(default_factory=dict)

    def name(self, dim: Factor) -> str | None:
        """The logical dim that a parameter's or activation's dim has; None if it has none."""
        parts = leaves(dim)
        named = next((f for f in parts if f in self.names), None)
        if named is None:
            return "embed" if any(f in self.embed for f in parts) else None
        if self.names[named] == "heads" and self.num_heads(dim) < self.grouped.get(named, 0):
            return "kv_heads"
        return self.names[named]

    def num_heads(self, dim: Factor) -> int:
        """Attention heads that a dim holds."""
        return count(f for f in leaves(dim) if f in self.heads)

    def is_outermost(self, dim: Factor) -> bool:
        """Whether equal parts of the dim are equal parts of its named factor: not so where q, k and v lie side by side
        in one weight."""
        parts = leaves(dim)
        return bool(parts) and (parts[0] in self.names or not any(f in self.names for f in parts))


def roles_of(traced: Traced, values: dict[TracedValue, KnownArray], facts: Facts) -> Roles:
    """The roles of all factors."""
    roles = Roles()
    batch = _all_leaves(values[v].dims[:1] for v in traced.inputs)
    roles.uses = _uses(facts)
    roles.heads = _heads(facts, batch)
    _name_vocabulary(roles, traced, values, facts, batch)
    for use in roles.uses:
        for leaf in use.batch:
            if leaf not in roles.heads and leaf not in batch:
                roles.names.setdefault(leaf, "expert")
    _name_hidden(roles, facts, batch)
    _name_embed(roles, facts)
    _note_groups(roles, values)
    _name_activations(roles, traced, values, batch)
    return roles


def _all_leaves(many: Iterable[Iterable[Factor]]) -> set[Factor]:
    return {leaf for dims in many for dim in dims for leaf in leaves(dim)}


def _flat(dims: Dims) -> tuple[Factor, ...]:
    return tuple(leaf for dim in dims for leaf in leaves(dim))


def _uses(facts: Facts) -> list[Use]:
    uses = []
    for product in facts.products:
        left, right = product.weights
        if (left is None) == (right is None):
            continue
        columns = product.left if left is not None else product.right
        weight = left or right or ""
        summed = product.contracted[0 if left is not None else 1]
        uses.append(Use(product, weight, _flat(summed), _flat(columns), _flat(product.batch), summed))
    return uses


def _heads(facts: Facts, batch: set[Factor]) -> set[Factor]:
    """Factors that attention, or a product of two activations, works on one by one."""
    found = _all_leaves(pair for pair in facts.heads)
    found |= _all_leaves(p.batch for p in facts.products if p.of_activations)
    return found - batch


def _name_vocabulary(
    roles: Roles, traced: Traced, values: dict[TracedValue, KnownArray], facts: Facts, batch: set[Factor]
) -> None:
    """Tables whose rows the inputs choose, and last layers as wide as one of them or much wider than what they read."""
    sizes = set()
    for lookup in facts.lookups:
        chosen = batch & set(_flat(lookup.indexes))
        if lookup.table is not None and chosen and lookup.rows.size >= count(lookup.width):
            roles.names.update(dict.fromkeys(leaves(lookup.rows)[:1], "vocab"))
            sizes.add(lookup.rows.size)
    last = [*facts.classes, *(values[v].dims[-1] for v in traced.outputs if v in values and v.shape)]
    ends = {leaf: dim.size for dim in last for leaf in leaves(dim)[:1]}
    for use in roles.uses:
        for leaf in use.columns[:1]:
            size = ends.get(leaf)
            if size is not None and (size in sizes or size >= WIDE * count(use.rows)):
                roles.names.setdefault(leaf, "vocab")


def _name_hidden(roles: Roles, facts: Facts, batch: set[Factor]) -> None:
    """Choose what lies between weights that are split by columns and weights that are split by rows."""
    mixed = _all_leaves([facts.mixed, facts.channels]) | batch
    reduced = _all_leaves([facts.reduced])
    columns = {leaf for use in roles.uses for leaf in use.columns}
    columns |= _all_leaves((part,) for whole, part in facts.pieces if columns & set(leaves(whole)))
    twice = {leaf for use in roles.uses for side in (use.rows, use.columns) for leaf in side if side.count(leaf) > 1}
    summed = {leaf for use in roles.uses for leaf in use.rows}
    touching: dict[Factor, list[Use]] = {}
    for use in roles.uses:
        for leaf in dict.fromkeys((*use.rows, *use.columns)):
            touching.setdefault(leaf, []).append(use)
    taken = {use.weight for use in roles.uses if any(roles.names.get(leaf) == "vocab" for leaf in use.all)}
    depth = {leaf: min(_depth(leaf, use) for use in uses) for leaf, uses in touching.items()}
    able = [leaf for leaf in touching if leaf in columns & summed and leaf not in mixed | twice | roles.names.keys()]
    # heads first, then what only its own weights touch (a feed-forward's hidden), last what many do (the residual
    # stream); of equals, what saves most arithmetic for what its sums send
    able.sort(key=lambda f: (depth[f], f not in roles.heads, f in reduced, len(touching[f]), -_worth(f, touching[f])))
    for leaf in able:
        weights = {use.weight for use in touching[leaf]}
        both = any(leaf in use.rows and leaf in use.columns for use in touching[leaf])
        if weights & taken or both:
            continue
        taken |= weights
        roles.names[leaf] = "heads" if leaf in roles.heads else "ffn"


def _depth(leaf: Factor, use: Use) -> int:
    side = use.rows if leaf in use.rows else use.columns
    return side.index(leaf)


def _worth(leaf: Factor, uses: Sequence[Use]) -> float:
    """FLOP split for each element that is summed over devices, forward and backward."""
    sent = sum(use.product.flops / (2 * count(use.columns if leaf in use.columns else use.rows)) for use in uses)
    return sum(use.product.flops for use in uses) / sent if sent else 0.0


def _name_embed(roles: Roles, facts: Facts) -> None:
    """The other dim of every weight that is split, and the width of vocabularies."""
    for use in roles.uses:
        for one, other in ((use.rows, use.columns), (use.columns, use.rows)):
            if any(leaf in roles.names for leaf in (*one, *use.batch)) and not roles.names.keys() & set(other):
                roles.embed |= set(other)
    for lookup in facts.lookups:
        if lookup.table is not None and any(roles.names.get(leaf) == "vocab" for leaf in leaves(lookup.rows)):
            roles.embed |= set(_flat(lookup.width))
    roles.embed -= roles.names.keys()


def _note_groups(roles: Roles, values: dict[TracedValue, KnownArray]) -> None:
    """For each factor named heads, the most heads that a parameter's dim with it holds: the queries'."""
    for value, seen in values.items():
        if value.source == "parameter":
            for dim in seen.dims:
                heads = roles.num_heads(dim)
                for leaf in leaves(dim):
                    if roles.names.get(leaf) == "heads":
                        roles.grouped[leaf] = max(roles.grouped.get(leaf, 0), heads)


def _name_activations(roles: Roles, traced: Traced, values: dict[TracedValue, KnownArray], batch: set[Factor]) -> None:
    """batch, and seq: what most activations of the residual stream have besides batch and width."""
    roles.names.update(dict.fromkeys(batch, "batch"))
    others: Counter[Factor] = Counter()
    for op in traced.ops:
        for value in op.outputs:
            dims = values[value].dims
            if len(dims) < 3 or roles.name(dims[-1]) != "embed" or not any(roles.name(d) == "batch" for d in dims):
                continue
            others.update(leaf for dim in dims[:-1] for leaf in leaves(dim) if leaf not in roles.names)
    if others:
        roles.names[others.most_common(1)[0][0]] = "seq"


def is_split_by_mp(name: str | None) -> bool:
    """Whether tensor parallelism splits this logical dim."""
    return name in _MP
