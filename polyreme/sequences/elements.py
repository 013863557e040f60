"""Arrays of Variables that grow while a Program runs: any number of elements, each with rows and sequences of its own.

No compiled program holds such an array, so one that uses it runs operation by operation. There an array is a value like
any other, replaced by a longer one where an element is written; loops carry it and gradients flow through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.core.op import recorded
from polyreme.eager.tensor import Tensor
from polyreme.errors import HostValueError, ShapeError
from polyreme.jit import host_calls
from polyreme.ops.detection.proposals import tensor_of
from polyreme.ops.manipulation import concat, stack

Element = tuple[Any, ...]


class ElementArray(Tensor):
    """elements: of each its rows, and the offsets of each of its levels. As a number it says how many, int64 [1]."""

    elements: tuple[Element, ...]

    @classmethod
    def of(cls, elements: Sequence[Sequence[Any]]) -> ElementArray:
        """An array of these elements."""
        made = cls.__new__(cls)
        Tensor.__init__(made, np.array([len(elements)], np.int64))
        made.elements = tuple(tuple(e) for e in elements)
        return made


def _not_compiled(what: str) -> None:
    if state.capturing():
        raise HostValueError(f"{what} of an array that grows needs the value on the host")


def elements_of(what: str, array: Any) -> tuple[Element, ...]:
    """The elements of an array, in a run op by op."""
    _not_compiled(what)
    if not isinstance(array, ElementArray):  # while shapes are inferred
        raise ShapeError(f"{what}: an array that grows has elements only while its Program runs")
    return array.elements


def _index(index: Any) -> int:
    return int(np.asarray(index).reshape(-1)[0])


@recorded(draws=False)
def array_of_elements(elements: Sequence[Sequence[Any]]) -> Any:
    """An array of these elements."""
    _not_compiled("array_write")
    return ElementArray.of(elements)


@recorded(draws=False)
def array_with_element(array: Any, index: Any, element: Sequence[Any]) -> Any:
    """array, with element at index. Raises ShapeError for one behind the end, which 1.7 would leave a gap before."""
    have = elements_of("array_write", array)
    at = _index(index)
    if not 0 <= at <= len(have):
        raise ShapeError(f"array_write: element {at} of an array of {len(have)}; write element {len(have)} first")
    return ElementArray.of([*have[:at], tuple(element), *have[at + 1 :]])


@recorded(draws=False)
def element_of_array(array: Any, index: Any) -> list[Any]:
    """Rows and offsets of an element. Raises ShapeError for one that is not there."""
    have = elements_of("array_read", array)
    at = _index(index)
    if not 0 <= at < len(have):
        raise ShapeError(f"array_read: element {at} of an array of {len(have)}")
    return list(have[at])


@recorded(draws=False)
def joined_elements(array: Any, axis: int, stacked: bool) -> tuple[Any, Any]:
    """(elements joined along axis, or stacked there; the size of each along axis, int32)."""
    rows = [element[0] for element in elements_of("tensor_array_to_tensor", array)]
    if not rows:
        raise ShapeError("tensor_array_to_tensor: the array is empty; array_write gives it elements")
    sizes = [1] * len(rows) if stacked else [r.shape[axis] for r in rows]
    return (stack(rows, axis) if stacked else concat(rows, axis)), tensor_of(sizes, np.int32)


@recorded(acts=True, draws=False)
def checked_room(length: Any, room: int) -> Any:
    """length [1], of an array with room for so many elements. Raises ShapeError, when the Program has run, for more."""

    def fault(value: Any) -> ShapeError:
        return ShapeError(
            f"array_write: element {value[0] - 1} was written into an array with room for {room}: those before the "
            "loop and one for each of maximum_iterations; raise that, or leave it out, and the array grows"
        )

    def look(value: Any) -> None:
        if value[0] > room:
            host_calls.fail(fault(value))

    if state.capturing():
        host_calls.at_run_time(look, state.read(length))
    elif (value := np.asarray(length))[0] > room:
        raise fault(value)
    return length


__all__ = [
    "ElementArray",
    "array_of_elements",
    "array_with_element",
    "checked_room",
    "element_of_array",
    "elements_of",
    "joined_elements",
]
