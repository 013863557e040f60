"""paddle.tensor.array: Tensors in a Python list, written and read by an index that may be a Tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import DTypeError, ProgramError
from polyreme.program.mode import in_dynamic_mode


def create_array(dtype: Any, initialized_list: Sequence[Any] | None = None) -> list[Any]:
    """A list of the Tensors given, or an empty one. Raises DTypeError for a Tensor of another dtype."""
    _check_mode("create_array")
    array = list(initialized_list or ())
    for value in array:
        if not isinstance(value, Tensor) or value.dtype != dtypes.as_dtype(dtype):
            got = getattr(value, "dtype", type(value).__name__)
            raise DTypeError(f"create_array: an array of {dtypes.as_dtype(dtype)} holds Tensors of it, got {got}")
    return array


def array_write(x: Any, i: Any, array: list[Any] | None = None) -> list[Any]:
    """Put x at index i, which is in the array or right behind its end; array None: a new one. Returns the array.

    Raises IndexError for an index further on.
    """
    _check_mode("array_write")
    array = [] if array is None else array
    index = _index(i)
    if not 0 <= index <= len(array):
        raise IndexError(f"array_write: index {index} of an array of {len(array)}; write 0 .. {len(array)}")
    array[index : index + 1] = [x]
    return array


def array_read(array: list[Any], i: Any) -> Any:
    """What is at index i. Raises IndexError for one that is not in the array."""
    _check_mode("array_read")
    index = _index(i)
    if not 0 <= index < len(array):
        raise IndexError(f"array_read: index {index} of an array of {len(array)}")
    return array[index]


def array_length(array: list[Any]) -> Any:
    """The number of Tensors: in eager code an int, as len() gives it."""
    _check_mode("array_length")
    return len(array)


def _index(i: Any) -> int:
    return int(to_tensor(i).reshape([]).item()) if isinstance(i, Tensor) else int(i)


def _check_mode(what: str) -> None:
    if not in_dynamic_mode():
        raise ProgramError(
            f"{what}: a Program has no arrays of Tensors; give static.nn.while_loop a Tensor with a dim for the steps, "
            "or collect in a Python list and paddle.stack it"
        )


def setitem(x: Any, index: Any, value: Any) -> Any:
    """x[index] = value; returns x."""
    x[index] = value
    return x
