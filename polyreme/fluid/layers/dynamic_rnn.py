"""Blocks on rows: DynamicRNN, whose block is a step of all sequences, and IfElse, whose blocks are of some rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyreme.core import state
from polyreme.core.symbol import DynamicSize
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ProgramError
from polyreme.fluid.layers.elementwise import put
from polyreme.fluid.mode import begin
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops.creation import full
from polyreme.ops.indices.gather import gather, nonzero, where
from polyreme.ops.manipulation import concat, reshape, squeeze, transpose, unsqueeze
from polyreme.ops.math import minimum
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
    stands still, and it has no output. (1.7 sorts sequences by length, and goes on with fewer and fewer.) Of sequences
    of sequences a step has a sequence for each: the paragraphs of a document, one after the other, each of its words.
    Compiled, the rows of a step are as many as the input's; those behind the last sequence are zero and of none.
    """

    def __init__(self, name: str | None = None) -> None:
        begin()
        self._block: Block | None = None
        self._parent: Block | None = None
        self._entries: Any = None
        self._lod: lods.Lod = ()
        self._whole: dict[str, Variable] = {}
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
            buffers = [self._keep_sequences(o) if lods.lod_of(o) else (self._keep(o),) for o in self._outputs]
            for memory, new in self._next:
                put(memory, where(self._is_live(new), new, memory), "DynamicRNN.update_memory")
            put(self._now, ar.add(self._now, 1), "DynamicRNN")
        with control.recording(recorder) as tested:
            go = ar.less_than(self._now, self._count)
        tested.result, ran.result = [go], []
        control.loop_of(recorder, tested, ran, [], self._maximum)
        self._results = [
            self._sequences_by_sequence(*b) if len(b) > 1 else lods.divided(self._by_sequence(*b), self._lod)
            for b in buffers
        ]

    def _inside(self, what: str) -> None:
        if self._block is None or defaults.block is not self._block:
            raise ProgramError(f"DynamicRNN.{what}: call it inside `with rnn.block():`")

    def _outside(self, what: str, value: Any) -> None:
        if isinstance(value, Variable) and self._parent.find_var(value._array.name) is None:  # type: ignore[union-attr]
            raise ProgramError(f"DynamicRNN.{what}: {value!r} is computed inside the block; compute it in front of it")

    def step_input(self, x: Any, level: int = 0) -> Any:
        """The step's row of each sequence of x: [sequences, ...]; with a level below, its sequence of each.

        level: which of x's levels is walked, 0 the outermost; that of the first input holds for all, as do the lengths
        of its sequences. Raises ConfigError for a level that x has not, or with more than one below it.
        """
        self._inside("step_input")
        self._outside("step_input", x)
        x, lod = lods.sequences("DynamicRNN.step_input", x)
        walked = level if self._steps is None else len(self._lod) - 1
        if level not in (0, walked) or not 0 <= walked < len(lod) <= walked + 2:
            raise ConfigError(
                f"DynamicRNN.step_input: level={level} of {x.name!r}, whose rows have {len(lod)} levels of sequences; "
                f"walk the innermost or the one above it, in all inputs that of the first (here {walked})"
            )
        with inside(self._parent):  # type: ignore[arg-type]
            entries = x if walked == len(lod) - 1 else lods.inner(lod)
            if self._steps is None:
                self._begin(entries, lod[: walked + 1])
            if entries is x:
                padded, _ = OPS["sequence_pad"](x, self._lengths, 0.0, self._steps._array.shape[0])
                padded = lods.divided(transpose(padded, [1, 0, *range(2, len(x.shape) + 1)]), ())
            else:
                starts, firsts = _starts(entries), _starts(self._lengths)
        if entries is x:
            return squeeze(gather(padded, self._now), [0])
        # behind its end a sequence has its last one again: what a layer makes of it is as finite as before
        at = ar.add(firsts, minimum(self._now, ar.subtract(self._lengths, 1)))
        some = ar.greater_than(self._lengths, 0)
        at = where(some, at, ar.multiply(at, 0))
        length = where(some, gather(entries, at), ar.multiply(at, 0))
        rows = _taken(x, gather(starts, at), length, lods.counted(length, lods.rows(x)))
        level_now = lods.offsets(length, lod[-1])
        self._whole[level_now._array.name] = x
        return lods.divided(rows, [level_now])

    def _begin(self, entries: Variable, lod: lods.Lod) -> None:
        """Take these as the sequences that are walked: entries, divided by the last level of lod."""
        self._entries, self._lod, self._lengths = entries, lod, ar.cast(lods.inner(lod), "int64")
        self._steps = ar.subtract(cumsum(full([lods.room(entries, lod)], 1, "int64"), 0), 1)
        size = self._steps._array.shape[0]
        self._maximum = SizeOf(size.symbol.name, size.dim) if isinstance(size, DynamicSize) else int(size)
        self._count = OPS["max"](self._lengths, keepdim=True)
        self._now = full([1], 0, "int64")

    def static_input(self, x: Any) -> Any:
        """x as a whole, at every step; its rows or sequences stand in the order of the step input's."""
        self._inside("static_input")
        lod = lods.lod_of(x)
        if len(lod) == 1:
            self._whole[lod[0]._array.name] = x
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

    def _is_live(self, like: Tensor) -> Any:
        """Whether each sequence has this step, to be broadcast against a row for each of them."""
        live = ar.less_than(self._now, self._lengths)
        return reshape(live, [-1, *[1] * (len(like.shape) - 1)])

    def _keep(self, output: Tensor) -> Tensor:
        """What collects a step's output, in front of the loop: [steps, sequences, ...]."""
        if min(output.shape[1:], default=0) < 0:
            raise ProgramError(f"DynamicRNN.output: {output!r}; all sizes but the first are known while recording")
        with inside(self._parent):  # type: ignore[arg-type]
            sizes = [self._steps._array.shape[0], self._lengths._array.shape[0], *output.shape[1:]]
            buffer = full(sizes, 0, output.dtype)
        at = reshape(ar.equal(self._steps, self._now), [-1, *[1] * len(output.shape)])
        put(buffer, where(at, unsqueeze(output, 0), buffer), "DynamicRNN.output")
        return buffer

    def _by_sequence(self, buffer: Tensor) -> Tensor:
        beside = transpose(buffer, [1, 0, *range(2, len(buffer.shape))])
        return OPS["sequence_unpad"](beside, self._lengths, lods.rows(self._entries))

    def _keep_sequences(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What collects a step's sequences: rows [steps, most rows of a step, ...], lengths [steps, sequences], x.

        x: the input that has the sequences of output, its own of each step or the same at every step.
        """
        lod = lods.lod_of(output)
        x = self._whole.get(lod[-1]._array.name)
        if x is None or len(lod) > 1 or min(output.shape[1:], default=0) < 0:
            raise ProgramError(
                f"DynamicRNN.output: {output!r} has sequences that are neither a step input's nor a static input's, or "
                "an open size besides rows; pool them, or divide them with lod_reset as an input is"
            )
        with inside(self._parent):  # type: ignore[arg-type]
            tail = output.shape[1:]
            behind = full([lods.rows(x), *tail], 0, output.dtype)
            places = ar.subtract(cumsum(full([lods.rows(x)], 1, "int64"), 0), 1)
            buffer = full([self._steps._array.shape[0], lods.rows(x), *tail], 0, output.dtype)
        at = reshape(ar.equal(self._steps, self._now), [-1, *[1] * len(output.shape)])
        rows = gather(concat([output, behind], 0), places)
        put(buffer, where(at, unsqueeze(rows, 0), buffer), "DynamicRNN.output")
        return buffer, self._keep(ar.cast(lods.inner(lod), "int64")), x

    def _sequences_by_sequence(self, buffer: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
        """The sequences of all steps, those of the first sequence's steps first."""
        flat = reshape(buffer, [-1, *buffer.shape[2:]])
        first = ar.multiply(self._steps, lods.rows(x))
        begins = ar.add(ar.subtract(cumsum(lengths, 1), lengths), unsqueeze(first, 1))
        length = self._by_sequence(lengths)
        rows = _taken(flat, self._by_sequence(begins), length, lods.counted(length, lods.rows(flat)))
        return lods.divided(rows, [*self._lod, lods.offsets(length)])


def _starts(lengths: Tensor) -> Tensor:
    """The first row of each sequence of these lengths, [n]."""
    return lods.divided(ar.subtract(cumsum(lengths, 0), lengths), ())


def _taken(x: Tensor, begin: Tensor, length: Tensor, count: Any) -> Tensor:
    """length[i] rows of x from row begin[i] on, one after the other: [count, ...], zeros behind the last of them."""
    shift = OPS["sequence_expand_as"](ar.subtract(begin, _starts(length)), length, count)
    places = ar.subtract(cumsum(full([count], 1, "int64"), 0), 1)
    inside_any = ar.less_than(places, OPS["sum"](length))
    rows = gather(x, where(inside_any, ar.add(shift, places), ar.multiply(places, 0)))
    mask = reshape(inside_any, [-1, *[1] * (len(x.shape) - 1)])
    return where(mask, rows, ar.multiply(rows, 0))


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
