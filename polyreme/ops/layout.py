"""Layouts over devices as ops: saying where an activation lives."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec

from polyreme import kernels
from polyreme.core import layout
from polyreme.core.annotations import AnyTensor
from polyreme.core.op import composite, op
from polyreme.core.sharding_rule import as_laid_out


@op(method=False, rule=as_laid_out)
def sharding_constraint(x: Array, sharding: Any) -> Array:
    """x, laid out over devices as a jax Sharding says; its gradient is laid out the same way."""
    return jax.lax.with_sharding_constraint(x, sharding)


@op(method=False, rule=as_laid_out)
def relayout(x: Array, forward: Any, backward: Any) -> Array:
    """x, laid out over devices as the Sharding forward says; its gradient is laid out as backward says."""

    def there(_: tuple, x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, forward)

    def back(_: tuple, cotangent: Array) -> Array:
        return jax.lax.with_sharding_constraint(cotangent, backward)

    return linear_call(there, back, (), x)


@op(method=False, rule=as_laid_out)
def whole_over(x: Array, mesh: Any, axis: str) -> Array:
    """x, the same on all devices along one axis of a mesh; where it lies over the other axes is left open.

    More than a sharding constraint with open dims, which lets the partitioner split any of them over that axis.
    """
    return jax.shard_map(_same, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={axis})(x)


def _same(x: Array) -> Array:
    return x


@op(method=False)
def into_zigzag(x: Array, ways: int, dim: int) -> Array:
    """x, whose dim is a sequence in its own order, with the sequence in the zigzag order of so many ways."""
    return kernels.into_zigzag(x, ways, dim)


@op(method=False)
def out_of_zigzag(x: Array, ways: int, dim: int) -> Array:
    """The inverse of into_zigzag."""
    return kernels.out_of_zigzag(x, ways, dim)


@composite(method=False)
def constrain(x: AnyTensor, *dims: str | None) -> AnyTensor:
    """x with its logical dims named, so that the plan in force places it: constrain(x, "batch", "seq", "embed").

    Returns x itself when no plan is in force. A dim that does not divide over its axes is left whole.
    """
    if layout.active.layout is None:
        return x
    return sharding_constraint(x, layout.active.layout.activation(dims, x.shape))
