"""A feed-forward network chosen for each token: rows sorted by expert, computed in groups, brought back and summed.

experts: all on this device. exchanged_experts: experts split over mesh axes, in one of four ways with equal results:

    gather   every device gets all tokens of its group, computes those of its own experts, and what devices give is
             summed and scattered. Volume does not grow with the number of choices.
    padded   all-to-all of rows for each device, filled up to the most that one can send.
    ragged   all-to-all of just the rows that there are; XLA has none on CPU.
    balanced all devices compute equally many rows, of hot experts in other places than at home: balanced_experts.

Tokens that these axes do not split are computed on every device by the experts it has, and summed.

Nothing is dropped here: a choice of -1 is one that a router left out. Sources: arXiv:2006.16668 (all-to-all),
arXiv:2211.15841 (no capacity). Shape legend: t tokens, k choices of each, e experts, d width, f width inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels import select
from polyreme.kernels.balanced_experts import balanced_experts
from polyreme.kernels.grouped import grouped_matmul
from polyreme.kernels.rows import Groups, combine, exchange, route, route_tokens

Axes = tuple[str, ...]
Dispatcher = Literal["gather", "padded", "ragged", "balanced"]


class RowFFN(Protocol):
    """The function of the experts: rows [R, d] in groups of sizes [e], with all experts' weights -> [R, d]."""

    def __call__(self, rows: jax.Array, sizes: jax.Array, weights: Any) -> jax.Array: ...


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


_CLAMP, _SLOPE = 7.0, 1.702


def clamped_swiglu(gate: Any, up: Any, sigmoid: Callable[[Any], Any] = jax.nn.sigmoid) -> Any:
    """(up + 1) gate sigmoid(1.702 gate), the gate at most 7 and up within 7 of 0, of arrays or Tensors.

    Source: OpenAI, 2025, arXiv:2508.10925 (gpt-oss).
    """
    gate = gate.clip(max=_CLAMP)
    return (up.clip(-_CLAMP, _CLAMP) + 1) * (gate * sigmoid(gate * _SLOPE))


GATES: dict[str, Callable[..., Any]] = {"clamped_swiglu": clamped_swiglu}
"""What is made of gate and up where that is more than activation(gate) * up."""


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What an expert with a gate hands on to down."""
    return GATES[activation](gate, up) if activation in GATES else ACTIVATIONS[activation](gate) * up


class ExpertWeights(NamedTuple):
    """Weights of e experts. An expert gives activation(x up + up_bias) down + down_bias, or, with gate,
    gated(activation, x gate + gate_bias, x up + up_bias) down + down_bias.

    up, gate [e, d, f]; down [e, f, d]; up_bias, gate_bias [e, f]; down_bias [e, d].
    """

    up: jax.Array
    down: jax.Array
    gate: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    gate_bias: jax.Array | None = None


@dataclass(frozen=True)
class ExpertSplit:
    """The layout of tokens and experts over a mesh: the axes that split each leading dim of the tokens, the experts,
    and the experts' inner width, outermost first. The experts' axes are among the tokens', or none is. between: those
    of the experts' axes, the first ones, that lead from node to node, where rows go within nodes first. parts: how many
    the tokens of a device are sent in, so that experts compute one while others are on their way."""

    mesh: Mesh
    tokens: tuple[Axes, ...]
    experts: Axes
    inner: Axes = ()
    between: Axes = ()
    parts: int = 1

    @property
    def levels(self) -> tuple[Axes, ...]:
        """As rows.exchange takes them."""
        within = self.experts[len(self.between) :]
        return (self.between, within) if self.between and within else (self.experts,)

    def ways(self, axes: Axes) -> int:
        """Number of parts along these axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    @property
    def parts_tokens(self) -> bool:
        """Whether the experts' axes split the tokens too."""
        return set(self.experts) <= {a for axes in self.tokens for a in axes}

    def token_spec(self, ndim: int) -> PartitionSpec:
        """Layout of an array whose leading dims are the tokens'."""
        first, *rest = self.tokens
        used = {*self.experts, *self.inner, *(a for axes in self.tokens for a in axes)}
        # axes of one device, named here, keep a backward pass from summing over them
        idle = tuple(a for a, n in self.mesh.shape.items() if n == 1 and a not in used)
        entries = [first + idle, *rest]
        return PartitionSpec(*(axes or None for axes in entries), *[None] * (ndim - len(entries)))

    def weight_specs(self, weights: ExpertWeights) -> ExpertWeights:
        """Layout of the experts' weights."""
        experts, inner = self.experts or None, self.inner or None
        across = PartitionSpec(experts, None, inner)
        each = PartitionSpec(experts, inner)
        specs = (across, PartitionSpec(experts, inner, None), across, each, PartitionSpec(experts), each)
        return ExpertWeights._make(None if w is None else spec for w, spec in zip(weights, specs, strict=True))


def experts(
    x: jax.Array,
    choices: jax.Array,
    gates: jax.Array,
    weights: ExpertWeights,
    activation: str,
    row_capacity: int | None = None,
) -> jax.Array:
    """sum over k of gates[..., k] * expert[choices[..., k]](x): [..., d], [..., k] twice -> [..., d].

    choices: integers, -1 for none. row_capacity: each expert is chosen by at most so many of the s tokens of an entry
    of x [..., s, d], and room is made for no more. Raises ShapeError for dims that do not fit, ConfigError for an
    unknown activation.
    """
    _check(x, choices, gates, weights, activation)
    ffn = partial(_ffn, activation=activation)
    return row_experts(x, choices, gates, weights, weights.up.shape[0], ffn, row_capacity)


def row_experts(
    x: jax.Array,
    choices: jax.Array,
    gates: jax.Array,
    weights: Any,
    count: int,
    ffn: RowFFN,
    row_capacity: int | None = None,
) -> jax.Array:
    """experts that compute ffn, count of them."""
    most = _most_of_an_expert(x, row_capacity)
    out = _at_home(_as_rows(x), _as_rows(choices), _as_rows(gates), count, partial(ffn, weights=weights), most)
    return out.astype(x.dtype).reshape(x.shape)


def exchanged_experts(
    x: jax.Array,
    choices: jax.Array,
    gates: jax.Array,
    weights: ExpertWeights,
    activation: str,
    *,
    split: ExpertSplit,
    how: Dispatcher,
    row_capacity: int | None = None,
) -> jax.Array:
    """The same as experts, over the devices of `split`: x [..., d] with its leading dims split by split.tokens -> the
    same.

    Raises ShapeError for sizes that do not divide, ConfigError for "ragged" where the backend has no such exchange and
    for "balanced" with a row_capacity.
    """
    _check(x, choices, gates, weights, activation)
    _check_split(x, weights, split)

    def ffn(rows: jax.Array, sizes: jax.Array, weights: ExpertWeights) -> jax.Array:
        if split.inner and weights.down_bias is not None:
            # each device has an addend, and the first one the bias
            first = lax.axis_index(split.inner) == 0
            weights = weights._replace(down_bias=jnp.where(first, weights.down_bias, 0))
        return _ffn(rows, sizes, weights, activation)

    specs = split.weight_specs(weights)
    return exchanged_row_experts(
        x, choices, gates, weights, weights.up.shape[0], ffn, specs=specs, split=split, how=how,
        row_capacity=row_capacity,
    )  # fmt: skip


def exchanged_row_experts(
    x: jax.Array,
    choices: jax.Array,
    gates: jax.Array,
    weights: Any,
    count: int,
    ffn: RowFFN,
    *,
    specs: Any,
    split: ExpertSplit,
    how: Dispatcher,
    row_capacity: int | None = None,
) -> jax.Array:
    """row_experts over the devices of `split`, weights laid out by specs."""
    if how == "ragged" and select.backend() == "cpu":
        raise ConfigError("experts: dispatch 'ragged' needs XLA's ragged all-to-all, which CPU has not; use 'padded'")
    if how == "balanced" and row_capacity is not None:
        raise ConfigError(
            "experts: expert_dispatch 'balanced' where experts choose their tokens, so that all compute equally many "
            "already; use 'padded' or 'auto'"
        )
    ways = split.ways(split.experts)
    count //= ways
    by_expert = PartitionSpec(split.experts)
    stacked = [PartitionSpec(*spec[:1]) == by_expert for spec in jax.tree.leaves(specs, is_leaf=_is_spec)]

    def exchanged(tokens: tuple[jax.Array, jax.Array, jax.Array], weights: Any, most: int | None) -> jax.Array:
        if how == "balanced":
            return balanced_experts(*tokens, weights, stacked, count, ways, split.levels, ffn)
        return _DISPATCH[how](split, *tokens, count, partial(ffn, weights=weights), most)

    def local(x: jax.Array, choices: jax.Array, gates: jax.Array, weights: Any) -> jax.Array:
        tokens = rows, chosen, weighs = _as_rows(x), _as_rows(choices), _as_rows(gates)
        compute, most = partial(ffn, weights=weights), _most_of_an_expert(x, row_capacity)
        if not split.experts:
            out = _at_home(*tokens, count, compute, most)
        elif split.parts_tokens:
            parts = max(1, min(split.parts, len(rows)))
            cut = partial(jnp.array_split, indices_or_sections=parts)
            pieces = zip(cut(rows), cut(chosen), cut(weighs), strict=True)
            most = _most_of_an_expert(x, row_capacity, parts)
            out = jnp.concatenate([exchanged(piece, weights, most) for piece in pieces])
        else:
            out = _at_home(rows, _choices_here(split, chosen, count), weighs, count, compute, most)
        return out.reshape(1, *x.shape)

    spec = split.token_spec(x.ndim)
    # of experts or widths that the devices of some tokens share, each device has an addend
    shared = split.inner + (() if split.parts_tokens else split.experts)
    out_spec = PartitionSpec(shared or None, *spec)
    # check_vma off: the loops over blocks start from zeros that do not vary over devices
    over = jax.shard_map(
        local, mesh=split.mesh, in_specs=(spec, spec, spec, specs), out_specs=out_spec, check_vma=False
    )
    # summed out here, where XLA knows that a sum's gradient needs no communication
    return over(x, choices, gates, weights).sum(0).astype(x.dtype)


def _check(x: jax.Array, choices: jax.Array, gates: jax.Array, weights: ExpertWeights, activation: str) -> None:
    known = ACTIVATIONS if weights.gate is None else {**ACTIVATIONS, **GATES}
    if activation not in known:
        raise ConfigError(f"experts: unknown activation {activation!r}; one of {', '.join(known)}")
    if choices.shape != gates.shape or choices.shape[:-1] != x.shape[:-1] or x.ndim < 2:
        raise ShapeError(
            f"experts: x {list(x.shape)}, choices {list(choices.shape)} and gates {list(gates.shape)}; needs "
            "[..., d] and twice [..., k]"
        )
    if weights.up.ndim == 3 and choices.shape[-1] > weights.up.shape[0]:
        raise ShapeError(
            f"experts: {choices.shape[-1]} choices of a token among {weights.up.shape[0]} experts; they differ, so "
            "give at most as many"
        )
    up, down, gate, up_bias, down_bias, gate_bias = weights
    e, d, f = up.shape if up.ndim == 3 else (0, 0, 0)
    wanted = {
        "up": (up, (e, x.shape[-1], f)),
        "down": (down, (e, f, d)),
        "gate": (gate, (e, d, f)),
        "up_bias": (up_bias, (e, f)),
        "down_bias": (down_bias, (e, d)),
        "gate_bias": (gate_bias, (e, f)),
    }
    if gate is None and gate_bias is not None:
        raise ShapeError("experts: gate_bias without gate; give both or neither")
    for name, (weight, shape) in wanted.items():
        if weight is not None and weight.shape != shape:
            raise ShapeError(
                f"experts: {name} {list(weight.shape)} for x {list(x.shape)} and up {list(up.shape)}; needs "
                f"{list(shape)}"
            )


def _check_split(x: jax.Array, weights: ExpertWeights, split: ExpertSplit) -> None:
    count, _, inner = weights.up.shape
    parts = [*zip(x.shape, split.tokens, strict=False), (count, split.experts), (inner, split.inner)]
    what = [*(f"dim {i} of x" for i in range(len(split.tokens))), "experts", "inner width"]
    for name, (size, axes) in zip(what, parts, strict=True):
        if size % split.ways(axes):
            raise ShapeError(
                f"experts: {name} of size {size} does not divide into {split.ways(axes)} equal parts over mesh axis "
                f"{'+'.join(axes)}"
            )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _as_rows(x: jax.Array) -> jax.Array:
    """[..., n] -> [tokens, n]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _most_of_an_expert(x: jax.Array, row_capacity: int | None, parts: int = 1) -> int | None:
    """Most tokens of one of as many parts of x [..., s, d] that choose the same expert; None for all."""
    if row_capacity is None:
        return None
    sequences, seq = math.prod(x.shape[:-2]), x.shape[-2]
    # a part that does not begin with a sequence has some of one more
    touched = sequences // parts if sequences % parts == 0 else sequences // parts + 2
    return min(-(-sequences * seq // parts), touched * min(row_capacity, seq))


def _most_rows(t: int, k: int, count: int, most: int | None) -> int:
    """Most rows that choices [t, k] can be of `count` experts, each chosen by `most` tokens at most."""
    rows = t * min(k, count)
    return rows if most is None else min(rows, count * most)


# ---- one device ----


def _ffn(rows: jax.Array, sizes: jax.Array, weights: ExpertWeights, activation: str) -> jax.Array:
    """Each group's rows through its expert."""
    up, down, gate, up_bias, down_bias, gate_bias = jax.tree.map(lambda w: w.astype(rows.dtype), weights)
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)

    def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        out = grouped_matmul(x, weight, sizes)
        return out if bias is None else out + grouped_matmul(ones, bias[:, None], sizes)

    hidden = linear(rows, up, up_bias)
    if gate is None:
        hidden = ACTIVATIONS[activation](hidden)
    else:
        hidden = gated(activation, linear(rows, gate, gate_bias), hidden)
    return linear(hidden, down, down_bias)


# ---- over devices ----


def _at_home(rows, choices, gates, count, ffn, most) -> jax.Array:
    """The tokens' choices among `count` experts of this device."""
    t, k = choices.shape
    groups = Groups.of(choices.reshape(-1), count, _most_rows(t, k, count, most))
    place = groups.place.reshape(t, k) if most is None else None
    y = ffn(route_tokens(rows, groups.order, place, k), groups.sizes)
    return combine(y, place, groups.order, gates)


def _choices_here(split: ExpertSplit, choices: jax.Array, count: int) -> jax.Array:
    """Choices by their number on this device; those of other devices' experts are out of 0 .. count - 1."""
    return jnp.where(choices >= 0, choices - lax.axis_index(split.experts) * count, -1)


def _by_gathering(split, rows, choices, gates, count, ffn, most) -> jax.Array:
    rows, choices, gates = (lax.all_gather(a, split.experts, tiled=True) for a in (rows, choices, gates))
    most = None if most is None else most * split.ways(split.experts)
    out = _at_home(rows, _choices_here(split, choices, count), gates, count, ffn, most)
    return lax.psum_scatter(out, split.experts, tiled=True)


def _by_padding(split, rows, choices, gates, count, ffn, most) -> jax.Array:
    t, k = choices.shape
    outgoing = _Outgoing.of(split, choices, count)
    slots = _most_rows(t, k, count, most)
    slot = lax.iota(jnp.int32, slots)
    # the choice that each slot holds, t * k for none: [ways * slots], the first `slots` for the first device
    nth = jnp.where(slot < outgoing.sizes[:, None], outgoing.starts[:, None] + slot, t * k)
    choice = outgoing.groups.order.at[nth].get(mode="fill", fill_value=t * k).reshape(-1)
    place = outgoing.device * slots + outgoing.groups.place - outgoing.starts[outgoing.device]
    place = jnp.where(outgoing.groups.place < t * k, place, len(choice)).reshape(t, k) if most is None else None

    received = exchange(route_tokens(rows, choice, place, k), split.levels)
    counts = exchange(outgoing.counts, split.levels)
    expert = jax.vmap(lambda ends: jnp.searchsorted(ends, slot, side="right"))(jnp.cumsum(counts, 1))
    back = _by_expert(received, expert.reshape(-1), count, ffn)
    return combine(exchange(back, split.levels), place, choice, gates)


def _by_ragged_exchange(split, rows, choices, gates, count, ffn, most) -> jax.Array:
    t, k = choices.shape
    outgoing = _Outgoing.of(split, choices, count)
    slots = _most_rows(t, k, count, most)
    order = outgoing.groups.order[: slots * split.ways(split.experts)]
    place = outgoing.groups.place.reshape(t, k) if most is None else None
    me = lax.axis_index(split.experts)
    # [from, to, expert]: rows on their way
    counts = lax.all_gather(outgoing.counts, split.experts)
    sizes = counts.sum(2, dtype=jnp.int32)
    arrives = _starts(sizes, 0)[me]  # where my rows begin on each device
    leaves = _starts(sizes, 1)[:, me]  # where rows for me begin on each device
    incoming = sizes[:, me]
    begins = _starts(incoming, 0)

    sent = route_tokens(rows, order, place, k)
    room = jnp.zeros((len(sizes) * slots, rows.shape[1]), rows.dtype)
    received = lax.ragged_all_to_all(
        sent, room, outgoing.starts, outgoing.sizes, arrives, incoming, axis_name=split.experts
    )
    ends = jnp.cumsum(counts[:, me].reshape(-1))
    nth = jnp.searchsorted(ends, lax.iota(jnp.int32, len(room)), side="right")
    expert = jnp.where(nth < len(ends), nth % count, count)
    back = lax.ragged_all_to_all(
        _by_expert(received, expert, count, ffn),
        jnp.zeros_like(sent),
        begins,
        incoming,
        leaves,
        outgoing.sizes,
        axis_name=split.experts,
    )
    return combine(back, place, order, gates)


class _Outgoing(NamedTuple):
    """The rows that this device sends, sorted by expert and so by device.

    device [t * k]: of each choice, the device that has the expert. counts [ways, experts of a device]: rows for each.
    sizes, starts [ways]: rows for each device, and where they begin among the sorted.
    """

    groups: Groups
    device: jax.Array
    counts: jax.Array
    sizes: jax.Array
    starts: jax.Array

    @classmethod
    def of(cls, split: ExpertSplit, choices: jax.Array, count: int) -> _Outgoing:
        """Of choices [t, k] among experts of which each device has `count`."""
        ways = split.ways(split.experts)
        groups = Groups.of(choices.reshape(-1), ways * count, choices.size)
        counts = groups.sizes.reshape(ways, count)
        sizes = counts.sum(1, dtype=jnp.int32)
        device = jnp.where(choices >= 0, choices // count, 0).reshape(-1)
        return cls(groups, device, counts, sizes, _starts(sizes, 0))


def _starts(sizes: jax.Array, axis: int) -> jax.Array:
    """The start of each part among parts of these sizes, int32: a TPU's exchange takes no offsets of 64 bits."""
    return jnp.cumsum(sizes, axis, dtype=jnp.int32) - sizes


def _by_expert(rows: jax.Array, expert: jax.Array, count: int, ffn: Callable[[Any, Any], jax.Array]) -> jax.Array:
    """ffn of rows, each for an expert of this device or (`count`) for none, in the order they came."""
    groups = Groups.of(expert, count, len(rows))
    order, place = groups.order[:, None], groups.place[:, None]
    return route(ffn(route(rows, order, place), groups.sizes), place, order)


_DISPATCH = {"gather": _by_gathering, "padded": _by_padding, "ragged": _by_ragged_exchange}
