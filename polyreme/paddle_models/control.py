"""Loops and branches of a program: operations that have blocks of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polyreme.core.op import OPS
from polyreme.errors import CheckpointError
from polyreme.jit.control_flow import cond, while_loop
from polyreme.paddle_models.call import Value, as_tensor
from polyreme.paddle_models.description import PaddleBlock, PaddleOperation

MAX_KNOWN_STEPS = 10_000
"""How often a loop may go round whose end follows from constants, as it is then written out."""

Values = dict[str, Value]
RunBlock = Callable[[PaddleBlock, Values], Values]
"""Runs a block on the values there are; returns them with those that it gives."""


def _while(operation: PaddleOperation, values: Values, run: RunBlock) -> Values:
    """The older loop: its block changes variables that were there before, among them the condition."""
    (block,), (condition,) = operation.blocks, operation.inputs["Condition"]
    changed = {name for inner in block.operations for names in inner.outputs.values() for name in names}
    carried = [condition, *sorted(name for name in changed if name in values and name != condition)]

    def body(now: list[Value]) -> list[Value]:
        after = run(block, {**values, **dict(zip(carried, now, strict=True))})
        return [after[name] for name in carried]

    return dict(zip(carried, _looped(body, [values[name] for name in carried]), strict=True))


def _while_by_arguments(operation: PaddleOperation, values: Values, run: RunBlock) -> Values:
    """The newer loop: its block takes arguments, and gives the condition and the next of them."""
    (block,) = operation.blocks
    (condition, *init), outputs = operation.inputs["X"], operation.outputs["Out"]

    def body(now: list[Value]) -> list[Value]:
        after = run(block, {**values, **dict(zip(block.arguments, now[1:], strict=True))})
        return [after[name] for name in block.results]

    return dict(zip(outputs, _looped(body, [values[n] for n in (condition, *init)])[1:], strict=True))


def _looped(body: Callable[[list[Value]], list[Value]], init: list[Value]) -> list[Value]:
    """The carried values after the loop, of which the first is the condition."""
    now = init
    for _ in range(MAX_KNOWN_STEPS):
        if not isinstance(now[0], np.ndarray):
            break
        if not now[0].any():
            return now
        now = body(now)
    else:
        raise CheckpointError(f"goes round more than {MAX_KNOWN_STEPS:,} times, whatever is fed; it would not end")
    tensors = [as_tensor(v) for v in now]
    return while_loop(
        lambda go, *rest: OPS["reshape"](go, []), lambda *now: [as_tensor(v) for v in body(list(now))], tensors
    )


def _if(operation: PaddleOperation, values: Values, run: RunBlock) -> Values:
    """The newer branch: both of its blocks give as many results."""
    (name,), outputs = operation.inputs["X"], operation.outputs.get("Out", ())

    def branch(block: PaddleBlock) -> list[Value]:
        after = run(block, dict(values))
        return [after[result] for result in block.results]

    pred, (yes, no) = values[name], operation.blocks
    if isinstance(pred, np.ndarray):
        return dict(zip(outputs, branch(yes if pred.any() else no), strict=True))
    results = cond(
        OPS["reshape"](pred, []),
        lambda: [as_tensor(v) for v in branch(yes)],
        lambda: [as_tensor(v) for v in branch(no)],
    )
    return dict(zip(outputs, results, strict=True))


def _conditional(operation: PaddleOperation, values: Values, run: RunBlock) -> Values:
    """The older branch: a block that is run or not. What it gives is picked by a select_input after it, so it is
    computed either way; what was there before is kept where the block is not run.
    """
    (block,), (name,) = operation.blocks, operation.inputs["Cond"]
    pred, outputs = values[name], operation.outputs.get("Out", ())
    if isinstance(pred, np.ndarray) and not pred.any():
        return {}
    after = run(block, dict(values))
    results = {output: after[output] for output in outputs if output in after}
    if isinstance(pred, np.ndarray):
        return results
    where = OPS["reshape"](pred, [])
    return {
        output: OPS["where"](where, as_tensor(value), as_tensor(values[output])) if output in values else value
        for output, value in results.items()
    }


def _select(operation: PaddleOperation, values: Values, run: RunBlock) -> Values:
    (mask_name,), names, (output,) = operation.inputs["Mask"], operation.inputs["X"], operation.outputs["Out"]
    mask = values[mask_name]
    if isinstance(mask, np.ndarray):
        return {output: values[names[int(mask.reshape(-1)[0])]]}
    no, yes = (as_tensor(values[name]) for name in names)
    return {output: OPS["where"](OPS["reshape"](OPS["cast"](mask, "bool"), []), yes, no)}


Control = Callable[[PaddleOperation, Values, RunBlock], Values]
CONTROL: Mapping[str, Control] = {
    "while": _while,
    "while_by_arguments": _while_by_arguments,
    "if": _if,
    "conditional_block": _conditional,
    "select_input": _select,
}
"""Type of operation -> what it is here, as a function of the values that there are."""


def members(operation: PaddleOperation) -> Any:
    """The operation, and those of its blocks, at any depth."""
    yield operation
    for block in operation.blocks:
        for inner in block.operations:
            yield from members(inner)
