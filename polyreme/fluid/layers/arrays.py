"""Arrays of Variables: create_array, array_write, array_read, array_length, tensor_array_to_tensor.

Outside of loops an array is a list that is known while recording. The first While that reads or writes it makes one
Variable of it: with maximum_iterations a buffer with room for as many elements more as the loop has steps at most,
which is compiled; else a value that grows, whose elements may have any number of rows, in a Program that runs op by op.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import DTypeError, ProgramError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.elementwise import put
from polyreme.ops import OPS
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.creation import full
from polyreme.ops.indices.gather import gather
from polyreme.ops.indices.scatter import scatter
from polyreme.ops.manipulation import concat, moveaxis, reshape, squeeze, stack, unsqueeze
from polyreme.program.block import Block
from polyreme.program.current import inside
from polyreme.sequences import elements as el
from polyreme.sequences import lod as lods


@dataclass(eq=False)
class Loop:
    """A While whose block is being recorded. parent: the block it stands in, maximum: the bound on its steps.

    arrays: what it reads or writes.
    """

    parent: Block
    maximum: int | None
    arrays: list[VariableArray] = field(default_factory=list)

    def check_room(self) -> None:
        """Behind the loop: let the Program raise ShapeError if it wrote more elements than there is room for."""
        for array in self.arrays if not _loops else ():
            array.check_room()


_loops: list[Loop] = []


@contextmanager
def within_loop(parent: Block, maximum: int | None) -> Iterator[Loop]:
    """Arrays that are read or written inside the block belong to a loop."""
    _loops.append(Loop(parent, maximum))
    try:
        yield _loops[-1]
    finally:
        _loops.pop()


_COUNT = ([1], "int64", 0)
"""What an array that grows is to ops: how many elements it has."""


class VariableArray:
    """An array of Variables of one shape and dtype; made by create_array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtypes.as_dtype(dtype)
        self._elements: list[Any] = []
        self._buffer: Any = None
        self._length: Any = None
        self._growing: Any = None
        self._shape: list[int] = []
        self._levels: int | None = None
        self._prepared: list[Loop] = []

    def write(self, x: Any, i: Any) -> None:
        """x as element i. Raises DTypeError for another dtype, ShapeError for an index behind the end."""
        if x.dtype != self.dtype:
            raise DTypeError(f"array_write: x is {x.dtype.name}, the array {self.dtype.name}; cast it")
        self._prepare(x)
        position = _known(i)
        if self._growing is not None:
            self._check(x)
            args = (self._growing, i, self._entry(x))
            put(self._growing, lods.uninferred("array_with_element", args, [_COUNT])[0], "array_write")
            return
        if self._buffer is not None:
            index = reshape(ar.cast(i, "int64"), [1])
            self._check(x)
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
        position = _known(i)
        if self._growing is not None:
            return self._read_growing(i)
        if self._buffer is None and position is not None:
            if not 0 <= position < len(self._elements):
                raise ShapeError(f"array_read: element {position} of an array of {len(self._elements)}")
            return self._elements[position]
        return squeeze(gather(self._all(), reshape(ar.cast(i, "int64"), [1])), [0])

    def length(self) -> Any:
        """How many elements there are, int64 [1]."""
        self._prepare(None)
        if self._growing is not None:
            return OPS["assign"](self._growing)
        return full([1], len(self._elements), "int64") if self._length is None else OPS["assign"](self._length)

    def value(self, what: str) -> Any:
        """The array as one Variable, in a Program that runs op by op. Raises ProgramError for one of a bounded loop."""
        if self._buffer is not None:
            raise ProgramError(
                f"{what}: the array belongs to a While with maximum_iterations, where all elements have one shape; "
                "leave that out"
            )
        self._grow_freely(None)
        return self._growing

    def joined(self, axis: int, stacked: bool) -> tuple[Any, Any]:
        """tensor_array_to_tensor of an array that grows, or whose elements are of several shapes."""
        shape = [-1 if d == axis % max(len(self._shape), 1) else n for d, n in enumerate(self._shape)]
        shape = [*self._shape[:axis], -1, *self._shape[axis:]] if stacked else shape
        results = [(shape, self.dtype, 0), ([-1], "int32", 0)]
        made = lods.uninferred("joined_elements", (self.value("tensor_array_to_tensor"), axis, stacked), results)
        return made[0], made[1]

    def check_room(self) -> None:
        """Let the Program raise ShapeError where more elements were written than a bounded loop has room for."""
        if self._buffer is not None:
            el.checked_room(self._length, self._buffer.shape[0])

    @property
    def grows(self) -> bool:
        """Whether a While without maximum_iterations writes or reads it."""
        return self._growing is not None

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

    def _check(self, x: Any) -> None:
        shape = self._shape if self._growing is not None else self._buffer.shape[1:]
        if len(x.shape) != len(shape) or any(-1 not in (n, m) and n != m for n, m in zip(x.shape, shape, strict=True)):
            raise ShapeError(f"array_write: x {list(x.shape)}, elements {list(shape)}; all have one shape")

    def _prepare(self, x: Any) -> None:
        """Make one Variable of what the loop that is recorded reads or writes, in front of it."""
        for loop in _loops:
            if loop in self._prepared:
                continue
            self._prepared.append(loop)
            loop.arrays.append(self)
            if self._growing is not None:
                continue
            with inside(loop.parent):
                if loop.maximum is not None:
                    self._grow(x, loop.maximum)
                elif self._buffer is None:
                    self._grow_freely(x)
                elif x is not None:
                    raise ProgramError(
                        "array_write: the array was written in a While with maximum_iterations, and is in one without; "
                        "give both, or none"
                    )

    def _grow_freely(self, x: Any) -> None:
        if self._growing is not None:
            return
        first = self._elements[0] if self._elements else x
        if first is None:
            raise ShapeError("array_read: the array is empty; array_write gives it elements")
        self._levels = len(lods.lod_of(first))
        # what has sequences, or a dim besides its rows, may have other rows as another element
        self._shape = [-1, *first.shape[1:]] if self._levels or len(first.shape) > 1 else list(first.shape)
        entries = [self._entry(v) for v in self._elements]
        (self._growing,) = lods.uninferred("array_of_elements", (entries,), [_COUNT])

    def _entry(self, x: Any) -> list[Any]:
        """An element's rows and the offsets of its levels. Raises ShapeError for fewer levels than the first has."""
        levels = lods.lod_of(x)
        if len(levels) < (self._levels or 0):
            raise ShapeError(
                f"array_write: x has {len(levels)} levels of sequences, the first element {self._levels}; divide it "
                "with lod_reset"
            )
        return [x, *levels[: self._levels]]

    def _read_growing(self, i: Any) -> Any:
        results = [(self._shape, self.dtype, 0), *[([-1], "int64", 1)] * (self._levels or 0)]
        rows, *levels = lods.uninferred("element_of_array", (self._growing, i), results)
        return lods.divided(rows, levels)

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
            self._buffer = concat([have, full([count, *have.shape[1:]], 0, self.dtype)], 0)
        self._length = full([1], len(self._elements), "int64") if self._length is None else self._length


def _known(index: Any) -> int | None:
    """An index that is known while recording."""
    values = getattr(index._array, "known", None)
    if values is None or values[0].size != 1 or int(values[0].reshape(-1)[0]) != int(values[1].reshape(-1)[0]):
        return None
    return int(values[0].reshape(-1)[0])


def as_array(what: str, value: Any) -> VariableArray:
    """value. Raises TypeError for what is no array of Variables."""
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

    Outside of a While, i is known while recording (fill_constant, increment) and at most the length. Inside of one
    with maximum_iterations there is room for the elements before the loop and one for each of its steps; the Program
    raises ShapeError where it writes beyond. Inside of one without, the array grows from its end, and an element may
    have other rows and sequences than the one before.
    """
    target = VariableArray(x.dtype) if array is None else as_array("array_write", array)
    target.write(x, i)
    return target


@layer
def array_read(array: Any, i: Any) -> Any:
    """Element i of an array, i int64 [1]."""
    return as_array("array_read", array).read(i)


@layer
def array_length(array: Any) -> Any:
    """How many elements an array has, int64 [1]."""
    return as_array("array_length", array).length()


@layer
def tensor_array_to_tensor(
    input: Any, axis: int = 1, name: str | None = None, use_stack: bool = False
) -> tuple[Any, Any]:
    """(elements joined along axis, or stacked there with use_stack; the size of each along axis, int32 [elements]).

    Where a While wrote elements their number is known when it has run: the Program then runs op by op.
    """
    array = as_array("tensor_array_to_tensor", input)
    if array.grows:
        return array.joined(axis, use_stack)
    every = array.elements()
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
