"""Zigzag order: a sequence laid out so that each device of a ring works as long as the others under a causal mask.

Of 2 P chunks device r of P holds the chunks r and 2 P - 1 - r. Source: arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from polyreme.errors import ShapeError
from polyreme.mesh.axes import nearest_multiples


def into_zigzag(x: jax.Array, ways: int, dim: int) -> jax.Array:
    """x, whose dim is in its own order, in the zigzag order of so many ways.

    >>> into_zigzag(jnp.arange(8), 2, 0).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    early, late = jnp.split(x, 2, dim)
    halves = _chunks(early, ways, dim), jnp.flip(_chunks(late, ways, dim), dim)
    return jnp.stack(halves, dim + 1).reshape(x.shape)


def out_of_zigzag(x: jax.Array, ways: int, dim: int) -> jax.Array:
    """The inverse of into_zigzag."""
    pairs = x.reshape(*x.shape[:dim], ways, 2, x.shape[dim] // (2 * ways), *x.shape[dim + 1 :])
    early, late = (lax.index_in_dim(pairs, half, dim + 1, keepdims=False) for half in (0, 1))
    return jnp.concatenate([early, jnp.flip(late, dim)], dim).reshape(x.shape)


def _chunks(x: jax.Array, count: int, dim: int) -> jax.Array:
    return x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])


def check_zigzag(length: int, ways: int) -> None:
    """Raise ShapeError for a length that does not divide into the chunks of a zigzag of so many ways."""
    if length % (2 * ways):
        raise ShapeError(
            f"attention: {length} tokens do not divide into the {2 * ways} equal chunks of a zigzag over {ways} "
            f"devices; make it {nearest_multiples(length, 2 * ways)}, or set sep_order to contiguous"
        )


def move_into_zigzag(x: jax.Array, mesh: Mesh, spec: PartitionSpec, dim: int = 1) -> jax.Array:
    """into_zigzag of a dim that the mesh axes of its entry in spec split: two permutes of half of x each."""
    return _permute(x, mesh, spec, dim, True)


def move_out_of_zigzag(x: jax.Array, mesh: Mesh, spec: PartitionSpec, dim: int = 1) -> jax.Array:
    """out_of_zigzag, as move_into_zigzag."""
    return _permute(x, mesh, spec, dim, False)


def moved_share(ways: int) -> float:
    """The part of a sequence that changes its device between its own order and a zigzag of so many ways.

    >>> moved_share(2)
    0.5
    """
    return sum(a != b for home in _homes(ways) for a, b in home) / (2 * ways)


def _homes(ways: int) -> list[list[tuple[int, int]]]:
    """(device that holds it in its own order, in the zigzag) of each even chunk, and of each odd one."""
    # of a device's two chunks the first is even, the second odd; a device of an even rank keeps the even one first
    last = 2 * ways - 1
    return [[(r, min(chunk, last - chunk)) for r, chunk in enumerate(range(odd, last + 1, 2))] for odd in (0, 1)]


def _permute(x: jax.Array, mesh: Mesh, spec: PartitionSpec, dim: int, into: bool) -> jax.Array:
    axes = spec[dim]
    ways = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    homes = _homes(ways)

    def local(x: jax.Array) -> jax.Array:
        is_even = lax.axis_index(axes) % 2 == 0
        parts = jnp.split(x, 2, dim)
        if into:
            parts = [lax.ppermute(part, axes, home) for part, home in zip(parts, homes, strict=True)]
        even, odd = (jnp.where(is_even, *pair) for pair in (parts, parts[::-1]))
        if not into:
            back = [[(there, here) for here, there in home] for home in homes]
            even, odd = (lax.ppermute(part, axes, home) for part, home in zip((even, odd), back, strict=True))
        return jnp.concatenate([even, odd], dim)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x)
