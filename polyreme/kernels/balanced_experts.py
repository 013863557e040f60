"""Experts over devices of which each computes exactly its share of the rows, whatever the router chose.

Every device counts its choices of each expert, and from all counts each works out the same quotas in integers: a device
with more rows than its share keeps what fits, gives away rows of its hottest experts first, and devices with room take
them in order. The weights of experts with rows away (the hot ones) are summed to all devices before the product, a
fixed number of them at a time (slots), and their gradients are summed back. More hot experts than slots take further
rounds, a loop with as many steps as there are: rows never need more room than a share, so nothing is dropped, and the
sizes of all arrays follow from those of the tokens.

Rows go to a device by way of all devices: dealt round, each device gets of each other nearly the same number, so both
all-to-alls have equal parts, and no room for the worst case. Relaying h-relations so: doi:10.1145/73007.73015.

Shape legend: w devices, t tokens of a device, k choices of each, e experts, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.kernels.custom_vjp import custom_vjp
from polyreme.kernels.rows import Groups, combine, exchange, route

Levels = Sequence[tuple[str, ...]]
RowFFN = Callable[[jax.Array, jax.Array, Any], jax.Array]


class Quotas(NamedTuple):
    """The assignment of each expert's rows to the devices that compute them. The rows of an expert are in the order of
    their devices.

    share: the most rows a device computes. at_home, moved [e]: rows of each expert that its own device computes, and
    that others do: those after them. begins, ends [w, e]: the part that each device computes, an interval of the
    expert's rows.
    """

    share: jax.Array
    at_home: jax.Array
    moved: jax.Array
    begins: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, loads: jax.Array, ways: int) -> Quotas:
        """From the rows of each expert, integers [e], of which each of `ways` devices has an equal number.

        >>> quotas = Quotas.of(jnp.array([6, 2, 0, 0]), 2)
        >>> quotas.moved.tolist(), (quotas.ends - quotas.begins).tolist()
        ([4, 0, 0, 0], [[2, 2, 0, 0], [4, 0, 0, 0]])
        """
        by_device = loads.astype(jnp.int32).reshape(ways, -1)
        total = by_device.sum(1)
        share = -(-loads.sum() // ways)
        # the hottest experts of a device first, so that few have rows away
        order = jnp.argsort(-by_device, 1, stable=True)
        hottest = jnp.take_along_axis(by_device, order, 1)
        excess = (total - share)[:, None] - (jnp.cumsum(hottest, 1) - hottest)
        moved = jnp.take_along_axis(jnp.clip(excess, 0, hottest), jnp.argsort(order, 1), 1).reshape(-1)
        at_home = loads - moved
        # moved rows in one line, of which devices take in order what they have room for
        room = jnp.maximum(share - total, 0)
        taken = jnp.cumsum(room)[:, None] - (jnp.cumsum(moved) - moved)
        is_home = jnp.repeat(jnp.arange(ways), by_device.shape[1]) == jnp.arange(ways)[:, None]
        ends = at_home + jnp.clip(taken, 0, moved)
        begins = at_home + jnp.clip(taken - room[:, None], 0, moved)
        # a device with rows away has no room: what its own experts have here is what stays
        begins, ends = jnp.where(is_home, 0, begins), jnp.where(is_home, at_home, ends)
        return cls(share, at_home, moved, begins, ends)

    def before(self, starts: jax.Array) -> jax.Array:
        """Rows for each device that come before those rows of each expert that begin at starts [..., e]: [..., w]."""
        return jnp.clip(starts[..., None, :] - self.begins, 0, self.ends - self.begins).sum(-1)


class RelaySlots(NamedTuple):
    """Rows that one device sends another at a time: to the one that relays them, and from there."""

    first: int
    second: int

    @classmethod
    def of(cls, rows: int, ways: int) -> RelaySlots:
        """The capacities for at most `rows` rows that a device sends, or receives.

        The rows of a device for another follow each other, and relays take them in turn: of a rows at most
        ceil(a / ways) go one way, which is (rows + ways (ways - 1)) / ways for all `ways` together.
        """
        return cls(rows // ways + ways - 1, -(-rows // ways)) if rows else cls(0, 0)


def expert_slots(count: int, ways: int) -> int:
    """Hot experts whose weights are on all devices at a time, where each device has `count` experts of its own: as many
    again, but no more than can have rows away (of `ways` devices one never has)."""
    return max(1, min(count, count * (ways - 1)))


def balanced_experts(
    rows: jax.Array, choices: jax.Array, gates: jax.Array, weights: Any, stacked: Sequence[bool], count: int, ways: int,
    levels: Levels, ffn: RowFFN, slots: int | None = None,
) -> jax.Array:  # fmt: skip
    """The results for this device's tokens: rows [t, d], choices and gates [t, k] -> [t, d]. Inside a shard_map, of
    which `ways` devices, along the axes of the levels of rows.exchange, have `count` experts each.

    stacked: of each array of weights, whether the device's experts are in front. ffn as in experts.row_experts; it
    closes over no array. slots: as expert_slots says, if none are given.
    """
    t, k = choices.shape
    axes = tuple(axis for level in levels for axis in level)
    experts, me = count * ways, lax.axis_index(axes)
    slots = expert_slots(count, ways) if slots is None else slots
    most = t * min(k, experts)

    mine = Groups.of(choices.reshape(-1), experts, t * k)
    counts = lax.all_gather(mine.sizes, axes)  # [w, e]
    starts = jnp.cumsum(counts, 0) - counts  # where the rows of each device begin among an expert's
    quotas = Quotas.of(counts.sum(0), ways)
    device = _device_of(quotas, mine, choices.reshape(-1), starts[me])
    relay = _Relay.of(device, quotas.before(starts[me]), t, k, most, ways, levels)
    (arrived,) = relay.numbers(jnp.where(choices >= 0, choices, experts).reshape(-1, 1)).T

    is_hot = quotas.moved > 0
    nth_hot = jnp.cumsum(is_hot) - is_hot
    hot = _inverse(jnp.where(is_hot, nth_hot, experts), -(-experts // slots) * slots)
    # the device's own experts, then the hot ones; -1 for no row
    is_mine = (arrived >= me * count) & (arrived < (me + 1) * count)
    group = jnp.where(is_mine, arrived - me * count, count + nth_hot.at[arrived].get(mode="fill", fill_value=experts))
    groups = Groups.of(jnp.where(arrived < experts, group, -1), count + experts, most)

    leaves, tree = jax.tree.flatten(weights)

    def with_slots(round_: Any, moving: Sequence[jax.Array], fixed: Any) -> list[jax.Array]:
        """The leaves for the hot experts of one round."""
        hot, me = fixed
        wanted = lax.dynamic_slice_in_dim(hot, round_ * slots, slots) - me * count
        index = jnp.where((wanted >= 0) & (wanted < count), wanted, count)
        return [_fetch(leaf, index, axes) if front else leaf for leaf, front in zip(moving, stacked, strict=True)]

    def further(round_: Any, moving: Any, fixed: Any) -> jax.Array:
        """The results for the rows of one round, zeros elsewhere."""
        rows, leaves = moving
        sizes, *fixed = fixed
        first = count + round_ * slots
        offset = jnp.where(jnp.arange(len(sizes)) < first, sizes, 0).sum()
        here = lax.dynamic_slice_in_dim(jnp.pad(sizes, (0, slots)), first, slots)
        weights = jax.tree.unflatten(tree, with_slots(round_, leaves, fixed))
        return jnp.roll(ffn(jnp.roll(rows, -offset, 0), here, weights), offset, 0)

    x = route(relay.there(rows), groups.order[:, None], groups.place[:, None])
    hottest = with_slots(0, leaves, (hot, me))
    both = [
        jnp.concatenate([own, more]) if front else own
        for own, more, front in zip(leaves, hottest, stacked, strict=True)
    ]
    y = ffn(x, groups.sizes[: count + slots], jax.tree.unflatten(tree, both))
    rounds = -(-is_hot.sum() // slots)
    y += sum_of_rounds(further, jnp.minimum(rounds, 1), rounds, (x, leaves), (groups.sizes, hot, me))
    return relay.combined(route(y, groups.place[:, None], groups.order[:, None]), gates)


def _device_of(quotas: Quotas, mine: Groups, choices: jax.Array, starts: jax.Array) -> jax.Array:
    """The device that computes each of this one's choices [n]; the number of devices for none."""
    ways, experts = quotas.begins.shape
    expert = jnp.clip(choices, 0, experts - 1)
    row = starts[expert] + mine.place - (jnp.cumsum(mine.sizes) - mine.sizes)[expert]
    is_inside = (quotas.begins[:, expert] <= row) & (row < quotas.ends[:, expert])
    return jnp.where((choices >= 0) & is_inside.any(0), jnp.argmax(is_inside, 0), ways)


class _Relay(NamedTuple):
    """The way of a device's choices to the devices that compute them, and back.

    out, outs [t * k], [w * first]: the place of each choice in what leaves, and the choice at each place. onward,
    onward_choices [w * first], [w * second]: the same of what this device relays.
    """

    out: jax.Array
    outs: jax.Array
    onward: jax.Array
    onward_choices: jax.Array
    shape: tuple[int, int]
    levels: Levels

    @classmethod
    def of(cls, device: jax.Array, before: jax.Array, t: int, k: int, most: int, ways: int, levels: Levels) -> _Relay:
        """device [t * k]: for each choice, `ways` for none. before [w]: rows for each device from those before this."""
        first, second = RelaySlots.of(most, ways)
        by_device = Groups.of(device, ways, t * k)
        bounds = jnp.cumsum(by_device.sizes) - by_device.sizes
        to = jnp.minimum(device, ways - 1)
        nth = before[to] + by_device.place - bounds[to]  # among all rows for that device
        by_relay = Groups.of(jnp.where(device < ways, nth % ways, ways), ways, t * k)
        relay = nth % ways
        bounds = jnp.cumsum(by_relay.sizes) - by_relay.sizes
        out = jnp.where(device < ways, relay * first + by_relay.place - bounds[relay], ways * first)
        outs = _inverse(out, ways * first)
        goal = jnp.where(device < ways, to * second + nth // ways, ways * second)
        on = exchange(goal.astype(jnp.int32).at[outs].get(mode="fill", fill_value=ways * second), levels)
        return cls(out, outs, on, _inverse(on, ways * second), (t, k), levels)

    def there(self, rows: jax.Array) -> jax.Array:
        """Rows of tokens [t, d] -> those that this device computes [w * second, d], with zeros between."""
        t, k = self.shape
        sent = exchange(route(rows, self.outs[:, None] // k, self.out.reshape(t, k)), self.levels)
        return exchange(route(sent, self.onward_choices[:, None], self.onward[:, None]), self.levels)

    def numbers(self, of_choices: jax.Array) -> jax.Array:
        """Integers of each choice [t * k, n] -> of those that this device computes, the largest there is elsewhere."""
        none = jnp.iinfo(of_choices.dtype).max
        sent = exchange(of_choices.at[self.outs].get(mode="fill", fill_value=none), self.levels)
        return exchange(sent.at[self.onward_choices].get(mode="fill", fill_value=none), self.levels)

    def combined(self, y: jax.Array, gates: jax.Array) -> jax.Array:
        """Combine computed rows [w * second, d] to the sums for the tokens [t, d]."""
        sent = route(exchange(y, self.levels), self.onward[:, None], self.onward_choices[:, None])
        return combine(exchange(sent, self.levels), self.out.reshape(self.shape), self.outs, gates)


def _inverse(place: jax.Array, places: int) -> jax.Array:
    """The item at each of the places, the number of items at places of none."""
    n = len(place)
    return jnp.full((places,), n, jnp.int32).at[place].set(lax.iota(jnp.int32, n), mode="drop")


def _fetch(leaf: jax.Array, index: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Entries of a leaf, each from the device where its index is not the leaf's length; of no device, zeros."""
    dtype = jnp.int32 if leaf.dtype == jnp.bool_ else leaf.dtype
    part = leaf.astype(dtype).at[index].get(mode="fill", fill_value=0)
    return lax.psum(part, axes).astype(leaf.dtype)


# ---- sums over rounds whose number is found out on the device ----


@custom_vjp(0)
def sum_of_rounds(fn: Callable[[Any, Any, Any], Any], first: Any, end: Any, args: Any, fixed: Any) -> Any:
    """fn(first, args, fixed) + ... + fn(end - 1, args, fixed): a loop that has derivatives in args, of any order.

    fn closes over no array. Backward runs fn again and keeps the arguments alone: the gradient is such a sum too.
    """
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, first, args, fixed))
    return lax.fori_loop(first, end, lambda i, total: jax.tree.map(jnp.add, total, fn(i, args, fixed)), zeros)


def _sum_of_rounds_fwd(fn, first, end, args, fixed):
    return sum_of_rounds(fn, first, end, args, fixed), (first, end, args, fixed)


def _sum_of_rounds_bwd(fn, residuals, dy):
    first, end, args, fixed = residuals
    leaves, tree = jax.tree.flatten(args)
    moves = [jnp.issubdtype(a.dtype, jnp.inexact) for a in leaves]

    def gradient(i: Any, moving: Any, fixed: Any) -> list[jax.Array]:
        moving, dy = moving
        others, fixed = fixed

        def of(moving: list[jax.Array]) -> Any:
            sources = iter(moving), iter(others)
            return fn(i, jax.tree.unflatten(tree, [next(sources[not m]) for m in moves]), fixed)

        return jax.vjp(of, moving)[1](dy)[0]

    moving = [a for a, m in zip(leaves, moves, strict=True) if m]
    others = [a for a, m in zip(leaves, moves, strict=True) if not m]
    gradients = iter(sum_of_rounds(gradient, first, end, (moving, dy), (others, fixed)))
    return None, None, jax.tree.unflatten(tree, [next(gradients) if m else None for m in moves]), None


sum_of_rounds.defvjp(_sum_of_rounds_fwd, _sum_of_rounds_bwd)
