"""Loops, branches and recurrences written as with blocks; the functional forms; py_func and Print.

A block is recorded once, where it is written. Variables that it gives new values (increment, assign with
output=, cond=) have the loop's or branch's values afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.errors import ProgramError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.arrays import within_loop
from polyreme.fluid.layers.elementwise import put
from polyreme.fluid.layers.tensor import fill_constant_batch_size_like
from polyreme.fluid.mode import begin
from polyreme.jit import control_flow as functional
from polyreme.ops import arithmetic as ar
from polyreme.ops.attributes import is_empty as has_no_elements
from polyreme.ops.manipulation import reshape
from polyreme.program import control, recurrence
from polyreme.program.block import Block, Variable
from polyreme.program.current import defaults, inside
from polyreme.sequences import lod as lods

cond: Callable[..., Any] = layer(functional.cond)
case: Callable[..., Any] = layer(functional.case)
switch_case: Callable[..., Any] = layer(functional.switch_case)


@layer
def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Sequence[Any], is_test: bool = False,
    name: str | None = None, maximum_iterations: int | None = None,
) -> list[Any]:  # fmt: skip
    """loop_vars = body(*loop_vars) while cond(*loop_vars); returns the last. See While for arrays and the bound."""
    with within_loop(defaults.block, maximum_iterations) as loop:
        ends = functional.while_loop(cond, body, loop_vars, maximum_iterations=maximum_iterations)
    loop.check_room()
    return ends


@layer
def is_empty(x: Any, cond: Any = None) -> Any:
    """Whether it has no elements, bool [1]; written into cond if that is given."""
    found = has_no_elements(x).reshape([1])
    return found if cond is None else put(cond, found, "is_empty")


def _condition(what: str, value: Any) -> Variable:
    if not isinstance(value, Variable) or value.dtype != dtypes.bool_ or value.shape not in ([], [1]):
        raise ShapeError(f"{what}: the condition is a bool Variable of shape [1], got {value!r}; less_than makes one")
    return value


def monkey_patch_variable() -> None:
    """Nothing: Variables have operators."""


class While:
    """Run a block while cond, a bool Variable of shape [1] that the block gives a new value, is true.

    maximum_iterations: a bound on the steps, which gradients through a compiled loop need. Without it a Program whose
    loop reads or writes arrays of Variables runs op by op, and the arrays grow. is_test changes nothing here: what
    backward needs is kept where there is a backward.

        i, n = fill_constant([1], "int64", 0), fill_constant([1], "int64", 10)
        go = less_than(i, n)
        loop = While(go)
        with loop.block():
            increment(i)
            less_than(i, n, cond=go)
    """

    def __init__(
        self, cond: Any, is_test: bool = False, name: str | None = None, maximum_iterations: int | None = None
    ) -> None:
        begin()
        self._cond = _condition("While", cond)
        self._maximum = maximum_iterations

    @contextmanager
    def block(self) -> Iterator[None]:
        """What is repeated. Raises ProgramError if it leaves cond as it was."""
        recorder = state.require_recorder("While.block")
        with within_loop(defaults.block, self._maximum) as loop, control.recording(recorder) as ran:
            yield
        lods.check_rebound("While", ran.block)
        if id(self._cond) not in ran.carried:
            raise ProgramError(
                "While: the block gives its condition no new value, so the loop would not end; end it with such as "
                "less_than(i, n, cond=cond)"
            )
        with control.recording(recorder) as tested:
            pass
        tested.result, ran.result = [self._cond], []
        control.loop_of(recorder, tested, ran, [], self._maximum)
        loop.check_room()


class Switch:
    """Run the block of the first case whose condition is true, else the default one.

    with Switch() as switch:
        with switch.case(less_than(step, warmup)):
            assign(small, output=rate)
        with switch.default():
            assign(large, output=rate)
    """

    def __init__(self, name: str | None = None) -> None:
        begin()
        self._none: Any = None

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *error: object) -> None:
        return

    @contextmanager
    def case(self, condition: Any) -> Iterator[None]:
        """What runs if condition, of one element, is true and none before was."""
        has_one = isinstance(condition, Variable) and all(size == 1 for size in condition.shape)
        wanted = _condition("Switch.case", reshape(condition, [1]) if has_one else condition)
        taken = wanted if self._none is None else ar.logical_and(self._none, wanted)
        untaken = ar.logical_not(wanted)
        self._none = untaken if self._none is None else ar.logical_and(self._none, untaken)
        with self._branch(taken):
            yield

    @contextmanager
    def default(self) -> Iterator[None]:
        """What runs if no condition was true. Raises ProgramError without a case."""
        if self._none is None:
            raise ProgramError("Switch.default: there is no case before it")
        with self._branch(self._none):
            yield

    @contextmanager
    def _branch(self, taken: Any) -> Iterator[None]:
        recorder = state.require_recorder("a branch")
        with control.recording(recorder) as side:
            yield
        with control.recording(recorder) as nothing:
            pass
        control.cond_of(recorder, taken, [side, nothing])


class StaticRNN:
    """A recurrence over the first dim of its step inputs [steps, batch, ...], which may be open.

    rnn = StaticRNN()
    with rnn.step():
        word = rnn.step_input(words)
        before = rnn.memory(shape=[-1, size], batch_ref=word)
        hidden = fc([word, before], size, act="tanh")
        rnn.update_memory(before, hidden)
        rnn.step_output(hidden)
    out = rnn()
    """

    def __init__(self, name: str | None = None) -> None:
        begin()
        self._block: Block | None = None
        self._inputs: list[tuple[Variable, Any]] = []
        self._memories: list[tuple[Variable, Any]] = []
        self._next: dict[int, Any] = {}
        self._outputs: list[Any] = []
        self._results: list[Any] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step. Raises ProgramError without a step input, and for a memory without an update."""
        recorder = state.require_recorder("StaticRNN.step")
        with control.recording(recorder) as side:
            self._block = side.block
            yield
            if not self._inputs or {id(m) for m, _ in self._memories} != self._next.keys():
                raise ProgramError("StaticRNN: a step needs a step_input, and an update_memory for each memory")
            side.result = control.as_now([*self._outputs, *(self._next[id(m)] for m, _ in self._memories)])
        side.block.takes[:] = [v.name for v, _ in (*self._inputs, *self._memories)]
        x, start = ([value for _, value in pairs] for pairs in (self._inputs, self._memories))
        self._results, _ = recurrence.over_rows_of(recorder, side, x, start, len(self._outputs), False)

    def _inside(self, what: str) -> Block:
        if self._block is None or defaults.block is not self._block:
            raise ProgramError(f"StaticRNN.{what}: call it inside `with rnn.step():`")
        return self._block

    def _outside(self, what: str, value: Any) -> Block:
        block = self._inside(what)
        if isinstance(value, Variable) and value.block is block:
            raise ProgramError(f"StaticRNN.{what}: {value!r} is computed inside the step; compute it in front of it")
        return block

    def step_input(self, x: Any) -> Any:
        """What a step sees of x [steps, ...]. Raises ShapeError for another number of steps than the first's, and
        ProgramError for what is computed inside the step."""
        block = self._outside("step_input", x)
        steps = [v.shape[0] for v in (x, *(other for _, other in self._inputs)) if v.shape[0] >= 0]
        if len(set(steps)) > 1:
            raise ShapeError(f"StaticRNN.step_input: {x!r}; its first dim is the number of steps, one for all inputs")
        row = recurrence.take_row(block, x)
        self._inputs.append((row, x))
        return row

    def memory(
        self, init: Any = None, shape: Sequence[int] | None = None, batch_ref: Any = None, init_value: float = 0.0,
        init_batch_dim_idx: int = 0, ref_batch_dim_idx: int = 1,
    ) -> Any:  # fmt: skip
        """What a step remembers, at first init, or init_value in this shape with the batch of batch_ref.

        ref_batch_dim_idx: the dim of the batch in what batch_ref, a step input, is a step of; or in batch_ref itself.
        """
        block = self._outside("memory", init)
        if init is None:
            if shape is None or batch_ref is None:
                raise ProgramError("StaticRNN.memory: give init, or shape and batch_ref")
            ref = next((x for variable, x in self._inputs if variable is batch_ref), batch_ref)
            with inside(block.parent):  # type: ignore[arg-type]
                init = fill_constant_batch_size_like(
                    ref, shape, "float32", init_value, ref_batch_dim_idx, init_batch_dim_idx
                )
        variable = recurrence.take_state(block, init)
        self._memories.append((variable, init))
        return variable

    def update_memory(self, mem: Any, var: Any) -> None:
        """var is what mem is at the next step."""
        self._inside("update_memory")
        self._next[id(mem)] = var

    def step_output(self, o: Any) -> None:
        """Keep o of every step: a result [steps, ...]."""
        self._inside("step_output")
        self._outputs.append(o)

    def output(self, *outputs: Any) -> None:
        """step_output of each."""
        for o in outputs:
            self.step_output(o)

    def __call__(self) -> Any:
        """The results: one, or a list of several."""
        if not self._results:
            raise ProgramError("StaticRNN: no step_output; a recurrence has one or more")
        return self._results[0] if len(self._results) == 1 else self._results


__all__ = [
    "StaticRNN", "Switch", "While", "case", "cond", "is_empty", "monkey_patch_variable", "switch_case", "while_loop",
]  # fmt: skip
