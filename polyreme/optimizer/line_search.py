"""A line search for the strong Wolfe conditions, as a state that one evaluation of the function moves on.

Pure functions of arrays: a loop on the host and a jax.lax.while_loop drive the same search. Source: Nocedal
and Wright, Numerical Optimization, 2nd edition, algorithms 3.5 and 3.6, with cubic interpolation (equation 3.59).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_DECREASE, _CURVATURE = 1e-4, 0.9  # c1 and c2, as usual with quasi-Newton directions
_LEAST_GROWTH, _MOST_GROWTH = 2.0, 10.0  # of the step while no bracket is found
BRACKETING, ZOOMING, DONE = 0, 1, 2


class Point(NamedTuple):
    """A step length, and f, its slope along the direction and its gradient there."""

    step: Any
    value: Any
    slope: Any
    gradient: Any


class Search(NamedTuple):
    """step: where to evaluate next. low, high: the bracket once ZOOMING; low is the last point while BRACKETING, and
    the result when DONE.
    """

    step: Any
    stage: Any
    count: Any
    start: Point
    low: Point
    high: Point


def begin(value: Any, slope: Any, gradient: Any, step: Any) -> Search:
    """A search from where f has this value, slope and gradient, with the first trial at step."""
    start = Point(jnp.zeros_like(value), value, slope, gradient)
    return Search(jnp.asarray(step, value.dtype), jnp.asarray(BRACKETING), jnp.asarray(0), start, start, start)


def advance(search: Search, value: Any, slope: Any, gradient: Any, most: int, shortest: Any) -> Search:
    """The search after f was found to be so at search.step. most: evaluations; shortest: a bracket not worth more."""
    value = jnp.where(jnp.isfinite(value) & jnp.isfinite(slope), value, jnp.inf)  # too far: the bracket ends here
    here = Point(search.step, value, slope, gradient)
    start, low = search.start, search.low
    too_high = (value > start.value + _DECREASE * here.step * start.slope) | (value >= low.value)
    # the first trial has only the start to compare with, which the first condition does
    first = (search.stage == BRACKETING) & (search.count == 0)
    too_high = jnp.where(first, value > start.value + _DECREASE * here.step * start.slope, too_high)
    flat = jnp.abs(slope) <= -_CURVATURE * start.slope
    turned = jnp.where(search.stage == BRACKETING, slope >= 0, slope * (search.high.step - low.step) >= 0)
    accepted = ~too_high & flat
    is_bracketed = (search.stage == ZOOMING) | too_high | turned

    old_end = _choose(search.stage == BRACKETING, low, search.high)
    new_low = _choose(too_high, low, here)
    new_high = _choose(too_high, here, _choose(turned, low, old_end))
    stage = jnp.where(accepted, DONE, jnp.where(is_bracketed, ZOOMING, BRACKETING))
    width = jnp.abs(new_high.step - new_low.step)
    ended = (search.count + 1 >= most) | ((stage == ZOOMING) & (width * jnp.abs(start.slope) <= shortest))
    following = jnp.where(stage == ZOOMING, _between(new_low, new_high), _beyond(low, here))
    return Search(following, jnp.where(ended, DONE, stage), search.count + 1, start, new_low, new_high)


def _choose(which: Any, a: Point, b: Point) -> Point:
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), a, b)


def _cubic(a: Point, b: Point) -> Any:
    """The minimum of the cubic through both points; not finite where it has none."""
    d = a.slope + b.slope - 3 * (a.value - b.value) / (a.step - b.step)
    root = jnp.sign(b.step - a.step) * jnp.sqrt(d * d - a.slope * b.slope)
    return b.step - (b.step - a.step) * (b.slope + root - d) / (b.slope - a.slope + 2 * root)


def _between(low: Point, high: Point) -> Any:
    """The cubic's minimum, kept off the ends by a tenth; the middle where there is none."""
    at = _cubic(low, high)
    left, right = jnp.minimum(low.step, high.step), jnp.maximum(low.step, high.step)
    margin = 0.1 * (right - left)
    usable = (at >= left + margin) & (at <= right - margin)
    return jnp.where(usable, at, (left + right) / 2)


def _beyond(last: Point, here: Point) -> Any:
    """The cubic's minimum past here, within the growth allowed; the most where there is none."""
    at, most = _cubic(last, here), _MOST_GROWTH * here.step
    return jnp.where(at > here.step, jnp.clip(at, _LEAST_GROWTH * here.step, most), most)
