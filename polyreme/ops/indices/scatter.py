"""Writing elements at given indices: scatter, index_add, index_put, put_along_axis, diagonals and their relatives.

Each gives a new Tensor; its `name_` form writes into the first. A negative index counts from the end; for
one out of range see ops.bounds. Of two writes to one place the last stays on a host, any one on an accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.op import composite, op
from polyreme.core.state import TensorState
from polyreme.errors import ShapeError
from polyreme.ops.bounds import check_along, check_coordinates, check_index, dim_of, preceded
from polyreme.ops.by_index import add, bounded, write
from polyreme.ops.indices.gather import as_column, coordinates, need_integers, take_shapes
from polyreme.ops.slicing import slice_index


def _fit(what: str, value: Array, shape: Sequence[int], dtype: Any) -> Array:
    """value broadcast to shape, in dtype. Raises ShapeError."""
    try:
        return dtypes.convert(jnp.broadcast_to(value, shape), dtype)
    except ValueError:
        raise ShapeError(
            f"{what}: the value {list(value.shape)} does not fit the {list(shape)} it is written to"
        ) from None


def _exactly(what: str, name: str, value: Array, shape: Sequence[int], dtype: Any) -> Array:
    if value.shape != tuple(shape):
        raise ShapeError(f"{what}: {name} is {list(value.shape)}, needs {list(shape)}")
    return value.astype(dtype)


# whole slices


def _check_scatter(
    x: Any,
    index: Any,
    updates: Any = None,
    overwrite: Any = None,
    *,
    dim: Any = None,
    src: Any = None,
    reduce: Any = None,
    value: Any = None,
    **_: Any,
) -> Any:
    if isinstance(index, int):  # scatter(x, dim, index, src)
        dim, index, src = index, updates, overwrite if src is None else src
    if dim is not None:
        how = {"multiply": "mul", None: "assign"}.get(reduce, reduce)
        return put_along_axis(x, index, value if src is None else src, dim, how, broadcast=False)
    return check_along("scatter", index, x, 0)


@preceded(_check_scatter)
@op(inplace=True)
def scatter(x: Array, index: Array, updates: Array, overwrite: bool = True) -> Array:
    """x with x[index[i]] = updates[i]; without overwrite, the sum of all updates to that place instead.

    index [n], [n, 1] or []; updates [n, *x.shape[1:]], one slice for a 0-D index. Raises ShapeError, IndexError.
    scatter(x, dim, index, src, reduce=None), or with dim= by name, is put_along_axis(x, index, src, dim).
    """
    index = as_column("scatter", index, scalar=True)
    updates = _exactly("scatter", "updates", updates, index.shape + x.shape[1:], x.dtype)
    written = write(x, (index,), updates if overwrite else jnp.zeros((), x.dtype))
    return written if overwrite else add(written, (index,), updates)


def _check_index_add(x: Any, index: Any, axis: Any, *_: Any, **__: Any) -> None:
    check_along("index_add", index, x, axis)


@preceded(_check_index_add)
@op(inplace=True)
def index_add(x: Array, index: Array, axis: int, value: Array, alpha: float = 1) -> Array:
    """x with alpha times slice i of value added to slice index[i] along axis; a place named twice gets both.

    value has x's shape with n in place of axis, for index [n]. Raises ShapeError, IndexError.
    """
    index = as_column("index_add", index)
    dim = dim_of(axis, x.ndim, "index_add")
    value = _exactly("index_add", "value", value, (*x.shape[:dim], len(index), *x.shape[dim + 1 :]), x.dtype)
    value = value if alpha == 1 else value * jnp.asarray(alpha, x.dtype)
    return add(x, (slice(None),) * dim + (index,), value)


def _check_index_fill(x: Any, index: Any, axis: Any, value: Any, *_: Any, **__: Any) -> None:
    dtypes.check_holds("index_fill: value", x.dtype, value)
    check_along("index_fill", index, x, axis)


@preceded(_check_index_fill)
@op(inplace=True)
def index_fill(x: Array, index: Array, axis: int, value: Array) -> Array:
    """x with every slice along axis that index names set to value, a number or a 0-D Tensor. IndexError."""
    need_integers("index_fill", index)
    dim = dim_of(axis, x.ndim, "index_fill")
    if value.size != 1:
        raise ShapeError(f"index_fill: value {list(value.shape)} must be one number")
    return write(x, (slice(None),) * dim + (index.reshape(-1),), dtypes.convert(value.reshape(()), x.dtype))


# at coordinates


def _check_scatter_nd_add(x: Any, index: Any, *_: Any, **__: Any) -> None:
    check_coordinates("scatter_nd_add", index, x.shape)


@preceded(_check_scatter_nd_add)
@op
def scatter_nd_add(x: Array, index: Array, updates: Array) -> Array:
    """x with updates added at coordinates: index [*b, k] names elements of the first k dims.

    updates [*b, *the other dims of x]; a place named twice gets both. Raises ShapeError, IndexError.
    """
    at = coordinates("scatter_nd_add", index, x)
    shape = index.shape[:-1] + x.shape[len(at) :]
    updates = _exactly("scatter_nd_add", "updates", updates, shape, x.dtype)
    return add(x, at, updates) if at else x + jnp.sum(updates, tuple(range(index.ndim - 1)))


def _check_scatter_nd(index: Any, updates: Any, shape: Any, **_: Any) -> None:
    if not isinstance(shape, TensorState):
        check_coordinates("scatter_nd", index, tuple(shape))


@preceded(_check_scatter_nd)
@op
def scatter_nd(index: Array, updates: Array, shape: Sequence[int]) -> Array:
    """scatter_nd_add to zeros of that shape."""
    return scatter_nd_add.op.fn(jnp.zeros(shape, updates.dtype), index, updates)


def _check_index_put(x: Any, indices: Any, value: Any, accumulate: bool = False, **kwargs: Any) -> Any:
    if not isinstance(indices, (list, tuple)) or not indices:
        raise TypeError(f"index_put: indices must be a list or tuple of Tensors, got {type(indices).__name__}")
    if any(index.dtype == dtypes.bool_ for index in indices):
        return index_put(x, _positions(indices, x.shape), value, accumulate, **kwargs)
    dtypes.check_holds("index_put: value", x.dtype, value)
    for dim, index in enumerate(indices[: len(x.shape)]):
        check_along("index_put", index, x, dim)
    return None


def _positions(indices: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """indices with every bool mask replaced by the positions of its True elements, read on the host."""
    arrays: list[Any] = []
    for index in indices:
        if index.dtype != dtypes.bool_:
            arrays.append(index)
            continue
        mask = state.host(index, "index_put() with a bool mask; where() keeps it in one program")
        dim = len(arrays)
        if list(mask.shape) != list(shape[dim : dim + mask.ndim]):
            raise ShapeError(f"index_put: a bool mask {list(mask.shape)} at dim {dim} of {list(shape)}")
        arrays.extend(np.nonzero(mask))
    return arrays


@preceded(_check_index_put)
@op(inplace=True)
def index_put(x: Array, indices: list[Array], value: Array, accumulate: bool = False) -> Array:
    """x with x[indices] = value, or += value with accumulate, where a place named twice gets both.

    indices: integer Tensors that broadcast, one each for the first dims, or bool masks (read on the host). value
    broadcasts. Raises ShapeError, IndexError.
    """
    if len(indices) > x.ndim:
        raise ShapeError(f"index_put: {len(indices)} indices for {list(x.shape)}")
    for index in indices:
        need_integers("index_put", index)
    at = tuple(jnp.broadcast_arrays(*indices))
    value = _fit("index_put", value, at[0].shape + x.shape[len(at) :], x.dtype)
    return add(x, at, value) if accumulate else write(x, at, value)


# along one dim, element by element

# how jax combines the values for one place; sums are by_index's
_REDUCES = {"assign": "set", "mul": "multiply", "multiply": "multiply", "amin": "min", "amax": "max"}
_SUMS = ("add", "mean")


@jax.custom_jvp
def _multiply_at(x: Array, value: Array, index: tuple) -> Array:
    """x.at[index].multiply(value); jax has its gradient only where no place is named twice."""
    return x.at[index].multiply(value)


@_multiply_at.defjvp
def _multiply_at_jvp(primals: tuple, tangents: tuple) -> tuple:
    # d out = sum over factors of the product of the others; zeros are counted apart, so that they divide nothing
    x, value, index = primals
    x_dot, value_dot, _ = tangents
    x_zero, value_zero = x == 0, value == 0
    zeros = x_zero.astype(jnp.int32).at[index].add(value_zero.astype(jnp.int32))
    rest = _multiply_at(jnp.where(x_zero, 1, x), jnp.where(value_zero, 1, value), index)

    def others(factor: Array, zero: Array, rest: Array, zeros: Array) -> Array:
        without = rest / jnp.where(zero, 1, factor)
        return jnp.where(zeros == zero, without, 0)

    dot = others(x, x_zero, rest, zeros) * x_dot
    dot = dot.at[index].add(others(value, value_zero, rest[index], zeros[index]) * value_dot)
    return x.at[index].multiply(value), dot


def _start(x: Array, index: tuple, reduce: str) -> Array:
    """x with the value that `reduce` starts from at index."""
    if reduce in _SUMS:
        return x.at[index].set(0)
    if reduce in ("mul", "multiply"):
        return x.at[index].set(1)
    if dtypes.is_floating(x.dtype):
        return x.at[index].set(jnp.inf if reduce == "amin" else -jnp.inf)
    limits = jnp.iinfo(x.dtype)
    return x.at[index].set(limits.max if reduce == "amin" else limits.min)


def _put(x: Array, index: tuple, value: Array, reduce: str, include_self: bool) -> Array:
    if reduce != "assign" and not include_self:
        x = _start(x, index, reduce)
    if reduce in ("mul", "multiply"):
        return _multiply_at(x, value, index)
    if reduce not in _SUMS:
        return getattr(x.at[index], _REDUCES[reduce])(value)
    total = add(x, index, value)
    if reduce == "add":
        return total
    count = jnp.zeros(x.shape, jnp.int32).at[index].add(1)
    count = jnp.maximum(count + include_self, 1).astype(x.dtype)
    return total // count if dtypes.is_integer(x.dtype) else total / count


def _check_put_along(arr: Any, indices: Any, values: Any, axis: Any, *_: Any, **__: Any) -> None:
    dtypes.check_holds("put_along_axis: values", arr.dtype, values)
    check_along("put_along_axis", indices, arr, axis)


@preceded(_check_put_along)
@op(inplace=True)
def put_along_axis(
    arr: Array,
    indices: Array,
    values: Array,
    axis: int,
    reduce: str = "assign",
    include_self: bool = True,
    broadcast: bool = True,
) -> Array:
    """arr with values at indices along axis: out[indices[i, j], j] = values[i, j] for axis 0.

    reduce: "assign", or how the values for one place combine: "add", "mul" ("multiply"), "mean", "amin", "amax", with
    the element that was there unless include_self=False. broadcast: indices expand to arr's other dims, values to
    indices; without it indices may be shorter than arr, values at least as long. Raises ShapeError, IndexError.
    """
    if reduce not in _REDUCES and reduce not in _SUMS:
        raise ShapeError(f"put_along_axis: reduce={reduce!r}; choose one of {', '.join((*_REDUCES, *_SUMS))}")
    dim, outer, inner = take_shapes(arr, indices, axis, broadcast, "put_along_axis")
    if broadcast and outer != list(arr.shape):
        raise ShapeError(f"put_along_axis: indices {list(indices.shape)} do not expand to {list(arr.shape)}")
    indices = jnp.broadcast_to(indices, inner)
    if not broadcast and values.ndim == arr.ndim and all(v >= n for v, n in zip(values.shape, inner, strict=True)):
        values = values[tuple(slice(n) for n in inner)]
    values = _fit("put_along_axis", values, inner, arr.dtype)
    index = [jax.lax.broadcasted_iota(dtypes.int32, inner, d) for d in range(arr.ndim)]
    index[dim] = bounded(indices, arr.shape[dim])
    return _put(arr, tuple(index), values, reduce, include_self)


@composite
def scatter_add(input: AnyTensor, dim: int, index: AnyTensor, src: AnyTensor) -> AnyTensor:
    """put_along_axis with reduce="add" and no broadcasting."""
    return put_along_axis(input, index, src, dim, "add", True, False)


@composite
def scatter_add_(input: AnyTensor, dim: int, index: AnyTensor, src: AnyTensor) -> AnyTensor:
    """scatter_add written into input, which is returned."""
    return put_along_axis(input, index, src, dim, "add", True, False, out=input)


@composite
def scatter_reduce(
    input: AnyTensor, dim: int, index: AnyTensor, src: AnyTensor, reduce: str, include_self: bool = True
) -> AnyTensor:
    """put_along_axis without broadcasting; reduce: "sum", "prod", "mean", "amin" or "amax"."""
    known = {"sum": "add", "prod": "mul", "mean": "mean", "amin": "amin", "amax": "amax"}
    if reduce not in known:
        raise ShapeError(f"scatter_reduce: reduce={reduce!r}; choose one of {', '.join(known)}")
    return put_along_axis(input, index, src, dim, known[reduce], include_self, False)


# slices and diagonals


@op
def select_scatter(x: Array, values: Array, axis: int, index: int) -> Array:
    """x with the slice at one index along axis replaced by values, of that slice's shape. IndexError."""
    dim = dim_of(axis, x.ndim, "select_scatter")
    check_index("select_scatter", index, x.shape[dim], dim)
    values = _exactly("select_scatter", "values", values, x.shape[:dim] + x.shape[dim + 1 :], x.dtype)
    return x.at[(slice(None),) * dim + (index,)].set(values)


@op
def slice_scatter(
    x: Array, value: Array, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], strides: Sequence[int]
) -> Array:
    """x with x[starts:ends:strides] along axes replaced by value, which broadcasts."""
    index = slice_index(x.shape, axes, starts, ends, strides, "slice_scatter")
    shape = jax.eval_shape(lambda a: a[index], x).shape
    return x.at[index].set(_fit("slice_scatter", value, shape, x.dtype))


def _set_diagonal(x: Array, y: Array, offset: int, axis1: int, axis2: int, what: str) -> Array:
    a, b = dim_of(axis1, x.ndim, what), dim_of(axis2, x.ndim, what)
    if a == b:
        raise ShapeError(f"{what}: axis1={axis1} and axis2={axis2} are one dim of {list(x.shape)}; name two")
    rows, columns = np.arange(x.shape[a]), np.arange(x.shape[a]) + offset
    inside = (columns >= 0) & (columns < x.shape[b])
    rows, columns = rows[inside], columns[inside]
    moved = jnp.moveaxis(x, (a, b), (-2, -1))
    y = _exactly(what, "y", y, (*moved.shape[:-2], len(rows)), x.dtype)
    return jnp.moveaxis(moved.at[..., rows, columns].set(y), (-2, -1), (a, b))


@op
def diagonal_scatter(x: Array, y: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """x with its diagonal in the plane of two dims replaced by y, which has the shape of diagonal(x, ...).

    offset > 0 is above the main diagonal. Raises ShapeError.
    """
    return _set_diagonal(x, y, offset, axis1, axis2, "diagonal_scatter")


@op(inplace=True)
def fill_diagonal_tensor(x: Array, y: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """diagonal_scatter by another name."""
    return _set_diagonal(x, y, offset, dim1, dim2, "fill_diagonal_tensor")


@op(inplace=True)
def fill_diagonal(x: Array, value: Array, offset: int = 0, wrap: bool = False) -> Array:
    """x with value (a number) where column - row = offset; with more than 2 dims, of one size, where all indices agree.

    wrap starts the diagonal of a tall matrix again after each block of columns + 1 rows.
    """
    if x.ndim < 2 or (x.ndim > 2 and (len(set(x.shape)) > 1 or offset)):
        raise ShapeError(
            f"fill_diagonal: {list(x.shape)}, offset={offset}; needs 2 dims, or more of one size with offset=0"
        )
    value = _fit("fill_diagonal", value, (), x.dtype)
    grids = jnp.ogrid[tuple(slice(n) for n in x.shape)]
    if x.ndim > 2:
        return jnp.where(functools.reduce(jnp.logical_and, [g == grids[0] for g in grids[1:]]), value, x)
    row = grids[0] % (x.shape[1] + 1) if wrap else grids[0]
    return jnp.where(grids[1] - row == offset, value, x)
