"""Python index expressions taken apart: what is static, what is an array, what is out of range.

The result is what ops.indexing takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.export import is_symbolic_dim

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.bounds import check_index


def value_of(value: Any) -> Any:
    """The array of a Tensor, else the value itself."""
    return value._array if isinstance(value, TensorState) else value


def check_mask(mask: TensorState, shape: Sequence[int]) -> None:
    """Raise ShapeError unless a bool index fits the leading dims."""
    own = list(mask._array.shape)
    if own != list(shape[: len(own)]):
        raise ShapeError(f"a bool index of shape {own} does not fit the leading dims of {list(shape)}")


def without_bools(index: Any, ndim: int) -> tuple[Any, int | None]:
    """(index with None for the bools without dims in it, the dim of the result that is empty since one is False).

    Raises IndexError for False beside arrays.
    """
    items = index if isinstance(index, tuple) else (index,)
    places = [at for at, item in enumerate(items) if _is_one_bool(item)]
    if not places:
        return index, None
    true = all(bool(_on_host(items[at])) for at in places)
    first, rest = places[0], places[1:]
    items = tuple(None if at == first else item for at, item in enumerate(items) if at not in rest)
    if true:
        return items, None
    if any(i is not Ellipsis and not isinstance(i, (int, np.integer, slice, type(None))) for i in items):
        raise IndexError("False as an index beside arrays; give a bool Tensor of the dim's size")
    whole = ndim - sum(map(_dims_taken, items))
    return items, sum(whole if item is Ellipsis else not isinstance(item, (int, np.integer)) for item in items[:first])


def _is_one_bool(item: Any) -> bool:
    if isinstance(item, (TensorState, np.ndarray)):
        array = value_of(item)
        return array.dtype == dtypes.bool_ and len(array.shape) == 0
    return isinstance(item, (bool, np.bool_))


def _on_host(item: Any) -> Any:
    if not isinstance(item, TensorState):
        return item
    return state.host(item, "indexing with a bool Tensor, whose result has a shape only known on the host")


def split_index(index: Any, shape: list[int]) -> tuple[list[Any], tuple[Any, ...]]:
    """(arrays, spec) as ops.indexing takes them. Raises IndexError for what is out of range or too many."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dims_taken(i) for i in items)
    if taken > len(shape):
        raise IndexError(f"{taken} indices for a Tensor of {len(shape)} dims {shape}")
    arrays: list[Any] = []
    spec: list[tuple] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            spec.append(("all",))
            dim += len(shape) - taken
        elif item is None:
            spec.append(("new",))
        elif isinstance(item, slice):
            spec.append(("slice", *(_slice_bound(b) for b in (item.start, item.stop, item.step))))
            dim += 1
        elif isinstance(item, (int, np.integer)) and not isinstance(item, (bool, np.bool_)):
            arrays.append(_position(int(item), dim, shape))
            spec.append(("int",))
            dim += 1
        else:
            found = _index_arrays(item, shape, dim)
            arrays.extend(found)
            spec.extend([("array",)] * len(found))
            dim += _dims_taken(item)
    return arrays, tuple(spec)


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    dtype = getattr(item, "dtype", None)
    if dtype is None and isinstance(item, (list, tuple)):
        item = np.asarray([np.asarray(i) if isinstance(i, TensorState) else i for i in item])
        dtype = item.dtype
    return item.ndim if dtype == dtypes.bool_ else 1


def _slice_bound(value: Any) -> Any:
    """A bound of a slice: an int, None, or a size that an export leaves open."""
    if value is None or is_symbolic_dim(value):
        return value
    return value.__index__()


def _position(i: int, dim: int, shape: list[int]) -> np.ndarray:
    if not -shape[dim] <= i < shape[dim]:
        raise IndexError(f"index {i} is out of range for dim {dim} of size {shape[dim]} of a Tensor of shape {shape}")
    return np.asarray(i % shape[dim], np.int32)


def _index_arrays(item: Any, shape: list[int], dim: int) -> list[Any]:
    if isinstance(item, (list, tuple)):
        item = np.asarray(
            [np.asarray(i) if isinstance(i, TensorState) else i for i in item], dtype=None if len(item) else np.int64
        )
    if not isinstance(item, TensorState):
        item = np.asarray(item)
    dtype = value_of(item).dtype
    if dtype == dtypes.bool_:
        mask = _on_host(item)
        if list(mask.shape) != shape[dim : dim + mask.ndim]:
            raise ShapeError(
                f"a bool index of shape {list(mask.shape)} does not fit dims {shape[dim : dim + mask.ndim]} of {shape}"
            )
        return list(np.nonzero(mask))
    if not dtypes.is_integer(dtype):
        shown = repr(item.item()) if isinstance(item, np.ndarray) and not item.ndim else f"a Tensor of {dtype.name}"
        raise DTypeError(f"an index must be integer or bool, got {shown}")
    if isinstance(item, TensorState):
        check_index("x[index]", item, shape[dim], dim)
    if isinstance(item, np.ndarray) and item.size and not (-shape[dim] <= item.min() and item.max() < shape[dim]):
        raise IndexError(f"index {item.min()}..{item.max()} is out of range for dim {dim} of size {shape[dim]}")
    return [item]
