"""Recurrences: a step walked over the rows of arrays, and one repeated until all of a batch is finished.

In eager code Python steps. Captured, many steps are one loop of the program; recorded into a static Program the step
is recorded once, so that layers that make parameters when they are called make one set of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from polyreme.core import state
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit.control_flow import while_loop
from polyreme.ops.arithmetic import logical_and, logical_not
from polyreme.ops.manipulation import stack, unbind
from polyreme.ops.reduce import all as all_of

Step = Callable[[Any, Any], tuple[Any, Any]]

# captured, more steps are one loop: unrolled, what is compiled grows with each
_UNROLLED = 16


def over_rows(step: Step, x: Any, states: Any, reverse: bool = False) -> tuple[Any, Any]:
    """(outputs of all steps [steps, ...], the last states) of step(row, states) -> (output, new states).

    x: [steps, ...], or a structure of such; states and outputs may be structures too. reverse: from the last row to the
    first; outputs stay in the order of rows. Raises ShapeError for x without rows.
    """
    if (recorder := state.recorder()) is not None:
        return recorder.over_rows(step, x, states, reverse)
    first = jax.tree.leaves(x)[0]
    if len(first) < 1:
        raise ShapeError(f"RNN: inputs {list(first.shape)} have {len(first)} steps; a cell is called for at least one")
    order = range(len(first) - 1, -1, -1) if reverse else range(len(first))
    if len(first) > _UNROLLED and state.capturing():
        return _loop(step, x, states, order)
    return _unroll(step, x, states, order)


def _unroll(step: Step, x: Any, states: Any, order: range) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(x)
    each = [unbind(leaf, 0) for leaf in leaves]
    outputs: list[Any] = [None] * len(order)
    for t in order:
        outputs[t], states = step(jax.tree.unflatten(structure, [e[t] for e in each]), states)
    return jax.tree.map(lambda *rows: stack(list(rows), 0), *outputs), states


def _loop(step: Step, x: Any, states: Any, order: range) -> tuple[Any, Any]:
    """The steps as one loop of the captured program; the first stands before it and says what is carried."""
    output, states = step(jax.tree.map(lambda leaf: leaf[order[0]], x), states)
    rows = jax.tree.map(lambda a: stack([a] * len(order), 0), output)

    def body(k: Any, states: Any, rows: Any) -> list[Any]:
        t = order[0] + k * order.step
        made, states = step(jax.tree.map(lambda leaf: leaf[t], x), states)
        leaves, structure = jax.tree.flatten(rows)
        for row, new in zip(leaves, jax.tree.leaves(made), strict=True):
            row[t] = new
        return [k + 1, states, jax.tree.unflatten(structure, leaves)]

    count = len(order)
    start = [to_tensor(1), states, rows]
    _, states, rows = while_loop(lambda k, *_: k < count, body, start, maximum_iterations=count - 1)
    return rows, states


class Decoding(NamedTuple):
    """Where decoding stands: the next inputs, states, and finished and lengths [batch, ...]."""

    inputs: Any
    states: Any
    finished: Any
    lengths: Any


def until_finished(
    advance: Callable[[Any, Decoding], tuple[Any, Decoding]],
    idle: Callable[[Any], Any],
    start: Decoding,
    last: int | None,
    is_test: bool,
) -> tuple[Any, Decoding]:
    """(outputs of all steps [steps, ...], where it ends) of advance(time, now) -> (outputs, next), time an int64 [1].

    It ends once all is finished, or when step `last`, counted from 0, is done. Captured there are always last + 1 steps
    in the outputs: behind the end stands idle(outputs of a step). is_test: what no gradient is asked of. Raises
    ConfigError for a capture without last, ShapeError if no step is taken.
    """
    if last is not None and last < 0:
        raise ConfigError(f"dynamic_decode: max_step_num={last}; give the index of the last step there may be, from 0")
    if (recorder := state.recorder()) is not None:
        return recorder.until_finished(advance, idle, start, last, is_test)
    if not state.capturing():
        return _decode(advance, start, last)
    if last is None:
        raise ConfigError(
            "dynamic_decode: max_step_num=None in a captured function, where the number of steps is part of the "
            "program; give the most there may be"
        )
    return _decode_in_loop(advance, idle, start, last, is_test)


def _decode(advance: Callable[..., Any], now: Decoding, last: int | None) -> tuple[Any, Decoding]:
    steps: list[Any] = []
    while (last is None or len(steps) <= last) and not bool(all_of(now.finished)):
        outputs, now = advance(to_tensor([len(steps)]), now)
        steps.append(outputs)
    if not steps:
        raise ShapeError(f"dynamic_decode: no step was taken, max_step_num={last}; all was finished from the start")
    return jax.tree.map(lambda *rows: stack(list(rows), 0), *steps), now


def _decode_in_loop(
    advance: Callable[..., Any], idle: Callable[[Any], Any], start: Decoding, last: int, is_test: bool
) -> tuple[Any, Decoding]:
    first, now = advance(to_tensor([0]), start)
    rows = jax.tree.map(lambda a, b: stack([a] + [b] * last, 0), first, idle(first))

    def goes_on(time: Any, now: Decoding, rows: Any) -> Any:
        return logical_and(time[0] <= last, logical_not(all_of(now.finished)))

    def body(time: Any, now: Decoding, rows: Any) -> list[Any]:
        outputs, now = advance(time, now)
        leaves, structure = jax.tree.flatten(rows)
        for row, made in zip(leaves, jax.tree.leaves(outputs), strict=True):
            row[time[0]] = made
        return [time + 1, now, jax.tree.unflatten(structure, leaves)]

    most = None if is_test else last
    _, now, rows = while_loop(goes_on, body, [to_tensor([1]), now, rows], maximum_iterations=most)
    return rows, now
