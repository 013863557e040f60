"""Loops, branches and unrolled recurrences written as with blocks; the functional forms; py_func and Print.

A block is recorded once, where it is written. Variables that it gives new values (increment, assign with
output=, cond=) have the loop's or branch's values afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from polyreme.ops.manipulation import reshape, stack
from polyreme.program import control, values
from polyreme.program.block import Block, Variable
from polyreme.program.current import defaults, inside
from polyreme.program.operation import Call, Operation
from polyreme.program.values import Ref, SizeOf
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
    """A recurrence over the first dim of its step inputs [steps, batch, ...], a size that is known: it is unrolled.

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
        self._starts: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        self._outputs: list[Any] = []
        self._results: list[Any] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step. Raises ProgramError for a block without step inputs or with control flow inside."""
        program = defaults.main
        with control.recording(state.require_recorder("StaticRNN.step")) as side:
            self._block = side.block
            yield
        program.blocks.remove(side.block)
        if side.carried or any(op.blocks for op in side.block.ops):
            raise ProgramError("StaticRNN: a step holds no loops and branches and changes no Variables from outside")
        if not self._inputs or set(self._starts) != set(self._next):
            raise ProgramError("StaticRNN: a step needs a step_input, and an update_memory for each memory")
        self._results = self._unrolled(side.block.ops)

    def _inside(self, what: str) -> Block:
        if self._block is None or defaults.block is not self._block:
            raise ProgramError(f"StaticRNN.{what}: call it inside `with rnn.step():`")
        return self._block

    def step_input(self, x: Any) -> Any:
        """What a step sees of x [steps, ...]. Raises ShapeError for a number of steps not known, or another one."""
        block = self._inside("step_input")
        if x.shape[0] < 0 or (self._inputs and self._inputs[0][1].shape[0] != x.shape[0]):
            raise ShapeError(f"StaticRNN.step_input: {x!r}; its first dim is the number of steps, one for all inputs")
        made = block.create_var(None, x.shape[1:], x.dtype, stop_gradient=x.stop_gradient)
        self._inputs.append((made, x))
        return made

    def memory(
        self, init: Any = None, shape: Sequence[int] | None = None, batch_ref: Any = None, init_value: float = 0.0,
        init_batch_dim_idx: int = 0, ref_batch_dim_idx: int = 1,
    ) -> Any:  # fmt: skip
        """What a step remembers, at first init, or init_value in this shape with the batch of batch_ref.

        ref_batch_dim_idx: the dim of the batch in what batch_ref, a step input, is a step of; or in batch_ref itself.
        """
        block = self._inside("memory")
        if init is None:
            if shape is None or batch_ref is None:
                raise ProgramError("StaticRNN.memory: give init, or shape and batch_ref")
            ref = next((x for variable, x in self._inputs if variable is batch_ref), batch_ref)
            with inside(block.parent):  # type: ignore[arg-type]
                init = fill_constant_batch_size_like(
                    ref, shape, "float32", init_value, ref_batch_dim_idx, init_batch_dim_idx
                )
        variable = block.create_var(None, init.shape, init.dtype, stop_gradient=False)
        self._starts[variable.name] = init
        return variable

    def update_memory(self, mem: Any, var: Any) -> None:
        """var is what mem is at the next step."""
        self._inside("update_memory")
        self._next[mem.name] = var

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

    def _unrolled(self, ops: Sequence[Operation]) -> list[Any]:
        now, collected = dict(self._starts), [list[Any]() for _ in self._outputs]
        for t in range(self._inputs[0][1].shape[0]):
            known = {name: v._array.name for name, v in now.items()}
            known |= {made.name: x[t]._array.name for made, x in self._inputs}
            for op in ops:
                _append_copy(op, known, self._block)  # type: ignore[arg-type]
            block = defaults.block
            for kept, o in zip(collected, self._outputs, strict=True):
                kept.append(block.var(known.get(o._array.name, o._array.name)))
            now = {m: block.var(known.get(v._array.name, v._array.name)) for m, v in self._next.items()}
        return [stack(kept, 0) for kept in collected]


def _append_copy(op: Operation, known: dict[str, str], origin: Block) -> None:
    """op once more, on the values of this step; notes what its results are called in it."""
    if not isinstance(op, Call):
        raise ProgramError(f"StaticRNN: a step holds a {op.kind}, which cannot be unrolled; do it outside")

    def renamed(name: str) -> str:
        return known.get(name, name)

    given = values.replace((op.args, op.kwargs), Ref, lambda ref: Ref(renamed(ref.name)))
    args, kwargs = values.replace(given, SizeOf, lambda size: SizeOf(renamed(size.name), size.dim))
    copied = replace(op, args=args, kwargs=kwargs, outputs=[])
    for name in op.outputs:
        old = origin.vars[name]
        made = defaults.block.create_var(None, old.shape, old.dtype, stop_gradient=old.stop_gradient)
        made._node = copied
        copied.outputs.append(made.name)
        known[name] = made.name
    defaults.block.append(copied)


__all__ = [
    "StaticRNN", "Switch", "While", "case", "cond", "is_empty", "monkey_patch_variable", "switch_case", "while_loop",
]  # fmt: skip
