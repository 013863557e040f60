"""Other shapes of sparse Tensors: transposed, reshaped, cut, summed, and dense ones cut down to stored places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager.sparse.elementwise import need_sparse
from polyreme.eager.sparse.structure import constant, indices_of, on_host, places_of
from polyreme.errors import ShapeError
from polyreme.ops import arithmetic as ar
from polyreme.ops import manipulation as mp
from polyreme.ops import reduce, slicing
from polyreme.ops.bounds import dims_of
from polyreme.ops.indices.gather import gather, index_select
from polyreme.ops.messages import segment_reduce
from polyreme.ops.sparse import sparse_gather, sparse_reshape


def is_same_shape(x: Any, y: Any) -> bool:
    """Whether two Tensors, sparse or dense, have the same shape."""
    return list(x.shape) == list(y.shape)


def coalesce(x: Any, name: str | None = None) -> Any:
    """A COO Tensor with its indices sorted and unique, values at the same place added up.

    Reads the indices on the host, unless x is known to be coalesced.

    >>> import polyreme as paddle
    >>> x = paddle.sparse.sparse_coo_tensor([[1, 0, 1]], [1.0, 2.0, 3.0], [2])
    >>> paddle.sparse.coalesce(x).values().tolist()
    [2.0, 4.0]
    """
    need_sparse("sparse.coalesce", "x", x)
    if not hasattr(x, "coalesced"):
        raise TypeError(f"sparse.coalesce: x is a {type(x).__name__}; a CSR Tensor is coalesced, only COO is taken")
    if x.coalesced:
        return x
    shape = x.dims[: x.sparse_dim()]
    places, into = np.unique(places_of(on_host(x, "coalesce()"), shape), return_inverse=True)
    indices = constant(indices_of(places, shape, x.index_dtype))
    return x.from_coo(indices, segment_reduce(x.values(), into, len(places)), x.dims)


def transpose(x: Any, perm: Sequence[int], name: str | None = None) -> Any:
    """x with its dims in the order perm; sparse dims stay before the dense ones.

    >>> import polyreme as paddle
    >>> x = paddle.sparse.sparse_coo_tensor([[0, 1], [2, 0]], [1.0, 2.0], [2, 3])
    >>> paddle.sparse.transpose(x, [1, 0]).indices().tolist()
    [[2, 0], [0, 1]]
    """
    need_sparse("sparse.transpose", "x", x)
    order = dims_of(tuple(perm), len(x.dims), "sparse.transpose")
    count = x.sparse_dim()
    if len(order) != len(x.dims) or sorted(order[:count]) != list(range(count)):
        raise ShapeError(
            f"sparse.transpose: perm {list(perm)} of shape {list(x.shape)} with {count} sparse dims; name every dim "
            "once, the sparse ones first"
        )
    coo = x.to_sparse_coo()
    values = coo.values()
    if x.dense_dim():
        values = mp.transpose(values, [0, *(d - count + 1 for d in order[count:])])
    shape = tuple(x.dims[d] for d in order)
    in_order = list(order[:count]) == list(range(count))
    indices = coo.indices() if in_order else index_select(coo.indices(), np.asarray(order[:count]), 0)
    return x.from_coo(indices, values, shape, coo.coalesced and in_order)


def reshape(x: Any, shape: Sequence[int], name: str | None = None) -> Any:
    """x in another shape of as many elements: -1 is what is left, 0 the size of x there. Dense dims stay as they are.

    A CSR Tensor stays one of 2 or 3 dims.
    """
    need_sparse("sparse.reshape", "x", x)
    wanted = _resolve(x, [int(s) for s in shape])
    count, dense = x.sparse_dim(), x.dims[x.sparse_dim() :]
    num_sparse = len(wanted) - len(dense)
    if num_sparse < 1 or wanted[num_sparse:] != dense or math.prod(wanted) != math.prod(x.dims):
        raise ShapeError(
            f"sparse.reshape: {list(x.shape)} with {len(dense)} dense dims to {list(shape)}; needs as many elements, "
            f"and the dense dims {list(dense)} last"
        )
    coo = x.to_sparse_coo()
    indices = sparse_reshape(coo.where, x.dims[:count], wanted[:num_sparse])
    return x.from_coo(indices, coo.values(), wanted, coo.coalesced)


def _resolve(x: Any, shape: list[int]) -> tuple[int, ...]:
    found = [x.dims[i] if s == 0 and i < len(x.dims) and x.dims[i] else s for i, s in enumerate(shape)]
    if found.count(-1) == 1:
        rest = -math.prod(found)
        found[found.index(-1)] = math.prod(x.dims) // rest if rest else 0
    return tuple(found)


def slice(x: Any, axes: Any, starts: Any, ends: Any, name: str | None = None) -> Any:
    """x cut to starts <= index < ends along each of axes; negative ones count from the end, too large ones are the end.

    Reads the indices on the host, unless only dense dims are cut.
    """
    need_sparse("sparse.slice", "x", x)
    given = [_numbers(v, "sparse.slice") for v in (axes, starts, ends)]
    if len({len(g) for g in given}) > 1:
        raise ShapeError(f"sparse.slice: axes {given[0]}, starts {given[1]} and ends {given[2]} differ in number")
    dims = dims_of(tuple(given[0]), len(x.dims), "sparse.slice")
    ranges = {d: _bounds(a, b, x.dims[d]) for d, a, b in zip(dims, given[1], given[2], strict=True)}
    coo, count = x.to_sparse_coo(), x.sparse_dim()
    shape = tuple(ranges[d][1] - ranges[d][0] if d in ranges else size for d, size in enumerate(x.dims))
    indices, values, coalesced = coo.indices(), coo.values(), coo.coalesced
    if any(d < count for d in ranges):
        coordinates = on_host(coo, "sparse.slice of sparse dims")
        sparse = {d: r for d, r in ranges.items() if d < count}
        inside = np.all([(coordinates[d] >= a) & (coordinates[d] < b) for d, (a, b) in sparse.items()], axis=0)
        kept = np.flatnonzero(inside)
        start = np.array([ranges.get(d, (0, 0))[0] for d in range(count)])
        indices = constant((coordinates[:, kept] - start[:, None]).astype(coordinates.dtype))
        values = gather(values, kept, 0)
    dense = {d - count + 1: r for d, r in ranges.items() if d >= count}
    if dense:
        bounds = list(dense.values())
        values = slicing.slice(values, list(dense), [a for a, _ in bounds], [b for _, b in bounds])
    return x.from_coo(indices, values, shape, coalesced)


def _numbers(value: Any, what: str) -> list[int]:
    if isinstance(value, TensorState):
        return [int(v) for v in state.host(value, f"{what} with bounds in a Tensor").reshape(-1)]
    return [int(v) for v in value]


def _bounds(start: int, end: int, size: int) -> tuple[int, int]:
    first, last = (min(max(v + size if v < 0 else v, 0), size) for v in (start, end))
    return first, max(first, last)


def sum(x: Any, axis: Any = None, dtype: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """The sum over dims, as a sparse Tensor of x's format: of all elements, shape [1].

    A sparse Tensor keeps one sparse dim, of size 1 where all are summed; a CSR Tensor keeps every dim it sums, with
    size 1. Sums of bool and int32 are int64, unless dtype is given. Reads the indices on the host, unless only dense
    dims are summed.
    """
    need_sparse("sparse.sum", "x", x)
    if dtype is None and x.dtype in (dtypes.bool_, dtypes.int32):
        dtype = dtypes.int64
    x = x if dtype is None else x.converted(None, dtypes.as_dtype(dtype))
    if axis is None:
        axis = range(len(x.dims))
    dims = dims_of(tuple(axis) if isinstance(axis, (list, tuple, range)) else axis, len(x.dims), "sparse.sum")
    coo, count = x.to_sparse_coo(), x.sparse_dim()
    keepdim = keepdim or not hasattr(x, "coalesced")
    values = coo.values()
    over = [d - count + 1 for d in dims if d >= count]
    if over:
        values = reduce.sum(values, over, None, keepdim)
    shape = [1 if d in dims else s for d, s in enumerate(x.dims) if keepdim or d not in dims]
    if not any(d < count for d in dims):
        return x.from_coo(coo.indices(), values, tuple(shape), coo.coalesced)
    left = [d for d in range(count) if d not in dims]
    indices, values = _add_up(coo, values, left)
    if keepdim:
        zeros = np.zeros_like(indices[:1] if len(left) else np.zeros((1, indices.shape[1]), x.index_dtype))
        rows = iter(indices)
        indices = np.concatenate([zeros if d in dims else next(rows)[None] for d in range(count)])
    elif not left:
        indices, shape = np.zeros((1, indices.shape[1]), x.index_dtype), [1, *shape]
    return x.from_coo(constant(indices), values, tuple(shape))


def _add_up(coo: Any, values: Any, left: list[int]) -> tuple[np.ndarray, Any]:
    """Coordinates in the dims left, unique, and the values added up there."""
    found = on_host(coo, "sparse.sum over sparse dims")
    shape = [coo.dims[d] for d in left]
    places, into = np.unique(places_of(found[left], shape), return_inverse=True)
    return indices_of(places, shape, found.dtype), segment_reduce(values, into, len(places))


def mask_as(x: Any, mask: Any, name: str | None = None) -> Any:
    """The elements of a dense x where mask, of the same shape, stores one: a sparse Tensor with mask's indices.

    >>> import polyreme as paddle
    >>> mask = paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 1.0], [2, 2])
    >>> paddle.sparse.mask_as(paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]]), mask).values().tolist()
    [2.0, 3.0]
    """
    need_sparse("sparse.mask_as", "mask", mask)
    if list(x.shape) != mask.shape:
        raise ShapeError(f"sparse.mask_as: x {list(x.shape)} and mask {list(mask.shape)} must have the same shape")
    return mask.with_values(sparse_gather(x, mask.where, mask.sparse_dim()))


def converted(indices: Sequence[Any], values: Any, index_dtype: Any, value_dtype: Any) -> tuple[list[Any], Any]:
    """Tensors of indices, and one of values, cast to other dtypes where one is given."""
    if index_dtype is not None:
        indices = [ar.cast(i, dtypes.as_dtype(index_dtype)) for i in indices]
    return list(indices), values if value_dtype is None else ar.cast(values, dtypes.as_dtype(value_dtype))
