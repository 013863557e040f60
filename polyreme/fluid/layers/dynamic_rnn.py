"""Blocks on rows: DynamicRNN, whose block is a step of all sequences, and IfElse, whose blocks are of some rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyreme.core import state
from polyreme.core.symbol import DynamicSize
from polyreme.errors import ConfigError, ProgramError
from polyreme.fluid.layers.elementwise import put
from polyreme.fluid.mode import begin
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops.creation import full
from polyreme.ops.indices.gather import gather, nonzero, where
from polyreme.ops.manipulation import concat, reshape, squeeze, transpose, unsqueeze
from polyreme.ops.scan import cumsum
from polyreme.ops.search import argsort
from polyreme.program import control
from polyreme.program.block import Block, Variable
from polyreme.program.current import defaults, inside
from polyreme.program.values import SizeOf
from polyreme.sequences import lod as lods


class DynamicRNN:
    """A recurrence over the rows of sequences: its block is recorded once, and is a step of all of them together.

    rnn = DynamicRNN()
    with rnn.block():
        word = rnn.step_input(words)
        before = rnn.memory(shape=[size])
        hidden = fc([word, before], size, act="tanh")
        rnn.update_memory(before, hidden)
        rnn.output(hidden)
    last = sequence_last_step(rnn())

    Every step has a row for each sequence, in the order in which they are fed; behind a sequence's end its memory
    stands still, and it has no output. (1.7 sorts sequences by length, and goes on with fewer and fewer.)
    """

    def __init__(self, name: str | None = None) -> None:
        begin()
        self._block: Block | None = None
        self._parent: Block | None = None
        self._rows: Any = None
        self._lod: lods.Lod = ()
        self._lengths: Any = None
        self._now: Any = None
        self._steps: Any = None
        self._count: Any = None
        self._maximum: Any = None
        self._next: list[tuple[Any, Any]] = []
        self._memories: list[Any] = []
        self._outputs: list[Any] = []
        self._results: list[Any] = []

    @contextmanager
    def block(self) -> Iterator[None]:
        """One step. Raises ProgramError for one without step_input or output, or with a memory that is not updated."""
        recorder, self._parent = state.require_recorder("DynamicRNN.block"), defaults.block
        with control.recording(recorder) as ran:
            self._block = ran.block
            yield
            if self._steps is None or not self._outputs or len(self._next) != len(self._memories):
                raise ProgramError(
                    "DynamicRNN: a step needs a step_input, an output, and an update_memory for each memory"
                )
            buffers = [self._keep(o) for o in self._outputs]
            for memory, new in self._next:
                put(memory, where(self._is_live(new), new, memory), "DynamicRNN.update_memory")
            put(self._now, ar.add(self._now, 1), "DynamicRNN")
        with control.recording(recorder) as tested:
            go = ar.less_than(self._now, self._count)
        tested.result, ran.result = [go], []
        control.loop_of(recorder, tested, ran, [], self._maximum)
        self._results = [self._by_sequence(b) for b in buffers]

    def _inside(self, what: str) -> None:
        if self._block is None or defaults.block is not self._block:
            raise ProgramError(f"DynamicRNN.{what}: call it inside `with rnn.block():`")

    def _outside(self, what: str, value: Any) -> None:
        if isinstance(value, Variable) and self._parent.find_var(value._array.name) is None:  # type: ignore[union-attr]
            raise ProgramError(f"DynamicRNN.{what}: {value!r} is computed inside the block; compute it in front of it")

    def step_input(self, x: Any, level: int = 0) -> Any:
        """The step's row of each sequence of x: [sequences, ...]. Raises ConfigError for a level other than 0.

        All step inputs have the same lengths.
        """
        self._inside("step_input")
        if level != 0:
            raise ConfigError(f"DynamicRNN.step_input: level={level}; sequences of one level, 0, are walked")
        self._outside("step_input", x)
        with inside(self._parent):  # type: ignore[arg-type]
            padded = self._padded(x)
        return squeeze(gather(padded, self._now), [0])

    def _padded(self, x: Any) -> Any:
        """x's sequences side by side, [steps, sequences, ...]."""
        x, lod = lods.sequences("DynamicRNN.step_input", x)
        if len(lod) != 1:
            raise ConfigError(f"DynamicRNN.step_input: {x.name!r} has {len(lod)} levels of sequences; give one")
        if self._steps is None:
            self._rows, self._lod, self._lengths = x, lod, lods.inner(lod)
            self._maximum = lods.room(x, lod)
        padded, _ = OPS["sequence_pad"](x, self._lengths, 0.0, self._maximum)
        padded = lods.divided(transpose(padded, [1, 0, *range(2, len(x.shape) + 1)]), ())
        if self._steps is None:
            size = padded._array.shape[0]
            self._maximum = SizeOf(size.symbol.name, size.dim) if isinstance(size, DynamicSize) else int(size)
            self._steps = ar.subtract(cumsum(full([size], 1, "int64"), 0), 1)
            self._count = OPS["max"](ar.cast(self._lengths, "int64"), keepdim=True)
            self._now = full([1], 0, "int64")
        return padded

    def static_input(self, x: Any) -> Any:
        """x as a whole, at every step; its rows or sequences stand in the order of the step input's."""
        self._inside("static_input")
        return x

    def memory(
        self, init: Any = None, shape: Sequence[int] | None = None, value: float = 0.0, need_reorder: bool = False,
        dtype: Any = "float32",
    ) -> Any:  # fmt: skip
        """What a step remembers, at first init [sequences, ...], or value in this shape for each sequence.

        need_reorder changes nothing: sequences keep their order. Raises ProgramError in front of step_input.
        """
        self._inside("memory")
        if self._steps is None:
            raise ProgramError("DynamicRNN.memory: call step_input first; it says how many sequences there are")
        if init is None and shape is None:
            raise ProgramError("DynamicRNN.memory: give init, or shape")
        self._outside("memory", init)
        with inside(self._parent):  # type: ignore[arg-type]
            if init is None:
                first = full([self._lengths._array.shape[0], *(shape or ())], value, dtype)
            else:
                first = OPS["assign"](init)
            memory = lods.divided(first, ())
        self._memories.append(memory)
        return memory

    def update_memory(self, ex_mem: Any, new_mem: Any) -> None:
        """new_mem is what ex_mem is at the next step."""
        self._inside("update_memory")
        if not any(ex_mem is m for m in self._memories):
            raise ProgramError(f"DynamicRNN.update_memory: {ex_mem!r} is no memory of this one")
        self._next.append((ex_mem, new_mem))

    def output(self, *outputs: Any) -> None:
        """Keep these of every step: rows of sequences."""
        self._inside("output")
        self._outputs += outputs

    def __call__(self) -> Any:
        """The results: one, or a list of several, with the sequences of the first step input."""
        if not self._results:
            raise ProgramError("DynamicRNN: call it after its block")
        return self._results[0] if len(self._results) == 1 else self._results

    def _is_live(self, like: Variable) -> Any:
        """Whether each sequence has this step, to be broadcast against a row for each of them."""
        live = ar.less_than(self._now, ar.cast(self._lengths, "int64"))
        return reshape(live, [-1, *[1] * (len(like.shape) - 1)])

    def _keep(self, output: Variable) -> Variable:
        """What collects a step's output, in front of the loop: [steps, sequences, ...]."""
        if min(output.shape[1:], default=0) < 0:
            raise ProgramError(f"DynamicRNN.output: {output!r}; all sizes but the first are known while recording")
        with inside(self._parent):  # type: ignore[arg-type]
            sizes = [self._steps._array.shape[0], self._lengths._array.shape[0], *output.shape[1:]]
            buffer = full(sizes, 0, output.dtype)
        at = reshape(ar.equal(self._steps, self._now), [-1, *[1] * len(output.shape)])
        put(buffer, where(at, unsqueeze(output, 0), buffer), "DynamicRNN.output")
        return buffer

    def _by_sequence(self, buffer: Variable) -> Variable:
        beside = transpose(buffer, [1, 0, *range(2, len(buffer.shape))])
        rows = OPS["sequence_unpad"](beside, self._lengths, lods.rows(self._rows))
        return lods.divided(rows, self._lod)


class IfElse:
    """Two blocks, of the rows where cond [n, 1] is true and of the others.

    choice = IfElse(less_than(x, zero))
    with choice.true_block():
        choice.output(scale(choice.input(x), -1.0))
    with choice.false_block():
        choice.output(choice.input(x))
    (absolute,) = choice()

    How many rows a block has is known when it runs, so the Program runs op by op.
    """

    def __init__(self, cond: Any, name: str | None = None) -> None:
        begin()
        flat = reshape(cond, [-1])
        self._places = [reshape(nonzero(v), [-1]) for v in (flat, ar.logical_not(flat))]
        self._outputs: list[list[Any]] = [[], []]
        self._side: int | None = None

    @contextmanager
    def _of(self, side: int) -> Iterator[None]:
        if self._side is not None:
            raise ProgramError("IfElse: one block stands inside the other; end the first before the second")
        self._side = side
        try:
            yield
        finally:
            self._side = None

    def true_block(self) -> Any:
        """`with` it: what is done with rows where cond is true."""
        return self._of(0)

    def false_block(self) -> Any:
        """`with` it: what is done with the other rows."""
        return self._of(1)

    def _inside(self, what: str) -> int:
        if self._side is None:
            raise ProgramError(f"IfElse.{what}: call it inside `with choice.true_block():` or false_block()")
        return self._side

    def input(self, x: Any) -> Any:
        """The block's rows of x."""
        return gather(x, self._places[self._inside("input")])

    def output(self, *outs: Any) -> None:
        """What the block makes of its rows, a row for each of them."""
        self._outputs[self._inside("output")] += outs

    def __call__(self) -> list[Any]:
        """The outputs, rows of both blocks in their places. Raises ProgramError unless both give as many."""
        one, other = self._outputs
        if not one or len(one) != len(other):
            raise ProgramError(
                f"IfElse: true_block gives {len(one)} outputs, false_block {len(other)}; one or more each"
            )
        order = argsort(concat(self._places, 0))
        return [gather(concat([a, b], 0), order) for a, b in zip(one, other, strict=True)]


__all__ = ["DynamicRNN", "IfElse"]
