"""Rows and where they come from: moved by index in both directions, sorted in groups, and summed for each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax


@jax.custom_vjp
def route(x: jax.Array, sources: jax.Array, uses: jax.Array) -> jax.Array:
    """y[i] = sum over j of x[sources[i, j]]; an index beyond x gives 0. uses [len(x), m]: where each row of x is used.

    With both directions known the gradient is the same function, and gathers; that of a plain gather scatters.
    """
    taken = x.at[sources].get(mode="fill", fill_value=0)
    if sources.shape[1] == 1:
        return taken[:, 0]
    return taken.astype(jnp.promote_types(x.dtype, jnp.float32)).sum(1).astype(x.dtype)


def _route_fwd(x, sources, uses):
    return route(x, sources, uses), (sources, uses)


def _route_bwd(residuals, dy):
    sources, uses = residuals
    return route(dy, uses, sources), None, None


route.defvjp(_route_fwd, _route_bwd)


class Groups(NamedTuple):
    """Items sorted by the group they are in.

    order [places]: the item at each place; n at places after the last group. place [n]: the place of each item; n for
    one of no group. sizes [groups].
    """

    order: jax.Array
    place: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, group: jax.Array, groups: int, places: int) -> Groups:
        """Of n items in the groups 0 .. groups - 1, or outside of these in none; those of a group stay in their order.
        places: as many as items of groups there may be."""
        n = group.shape[0]
        group = jnp.where((group >= 0) & (group < groups), group, groups).astype(jnp.int32)
        items = lax.iota(jnp.int32, n)
        ordered, order = lax.sort((group, items), num_keys=1, is_stable=True)
        numbers = jnp.arange(groups + 1, dtype=jnp.int32)
        if any(map(export.is_symbolic_dim, group.shape)):  # searchsorted takes no open size
            bounds = (ordered < numbers[:, None]).sum(1, dtype=jnp.int32)
        else:
            bounds = jnp.searchsorted(ordered, numbers).astype(jnp.int32)
        place = jnp.zeros((n,), jnp.int32).at[order].set(items, unique_indices=True)
        total = bounds[-1]
        order = jnp.where(items < total, order, n)
        # n may be a symbol, which slices only by the same
        order = order if places == n else order[:places]
        return cls(order, jnp.where(place < total, place, n), jnp.diff(bounds))


def exchange(rows: jax.Array, levels: Sequence[tuple[str, ...]]) -> jax.Array:
    """An all-to-all of equal parts: rows [w * n, ...], n for each device -> [w * n, ...], n from each, in a shard_map.

    levels: mesh axes, outermost first, one all-to-all along each. With one level a device writes to all others; with
    two, first within its node (the inner axes) to the devices through which its rows go on, each to the one of its
    place in every other node.
    """
    sizes = [math.prod(lax.axis_size(axis) for axis in axes) for axes in levels]
    parts = rows.reshape(*sizes, len(rows) // math.prod(sizes), *rows.shape[1:])
    for i in reversed(range(len(levels))):
        parts = lax.all_to_all(parts, levels[i], i, i, tiled=True)
    return parts.reshape(rows.shape)


def route_tokens(tokens: jax.Array, choice: jax.Array, place: jax.Array | None, k: int) -> jax.Array:
    """The rows of choices, choice [n] being t * k + j or at least t * k for a row of zeros: [t, d] -> [n, d].

    place [t, k]: the row of each choice. None where there are far fewer rows than choices: the gradient then scatters.
    """
    if place is None:
        return tokens.at[choice // k].get(mode="fill", fill_value=0)
    return route(tokens, choice[:, None] // k, place)


def combine(y: jax.Array, place: jax.Array | None, order: jax.Array, gates: jax.Array) -> jax.Array:
    """sum over k of gates[t, k] * y[place[t, k]], in float32 at least; order: the choice t * k + j that a row is of.

    place as in route_tokens; without it rows are scattered.
    """
    t, k = gates.shape
    acc = jnp.promote_types(y.dtype, jnp.float32)
    if place is None:
        weighs = gates.astype(acc).reshape(-1).at[order].get(mode="fill", fill_value=0)
        y = jnp.where((order < t * k)[:, None], y.astype(acc), 0) * weighs[:, None]
        return jnp.zeros((t, y.shape[1]), acc).at[order // k].add(y, mode="drop")
    taken = route(y, place.reshape(-1, 1), order[:, None]).reshape(t, k, y.shape[1])
    return jnp.einsum("tkd,tk->td", taken.astype(acc), gates.astype(acc))
