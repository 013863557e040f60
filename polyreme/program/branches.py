"""Operations with blocks of their own: branches, loops, recurrences and calls that backward runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.autograd.recompute import run_again
from polyreme.core import state
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.jit.control_flow import cond, while_loop
from polyreme.jit.steps import Decoding, over_rows, until_finished
from polyreme.program.operation import Operation, OperationBlock, OperationFrame
from polyreme.program.values import Ref, SizeOf, refs, resolve


@dataclass(kw_only=True)
class Cond(Operation):
    """Run one of two blocks. outputs: for each result of the blocks.

    Where a result has another shape after one block than after the other, the value of pred decides while the Program
    runs, operation by operation; else both are compiled into one program.
    """

    pred: Any
    true: OperationBlock
    false: OperationBlock

    @property
    def blocks(self) -> list[OperationBlock]:
        return [self.true, self.false]

    def reads(self) -> list[str]:
        return [*refs(self.pred), *self.true.free(), *self.false.free()]

    def run(self, frame: OperationFrame) -> None:
        pred = frame.get(self.pred.name) if isinstance(self.pred, Ref) else self.pred
        if isinstance(pred, Tensor) and self._shapes_differ():
            pred = bool(state.host(pred, "cond(), whose branches give other shapes"))
        results = cond(pred, lambda: frame.inside(self.true, ()), lambda: frame.inside(self.false, ()))
        for name, result in zip(self.outputs, results, strict=True):
            frame.define(name, _tensor(result))

    def _shapes_differ(self) -> bool:
        """Whether the sizes of a result, not their number, depend on which block runs."""
        return any(
            len(one) == len(other) and one != other
            for one, other in zip(_shapes(self.true), _shapes(self.false), strict=True)
        )


def _shapes(block: OperationBlock) -> list[Sequence[int]]:
    """The shape of each result of a block; () for one that it takes from a value elsewhere."""
    found = [block.find_var(value.name) if isinstance(value, Ref) else None for value in block.gives]
    return [() if variable is None else variable.shape for variable in found]


@dataclass(kw_only=True)
class While(Operation):
    """Run body while test holds. init: what the loop starts from, outputs: what it ends with; both blocks take as many
    values. maximum: a bound on the steps, which gradients need; a number, or a size that a value has when it runs.
    """

    init: list[Any]
    test: OperationBlock
    body: OperationBlock
    maximum: int | SizeOf | None = None

    @property
    def blocks(self) -> list[OperationBlock]:
        return [self.test, self.body]

    def reads(self) -> list[str]:
        return [*refs(self.init), *refs(self.maximum), *self.test.free(), *self.body.free()]

    def run(self, frame: OperationFrame) -> None:
        start = [frame.get(v.name) if isinstance(v, Ref) else v for v in self.init]
        ends = while_loop(
            lambda *now: frame.inside(self.test, now)[0],
            lambda *now: frame.inside(self.body, now),
            start,
            maximum_iterations=resolve(self.maximum, frame.get),
        )
        for name, end in zip(self.outputs, ends, strict=True):
            frame.define(name, _tensor(end))


@dataclass(kw_only=True)
class Recompute(Operation):
    """Run a block of which backward keeps the inputs only, and which it runs again."""

    inputs: list[str]
    block: OperationBlock

    @property
    def blocks(self) -> list[OperationBlock]:
        return [self.block]

    def reads(self) -> list[str]:
        return [*self.inputs, *self.block.free()]

    def run(self, frame: OperationFrame) -> None:
        given = tuple(frame.get(name) for name in self.inputs)
        results = run_again(lambda *now: frame.inside(self.block, now), given, {})
        for name, result in zip(self.outputs, results, strict=True):
            frame.define(name, result)


@dataclass(kw_only=True)
class OverRows(Operation):
    """Run a block for each row of x. The block takes a row of each, and states, at first those of start; it gives
    `count` outputs, of which all steps are kept, and new states."""

    x: list[str]
    start: list[Any]
    step: OperationBlock
    count: int
    reverse: bool = False

    @property
    def blocks(self) -> list[OperationBlock]:
        return [self.step]

    def reads(self) -> list[str]:
        return [*self.x, *refs(self.start), *self.step.free()]

    def run(self, frame: OperationFrame) -> None:
        def step(row: list[Any], states: list[Any]) -> tuple[list[Any], list[Any]]:
            return _split(frame.inside(self.step, [*row, *states]), self.count)

        x, states = [frame.get(name) for name in self.x], [_value(v, frame) for v in self.start]
        outputs, ends = over_rows(step, x, states, self.reverse)
        for name, result in zip(self.outputs, [*outputs, *ends], strict=True):
            frame.define(name, result)


@dataclass(kw_only=True)
class UntilFinished(Operation):
    """Run a block until all is finished, or step `last` is done.

    It takes the time and what start is at first, of which the last two are finished and lengths; it gives `count`
    outputs, of which all steps are kept, and what it takes next. idle: makes what stands behind the end of the outputs
    of a step.
    """

    start: list[Any]
    step: OperationBlock
    idle: OperationBlock
    count: int
    last: int | None = None
    is_test: bool = False

    @property
    def blocks(self) -> list[OperationBlock]:
        return [self.step, self.idle]

    def reads(self) -> list[str]:
        return [*refs(self.start), *self.step.free(), *self.idle.free()]

    def run(self, frame: OperationFrame) -> None:
        def advance(time: Any, now: Decoding) -> tuple[list[Any], Decoding]:
            outputs, new = _split(frame.inside(self.step, [time, *jax.tree.leaves(now)]), self.count)
            return outputs, _decoding(new)

        def idle(outputs: list[Any]) -> list[Any]:
            return [resolve(value, frame.get) for value in frame.inside(self.idle, outputs)]

        start = _decoding([_value(v, frame) for v in self.start])
        outputs, ends = until_finished(advance, idle, start, self.last, self.is_test)
        for name, result in zip(self.outputs, [*outputs, *jax.tree.leaves(ends)], strict=True):
            frame.define(name, result)


def _split(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    tensors = [v if isinstance(v, Tensor) else to_tensor(v) for v in values]
    return tensors[:count], tensors[count:]


def _value(value: Any, frame: OperationFrame) -> Tensor:
    return frame.get(value.name) if isinstance(value, Ref) else to_tensor(value)


def _decoding(leaves: list[Any]) -> Decoding:
    return Decoding(leaves[:-2], [], *leaves[-2:])


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(jnp.asarray(value))
