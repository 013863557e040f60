"""The body of each collective: a function of one member's local values.

Run under jax.shard_map: axes are the mesh axes of the group, n the number of members. A list of values goes
in and a list comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.core import dtype as dtypes
from polyreme.distributed.communication.group import ReduceOp

Values = list[Any]

_JOIN = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
    ReduceOp.PROD: jnp.prod,
    ReduceOp.AVG: jnp.mean,
}


def all_reduce(xs: Values, axes: tuple[Any, ...], n: int, op: int) -> Values:
    """Each value reduced over the members."""
    return [_reduce(x, axes, n, op) for x in xs]


def reduce(xs: Values, axes: tuple[Any, ...], n: int, op: int, root: int) -> Values:
    """all_reduce at the root; the others keep what they have."""
    at_root = lax.axis_index(axes) == root
    return [jnp.where(at_root, _reduce(x, axes, n, op), x) for x in xs]


def broadcast(xs: Values, axes: tuple[Any, ...], n: int, root: int) -> Values:
    """The root's values, bit for bit."""
    return [_from_root(x, axes, root) for x in xs]


def all_gather(xs: Values, axes: tuple[Any, ...], n: int) -> Values:
    """Every member's value, in order."""
    every = lax.all_gather(xs[0], axes)
    return [every[i] for i in range(n)]


def reduce_scatter(xs: Values, axes: tuple[Any, ...], n: int, op: int) -> Values:
    """The value at this member's position among n, reduced over the members."""
    stacked = jnp.stack(xs)
    if op in (ReduceOp.SUM, ReduceOp.AVG) and stacked.dtype != jnp.bool_:
        total = lax.psum_scatter(stacked, axes, scatter_dimension=0)
        return [total / n if op == ReduceOp.AVG else total]
    return [_join(lax.all_to_all(stacked, axes, 0, 0), op)]


def alltoall(xs: Values, axes: tuple[Any, ...], n: int) -> Values:
    """Send the i-th of n values to member i."""
    received = lax.all_to_all(jnp.stack(xs), axes, 0, 0)
    return [received[i] for i in range(n)]


def scatter(xs: Values, axes: tuple[Any, ...], n: int, root: int) -> Values:
    """The value at this member's position among the root's n."""
    return [lax.all_to_all(jnp.stack(xs), axes, 0, 0)[root]]


BODIES: dict[str, Callable[..., Values]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "alltoall": alltoall,
    "scatter": scatter,
}


def run(
    kind: str, xs: Values, axes: tuple[Any, ...], n: int, split: bool, join: bool, static: dict[str, int]
) -> Values:
    """A collective on local values. split: the one value is n pieces along dim 0; join: so is the one coming out."""
    pieces = jnp.split(xs[0], n) if split else xs
    out = BODIES[kind](pieces, axes, n, **static)
    if not join:
        return out
    return [jnp.concatenate(out) if out[0].ndim else jnp.stack(out)]


def _reduce(x: Any, axes: tuple, n: int, op: int) -> Any:
    if op == ReduceOp.PROD or x.dtype == jnp.bool_:
        return _join(lax.all_gather(x, axes), op)
    if op == ReduceOp.MAX:
        return lax.pmax(x, axes)
    if op == ReduceOp.MIN:
        return lax.pmin(x, axes)
    total = lax.psum(x, axes)
    return total / n if op == ReduceOp.AVG else total


def _join(stacked: Any, op: int) -> Any:
    """Values along dim 0 joined; the sum of truth values is true where one is."""
    return _JOIN[op](stacked, axis=0).astype(stacked.dtype)


def _from_root(x: Any, axes: tuple, root: int) -> Any:
    """A sum in which only the root's term is not zero, of the bits: -0.0 and NaN arrive as they were."""
    if dtypes.is_complex(x.dtype):
        return lax.complex(_from_root(x.real, axes, root), _from_root(x.imag, axes, root))
    if x.dtype == jnp.bool_:
        return _from_root(x.astype(jnp.uint8), axes, root).astype(jnp.bool_)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))
    mine = jnp.where(lax.axis_index(axes) == root, bits, jnp.zeros_like(bits))
    return jax.lax.bitcast_convert_type(lax.psum(mine, axes), x.dtype)
