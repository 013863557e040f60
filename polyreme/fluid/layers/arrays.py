"""Arrays of Variables: create_array, array_write, array_read, array_length, tensor_array_to_tensor.

Outside of loops an array is a list that is known while recording. The first While that reads or writes it makes one
Variable of it, with room for as many elements more as the loop has steps at most, so it needs maximum_iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import DTypeError, ProgramError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.elementwise import put
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.creation import full, zeros_like
from polyreme.ops.gather_scatter import gather
from polyreme.ops.manipulation import concat, moveaxis, reshape, squeeze, stack, unsqueeze
from polyreme.ops.scatter import scatter
from polyreme.program.block import Block
from polyreme.program.current import inside
from polyreme.sequences import lod as lods


@dataclass(eq=False)
class Loop:
    """A While whose block is being recorded. parent: the block it stands in, maximum: the bound on its steps."""

    parent: Block
    maximum: int | None


_loops: list[Loop] = []


@contextmanager
def within_loop(parent: Block, maximum: int | None) -> Iterator[None]:
    """Arrays that are read or written inside the block belong to a loop."""
    _loops.append(Loop(parent, maximum))
    try:
        yield
    finally:
        _loops.pop()


class VariableArray:
    """An array of Variables of one shape and dtype; made by create_array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtypes.as_dtype(dtype)
        self._elements: list[Any] = []
        self._buffer: Any = None
        self._length: Any = None
        self._prepared: list[Loop] = []

    def write(self, x: Any, i: Any) -> None:
        """x as element i. Raises DTypeError for another dtype, ShapeError for an index behind the end."""
        if x.dtype != self.dtype:
            raise DTypeError(f"array_write: x is {x.dtype.name}, the array {self.dtype.name}; cast it")
        self._prepare(x)
        position = _known(i)
        if self._buffer is not None:
            index = reshape(ar.cast(i, "int64"), [1])
            self._check(x, self._buffer.shape[1:])
            put(self._buffer, scatter(self._buffer, index, unsqueeze(x, 0), True), "array_write")
            put(self._length, mt.maximum(self._length, mt.scale(index, 1, 1)), "array_write")
            return
        if position is None or not 0 <= position <= len(self._elements):
            raise ShapeError(
                f"array_write: element {position} of an array of {len(self._elements)}; outside of a While an index is "
                "known while recording, as fill_constant's is, and goes on from the end"
            )
        self._elements[position : position + 1] = [x]

    def read(self, i: Any) -> Any:
        """Element i. Raises ShapeError for one that is known not to be there."""
        self._prepare(None)
        at = _known(i)
        if self._buffer is None and at is not None:
            if not 0 <= at < len(self._elements):
                raise ShapeError(f"array_read: element {at} of an array of {len(self._elements)}")
            return self._elements[at]
        return squeeze(gather(self._all(), reshape(ar.cast(i, "int64"), [1])), [0])

    def length(self) -> Any:
        """How many elements there are, int64 [1]."""
        self._prepare(None)
        return full([1], len(self._elements), "int64") if self._length is None else OPS["assign"](self._length)

    def elements(self) -> Any:
        """All elements, stacked: where a loop wrote some, how many there are is known when it runs."""
        if self._buffer is None:
            return self._all()
        rows = OPS["sequence_unpad"](unsqueeze(self._buffer, 0), self._length, lods.counted(self._length))
        return lods.divided(rows, ())

    def _all(self) -> Any:
        if self._buffer is None and not self._elements:
            raise ShapeError("array_read: the array is empty; array_write gives it elements")
        return stack(self._elements, 0) if self._buffer is None else self._buffer

    def _check(self, x: Any, shape: Any) -> None:
        if list(x.shape) != list(shape):
            raise ShapeError(f"array_write: x {list(x.shape)}, elements {list(shape)}; all have one shape")

    def _prepare(self, x: Any) -> None:
        """Make room for what the loop that is recorded writes, in front of it."""
        for loop in _loops:
            if loop in self._prepared:
                continue
            self._prepared.append(loop)
            if loop.maximum is None:
                raise ProgramError(
                    "While: its block reads or writes an array of Variables, which needs a bound on its steps; give "
                    "While(cond, maximum_iterations=)"
                )
            with inside(loop.parent):
                self._grow(x, loop.maximum)

    def _grow(self, x: Any, count: int) -> None:
        if self._buffer is None and not self._elements:
            if x is None or min(x.shape, default=0) < 0:
                raise ShapeError(
                    "array_write: the first element is written inside a While, and has sizes that are not known in "
                    "front of it; write one before the loop"
                )
            self._buffer = full([count, *x.shape], 0, self.dtype)
        else:
            have = self._all()
            room = concat([zeros_like(have[:1])] * count, 0)
            self._buffer = concat([have, room], 0)
        self._length = full([1], len(self._elements), "int64") if self._length is None else self._length


def _known(index: Any) -> int | None:
    """An index that is known while recording."""
    values = getattr(index._array, "known", None)
    if values is None or values[0].size != 1 or int(values[0].reshape(-1)[0]) != int(values[1].reshape(-1)[0]):
        return None
    return int(values[0].reshape(-1)[0])


def _array(what: str, value: Any) -> VariableArray:
    if not isinstance(value, VariableArray):
        raise TypeError(f"{what} takes an array that create_array made, got {type(value).__name__}")
    return value


@layer
def create_array(dtype: Any) -> VariableArray:
    """An empty array of Variables."""
    return VariableArray(dtype)


@layer
def array_write(x: Any, i: Any, array: Any = None) -> VariableArray:
    """array, of which x is element i from here on; a new one if there is none. i: int64 [1].

    Outside of a While, i is known while recording (fill_constant, increment) and at most the length. Inside of one,
    which then needs maximum_iterations, an element beyond the room there is, the elements before the loop and one for
    each of its steps, is lost.
    """
    target = VariableArray(x.dtype) if array is None else _array("array_write", array)
    target.write(x, i)
    return target


@layer
def array_read(array: Any, i: Any) -> Any:
    """Element i of an array, i int64 [1]."""
    return _array("array_read", array).read(i)


@layer
def array_length(array: Any) -> Any:
    """How many elements an array has, int64 [1]."""
    return _array("array_length", array).length()


@layer
def tensor_array_to_tensor(
    input: Any, axis: int = 1, name: str | None = None, use_stack: bool = False
) -> tuple[Any, Any]:
    """(elements joined along axis, or stacked there with use_stack; the size of each along axis, int32 [elements]).

    Where a While wrote elements their number is known when it has run: the Program then runs op by op.
    """
    every = _array("tensor_array_to_tensor", input).elements()
    one = every.shape[1:]
    if use_stack:
        return moveaxis(every, 0, axis), full([lods.rows(every)], 1, "int32")
    if not -len(one) <= axis < len(one):
        raise ShapeError(f"tensor_array_to_tensor: axis={axis} of elements {list(one)}")
    axis %= len(one)
    sizes = list(one)
    sizes[axis] = -1
    joined = reshape(moveaxis(every, 0, axis), sizes)
    return joined, full([lods.rows(every)], one[axis], "int32")


__all__ = ["array_length", "array_read", "array_write", "create_array", "tensor_array_to_tensor"]
