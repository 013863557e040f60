"""Directions from past gradients: the two-loop recursion of L-BFGS, and BFGS's inverse Hessian.

Pure functions of arrays. Source: Nocedal and Wright, Numerical Optimization, 2nd edition, algorithms 7.4 and
6.1, equation 7.20 for the scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_LEAST_CURVATURE = 1e-10  # pairs with s.y no larger say nothing about a minimum, and are left out


class CurvaturePairs(NamedTuple):
    """The last pairs, newest last: steps s and changes of the gradient y, [capacity, n]; how many rows count; the
    scale of the first inverse Hessian.
    """

    steps: Any
    changes: Any
    count: Any
    scale: Any


def no_history(capacity: int, n: int, dtype: Any) -> CurvaturePairs:
    """An empty history with room for so many pairs."""
    rows = jnp.zeros((capacity, n), dtype)
    return CurvaturePairs(rows, rows, jnp.zeros((), jnp.int32), jnp.ones((), dtype))


def with_room(history: CurvaturePairs, capacity: int) -> CurvaturePairs:
    """The same pairs with room for more."""
    more = ((capacity - history.steps.shape[0], 0), (0, 0))
    return history._replace(steps=jnp.pad(history.steps, more), changes=jnp.pad(history.changes, more))


def remembered(history: CurvaturePairs, step: Any, change: Any) -> CurvaturePairs:
    """The history with a pair more, the oldest gone when it is full; unchanged by a pair without curvature."""
    curvature = jnp.vdot(step, change)
    grown = CurvaturePairs(
        jnp.roll(history.steps, -1, 0).at[-1].set(step),
        jnp.roll(history.changes, -1, 0).at[-1].set(change),
        jnp.minimum(history.count + 1, history.steps.shape[0]),
        curvature / jnp.vdot(change, change),
    )
    return jax.tree.map(lambda new, old: jnp.where(curvature > _LEAST_CURVATURE, new, old), grown, history)


def direction(history: CurvaturePairs, gradient: Any, first: Any = None) -> Any:
    """Minus the inverse Hessian's estimate times gradient. first: a matrix to start from, else the scale."""
    capacity = history.steps.shape[0]
    counts = jnp.arange(capacity) >= capacity - history.count
    curvatures = jnp.sum(history.steps * history.changes, 1)
    weights = jnp.where(counts, 1 / jnp.where(counts, curvatures, 1), 0)

    def back(q: Any, pair: tuple) -> tuple[Any, Any]:
        s, y, weight = pair
        share = weight * jnp.vdot(s, q)
        return q - share * y, share

    def forth(r: Any, pair: tuple) -> tuple[Any, None]:
        s, y, weight, share = pair
        return r + (share - weight * jnp.vdot(y, r)) * s, None

    rows = (history.steps, history.changes, weights)
    q, shares = jax.lax.scan(back, gradient, rows, reverse=True)
    r, _ = jax.lax.scan(forth, history.scale * q if first is None else first @ q, (*rows, shares))
    return -r


def updated_inverse(inverse: Any, step: Any, change: Any) -> Any:
    """BFGS's estimate of the inverse Hessian after one more pair (equation 6.17); unchanged without curvature."""
    curvature = jnp.vdot(step, change)
    usable = curvature > _LEAST_CURVATURE
    weight = 1 / jnp.where(usable, curvature, 1)
    carried = inverse @ change
    grown = (
        inverse
        - weight * (jnp.outer(step, carried) + jnp.outer(carried, step))
        + (weight * weight * jnp.vdot(change, carried) + weight) * jnp.outer(step, step)
    )
    return jnp.where(usable, grown, inverse)
