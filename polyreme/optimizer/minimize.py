"""BFGS and L-BFGS as loops inside one compiled program, for a function of one vector.

Source: Nocedal and Wright, Numerical Optimization, 2nd edition, algorithms 6.1 and 7.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyreme.optimizer import line_search
from polyreme.optimizer.quasi_newton import direction, no_history, remembered, updated_inverse

Objective = Callable[[Any], tuple[Any, Any]]
"""position [n] -> (value, gradient [n])."""


class Limits(NamedTuple):
    """Limits of a minimization: iterations, evaluations in one line search, largest gradient and change taken as none;
    the first trial of every line search.
    """

    iterations: int
    search: int
    gradient: float
    change: float
    step: float


class Minimum(NamedTuple):
    """The end of a minimization. memory: its estimate of the inverse Hessian."""

    converged: Any
    calls: Any
    position: Any
    value: Any
    gradient: Any
    memory: Any
    iterations: Any
    stopped: Any


def bfgs(objective: Objective, start: Any, first_inverse: Any, limits: Limits) -> Minimum:
    """Minimize with a whole inverse Hessian [n, n]; the memory is that."""
    inverse = jnp.eye(start.size, dtype=start.dtype) if first_inverse is None else first_inverse
    return _minimize(objective, start, inverse, lambda h, g: -(h @ g), updated_inverse, limits)


def lbfgs(objective: Objective, start: Any, first_inverse: Any, pairs: int, limits: Limits) -> Minimum:
    """Minimize with the last pairs; first_inverse: an inverse Hessian [n, n] to correct, or None for a scaled one."""
    history = no_history(min(pairs, limits.iterations), start.size, start.dtype)
    return _minimize(objective, start, history, lambda h, g: direction(h, g, first_inverse), remembered, limits)


def _minimize(
    objective: Objective, start: Any, memory: Any, way_of: Callable, learnt: Callable, limits: Limits
) -> Minimum:
    value, gradient = objective(start)
    flat = _largest(gradient) <= limits.gradient
    begun = Minimum(flat, jnp.asarray(1), start, value, gradient, memory, jnp.asarray(0), flat)

    def go_on(found: Minimum) -> Any:
        return ~found.stopped & (found.iterations < limits.iterations)

    def iterate(step: Minimum) -> Minimum:
        way = way_of(step.memory, step.gradient)
        search = _search(objective, step, way, limits)
        point = search.low
        move, change = point.step * way, point.gradient - step.gradient
        flat = _largest(point.gradient) <= limits.gradient
        still = (_largest(move) <= limits.change) | (jnp.abs(point.value - step.value) <= limits.change)
        # no step at all: the direction goes nowhere lower, which a change of 0 also is, but no minimum was shown
        lost = point.step == 0
        return Minimum(
            flat | (still & ~lost), step.calls + search.count, step.position + move, point.value, point.gradient,
            learnt(step.memory, move, change), step.iterations + 1, flat | still | lost,
        )  # fmt: skip

    return jax.lax.while_loop(go_on, iterate, begun)


def _search(objective: Objective, step: Minimum, way: Any, limits: Limits) -> line_search.Search:
    def evaluate(search: line_search.Search) -> line_search.Search:
        value, gradient = objective(step.position + search.step * way)
        return line_search.advance(search, value, jnp.vdot(gradient, way), gradient, limits.search, limits.change)

    begun = line_search.begin(step.value, jnp.vdot(step.gradient, way), step.gradient, limits.step)
    return jax.lax.while_loop(lambda s: s.stage != line_search.DONE, evaluate, begun)


def _largest(x: Any) -> Any:
    return jnp.max(jnp.abs(x), initial=0)
