"""Recording recurrences: each step once, as a block. How often it runs is known when the Program does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyreme.core.dtype import is_inexact
from polyreme.core.state import ProgramRecorder, TensorState
from polyreme.core.symbol import PROBES, Symbol
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ProgramError
from polyreme.jit.steps import Decoding
from polyreme.program import control
from polyreme.program.block import Block, Variable
from polyreme.program.branches import OverRows, UntilFinished
from polyreme.program.infer import InferredTensor


def over_rows(
    recorder: ProgramRecorder, step: Callable[..., Any], x: Any, states: Any, reverse: bool
) -> tuple[Any, Any]:
    """Record a step, see jit.steps.over_rows. Raises ProgramError for states of another structure after it."""
    rows, row_spec = jax.tree.flatten(x)
    start, state_spec = jax.tree.flatten(states)
    with control.recording(recorder) as side:
        row = [take_row(side.block, leaf) for leaf in rows]
        now = [take_state(side.block, leaf) for leaf in start]
        outputs, new = step(jax.tree.unflatten(row_spec, row), jax.tree.unflatten(state_spec, now))
        if len(jax.tree.leaves(new)) != len(start):
            raise ProgramError(
                f"a recurrence: its step returned states {jax.tree.structure(new)}, it was results {state_spec}"
            )
        flat, spec = jax.tree.flatten(outputs)
        side.result = control.as_now([*flat, *jax.tree.leaves(new)])
    kept, ends = over_rows_of(recorder, side, rows, start, len(flat), reverse)
    return jax.tree.unflatten(spec, kept), jax.tree.unflatten(jax.tree.structure(new), ends)


def over_rows_of(
    recorder: ProgramRecorder, side: control.Side, x: Sequence[Any], start: Sequence[Any], count: int, reverse: bool
) -> tuple[list[Any], list[Any]]:
    """Append an OverRows of a recorded step, which takes rows and states and whose result is outputs and new states."""
    _check_carried("a recurrence", side)
    side.block.gives = [control.reference(recorder, v) for v in side.result]
    op = OverRows(
        x=[recorder.name_of(v) for v in x],
        start=[control.reference(recorder, v) for v in start],
        step=side.block,
        count=count,
        reverse=reverse,
    )
    results = control.variables(side.block, side.block.gives)
    before = [v if isinstance(v, TensorState) else Tensor(v) for v in start]

    def seen(probe: int) -> list[InferredTensor]:
        many = _probed(x[0], probe).shape[0]
        kept = [_stacked(v, many, probe) for v in results[:count]]
        return kept + [
            control.either("a recurrence", a, b, probe) for a, b in zip(before, results[count:], strict=True)
        ]

    made = control.append_op(recorder, op, len(results), "rnn", [seen(probe) for probe in PROBES])
    return made[:count], made[count:]


def until_finished(
    recorder: ProgramRecorder, advance: Callable[..., Any], idle: Callable[[Any], Any], start: Decoding,
    last: int | None, is_test: bool,
) -> tuple[Any, Decoding]:  # fmt: skip
    """Record a step of decoding, see jit.steps.until_finished."""
    leaves, structure = jax.tree.flatten(start)
    with control.recording(recorder) as side:
        time = control.take(side.block, to_tensor([0]))
        now = [take_state(side.block, leaf) for leaf in leaves]
        outputs, new = advance(time, jax.tree.unflatten(structure, now))
        flat, spec = jax.tree.flatten(outputs)
        side.result = control.as_now([*flat, *jax.tree.leaves(new)])
    _check_carried("dynamic_decode", side)
    results = [v if isinstance(v, TensorState) else Tensor(v) for v in side.result]
    count = len(flat)
    with control.recording(recorder) as other:
        taken = [control.take(other.block, v) for v in results[:count]]
        other.result = control.as_now(jax.tree.leaves(idle(jax.tree.unflatten(spec, taken))))
    for each in (side, other):
        each.block.gives = [control.reference(recorder, v) for v in each.result]
    op = UntilFinished(
        start=[control.reference(recorder, v) for v in leaves],
        step=side.block,
        idle=other.block,
        count=count,
        last=last,
        is_test=is_test,
    )

    def seen(probe: int) -> list[InferredTensor]:
        kept = [_stacked(v, probe if last is None else last + 1, probe) for v in results[:count]]
        ends = zip(leaves, results[count:], strict=True)
        return kept + [control.either("dynamic_decode", a, b, probe) for a, b in ends]

    made = control.append_op(recorder, op, len(results), "decode", [seen(probe) for probe in PROBES])
    return jax.tree.unflatten(spec, made[:count]), jax.tree.unflatten(jax.tree.structure(new), made[count:])


def take_row(block: Block, x: TensorState) -> Variable:
    """A Variable for a row of x, which the block is results each time it runs."""
    array = x._array
    sizes = tuple(tuple(_probed(x, probe).shape[1:]) for probe in PROBES)
    variable = block.create_var(None, array.shape[1:], array.dtype, stop_gradient=x.stop_gradient, probed=sizes)
    variable._node = block
    block.takes.append(variable.name)
    return variable


def take_state(block: Block, like: Any) -> Variable:
    """A Variable for a state, which may have a gradient whatever it is at first."""
    variable = control.take(block, like if isinstance(like, TensorState) else Tensor(like))
    variable.stop_gradient = not is_inexact(variable.dtype)
    return variable


def _check_carried(what: str, side: control.Side) -> None:
    if side.carried:
        raise ProgramError(
            f"{what}: a step changes Variables from outside in place; make them states, or write a While"
        )


def _probed(value: TensorState, probe: int) -> Any:
    return value._array.at(probe) if isinstance(value._array, Symbol) else value._array


def _stacked(value: TensorState, many: int, probe: int) -> InferredTensor:
    one = _probed(value, probe)
    return InferredTensor(jax.ShapeDtypeStruct((many, *one.shape), one.dtype), value.stop_gradient)
