"""Making sparse Tensors from indices and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.sparse import SparseCooTensor, SparseCsrTensor
from polyreme.eager.sparse.structure import check_size, places_of
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.bounds import at_hand


def sparse_coo_tensor(
    indices: Any,
    values: Any,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    place: Any = None,
    stop_gradient: bool = True,
) -> SparseCooTensor:
    """A sparse Tensor from coordinates: indices [sparse dims, n], values [n, *dense dims], in any order.

    shape: by default the smallest that holds all elements. Elements at the same place count as their sum. A Tensor of
    values that wants gradients gets them, whatever stop_gradient is; of other values a leaf is made. Raises ShapeError,
    and IndexError for an index outside of shape where indices are at hand (see docs/sparse.md).

    >>> x = sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [1.0, 2.0, 3.0], [2, 3])
    >>> x.to_dense().tolist()
    [[0.0, 0.0, 1.0], [2.0, 0.0, 3.0]]
    """
    coordinates, elements = (
        _index("sparse_coo_tensor", "indices", indices, place, 2),
        _values(values, dtype, place, stop_gradient),
    )
    count, n = coordinates.shape
    if elements.ndim == 0 or elements.shape[0] != n:
        raise ShapeError(
            f"sparse_coo_tensor: indices {list(coordinates.shape)} hold {n} coordinates, values {list(elements.shape)} "
            "must be [n, *]"
        )
    values_of_indices = at_hand(coordinates)
    if shape is None:
        if values_of_indices is None or not n:
            raise ShapeError("sparse_coo_tensor: without shape, which cannot be read off indices here; give shape")
        shape = [*(int(s) + 1 for s in values_of_indices.max(axis=1)), *elements.shape[1:]]
    dims = tuple(int(s) for s in shape)
    if len(dims) != count + elements.ndim - 1 or list(dims[count:]) != elements.shape[1:] or min(dims, default=0) < 0:
        raise ShapeError(
            f"sparse_coo_tensor: indices {list(coordinates.shape)} and values {list(elements.shape)} do not fit shape "
            f"{list(dims)}, which needs {count} sparse dims, then {elements.shape[1:]}"
        )
    check_size(dims[:count])
    _check_inside("sparse_coo_tensor", values_of_indices, dims[:count])
    return SparseCooTensor(coordinates, elements, dims, False)


def sparse_csr_tensor(
    crows: Any,
    cols: Any,
    values: Any,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    place: Any = None,
    stop_gradient: bool = True,
) -> SparseCsrTensor:
    """A sparse matrix by rows, or a batch of them: crows [batch * (rows + 1)], cols [n], values [n].

    Row i has the elements crows[i] to crows[i + 1]; in a batch each matrix counts from 0. shape: [rows, columns] or
    [batch, rows, columns], by default the smallest matrix. No element may be stored twice. Gradients are as in
    sparse_coo_tensor. Raises ShapeError, and IndexError where the indices are at hand.

    >>> sparse_csr_tensor([0, 1, 3], [2, 0, 2], [1.0, 2.0, 3.0], [2, 3]).to_dense().tolist()
    [[0.0, 0.0, 1.0], [2.0, 0.0, 3.0]]
    """
    what = "sparse_csr_tensor"
    ends, columns = _index(what, "crows", crows, place, 1), _index(what, "cols", cols, place, 1)
    elements = _values(values, dtype, place, stop_gradient)
    if elements.shape != columns.shape:
        raise ShapeError(f"{what}: cols {list(columns.shape)} and values {list(elements.shape)} must both be [n]")
    host_indices = at_hand(ends), at_hand(columns)
    if shape is None:
        if host_indices[1] is None or not host_indices[1].size:
            raise ShapeError(f"{what}: without shape, which cannot be read off cols here; give shape")
        shape = [ends.shape[0] - 1, int(host_indices[1].max()) + 1]
    dims = tuple(int(s) for s in shape)
    if len(dims) not in (2, 3) or min(dims) < 0 or ends.shape[0] != math.prod(dims[:-2]) * (dims[-2] + 1):
        raise ShapeError(
            f"{what}: crows {list(ends.shape)} do not fit shape {list(dims)}, which is [rows, columns] or [batch, "
            "rows, columns] and needs batch * (rows + 1)"
        )
    check_size(dims)
    made = SparseCsrTensor(ends, columns, elements, dims)
    if host_indices[0] is not None and host_indices[1] is not None:
        _check_rows(made, host_indices[0].reshape(-1, dims[-2] + 1), host_indices[1])
    return made


def _check_rows(x: SparseCsrTensor, ends: np.ndarray, columns: np.ndarray) -> None:
    what, n = "sparse_csr_tensor", len(columns)
    if (np.diff(ends, axis=1) < 0).any() or (ends[:, :1] != 0).any() or int(ends[:, -1].sum()) != n:
        raise ShapeError(
            f"{what}: crows {ends.tolist()} must rise from 0 to the number of elements, {n} in all; check them"
        )
    _check_inside(what, columns[None], x.dims[-1:], len(x.dims) - 1)
    indices = at_hand(x.to_sparse_coo().indices())
    places = np.empty(0) if indices is None else places_of(indices, x.dims)
    if len(np.unique(places)) < len(places):
        raise ShapeError(f"{what}: an element is stored twice; make it with sparse_coo_tensor, then to_sparse_csr()")


def _check_inside(what: str, indices: np.ndarray | None, shape: Sequence[int], first: int = 0) -> None:
    for dim, size in enumerate(shape if indices is not None and indices.size else ()):
        low, high = indices[dim].min(), indices[dim].max()  # type: ignore[index]
        if low < 0 or high >= size:
            raise IndexError(
                f"{what}: index {low if low < 0 else high} is out of range for dim {first + dim} of size {size}; "
                f"give 0 to {size - 1}, or a larger shape"
            )


def _index(what: str, name: str, value: Any, place: Any, ndim: int) -> Tensor:
    if not isinstance(value, Tensor):
        value = np.asarray(value)
        value = to_tensor(value.astype(np.int64) if not value.size else value, place=place)
    elif place is not None:
        value = value.to(place)
    if not dtypes.is_integer(value.dtype):
        raise DTypeError(f"{what}: {name} is {value.dtype.name}, needs int32 or int64; use astype('int64')")
    if value.ndim != ndim:
        raise ShapeError(f"{what}: {name} {list(value.shape)} needs {ndim} dims")
    return value


def _values(value: Any, dtype: Any, place: Any, stop_gradient: bool) -> Tensor:
    if not isinstance(value, Tensor):
        return to_tensor(value, dtype, place, stop_gradient)
    if dtype is not None or place is not None:
        value = value.to(*([] if place is None else [place]), dtype=dtype)
    if stop_gradient or not value.stop_gradient:
        return value
    leaf = value.detach()
    leaf.stop_gradient = False
    return leaf
