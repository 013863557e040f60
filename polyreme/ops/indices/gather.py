"""Reading elements at given indices or under a mask: gather, index_select, take, masked_select and their relatives.

A negative index counts from the end, except where an op says otherwise; one out of range: see ops.bounds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote
from polyreme.core.op import OPS, composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.bounds import at_hand, check_along, check_coordinates, check_index, dim_of, preceded
from polyreme.ops.by_index import bounded, read, read_along
from polyreme.ops.manipulation import reshape
from polyreme.ops.repetition import broadcast_shapes, broadcast_to
from polyreme.ops.sharding import dim_names, elementwise, without


def need_integers(what: str, index: Array) -> None:
    """Raise DTypeError unless index is of an integer dtype."""
    if not dtypes.is_integer(index.dtype):
        raise DTypeError(f"{what}: index is {index.dtype.name}, needs int32 or int64; use astype('int64')")


def as_column(what: str, index: Array, *, scalar: bool = False) -> Array:
    """An index [n] or [n, 1] as [n]; a 0-D one passes with scalar. Raises ShapeError or DTypeError for others."""
    need_integers(what, index)
    if index.ndim == 2 and index.shape[1] == 1:
        index = index[:, 0]
    if index.ndim != 1 and not (scalar and index.ndim == 0):
        raise ShapeError(f"{what}: index {list(index.shape)} must be [n] or [n, 1]{' or []' if scalar else ''}")
    return index


# along one dim


def _check_gather(x: Any, index: Any, axis: Any = None, dim: int | None = None, **_: Any) -> Any:
    if isinstance(index, int):  # gather(x, dim, index)
        dim, index = index, axis
    if dim is not None:
        return take_along_axis(x, index, dim, False)
    return check_along("gather", index, x, 0 if axis is None else axis)


def _gather_rule(call: OpCall) -> ShardingRule | None:
    """The dim that is looked up is whole; the index's takes its place."""
    x, index = call.shapes[0], call.shapes[1]
    if len(index) != 1 or len(call.outs[0]) != len(x):
        return None
    dim = (call.attrs.get("axis") or 0) % len(x)
    names = dim_names(x)
    return ShardingRule((without(names, dim), ("i",)), ((*names[:dim], "i", *names[dim + 1 :]),))


def _take_along_rule(call: OpCall) -> ShardingRule | None:
    """The dim that is looked up is whole in arr; the other dims go through if they agree."""
    arr, index = call.shapes[0], call.shapes[1]
    dim = call.dim(call.attrs["axis"])
    names = dim_names(call.outs[0])
    if len(arr) != len(index) or any(n != m for i, (n, m) in enumerate(zip(arr, index, strict=True)) if i != dim):
        return None
    return ShardingRule((without(names, dim), names), (names,))


def _one_hot_rule(call: OpCall) -> ShardingRule:
    """The dims of the ids go through."""
    ids = dim_names(call.shapes[0], "b")
    return ShardingRule((ids,), ((*ids, None),))


def _slices(x: Array, index: Array, dim: int) -> Array:
    """Slices of x along dim, whose place the dims of index take."""
    return read(x, (slice(None),) * dim + (index,))


@preceded(_check_gather)
@op(rule=_gather_rule)
def gather(x: Array, index: Array, axis: int | None = None) -> Array:
    """The slices of x along axis (0 by default) that index names, in its order.

    index [n] or [n, 1] -> a dim of size n in axis's place; a 0-D index takes that dim away. Raises IndexError.
    gather(x, dim, index), or with dim= by name, is take_along_axis(x, index, dim, broadcast=False).
    """
    index = as_column("gather", index, scalar=True)
    return _slices(x, index, dim_of(0 if axis is None else axis, x.ndim, "gather"))


def _check_index_select(x: Any, index: Any, axis: Any = 0, **_: Any) -> Any:
    if isinstance(index, int) and not isinstance(axis, int):  # index_select(x, dim, index)
        return index_select(x, axis, index)
    return check_along("index_select", index, x, axis)


@preceded(_check_index_select)
@op(rule=_gather_rule)
def index_select(x: Array, index: Array, axis: int = 0) -> Array:
    """The slices of x along axis that index [n] names, in its order. Raises IndexError."""
    return _slices(x, as_column("index_select", index), dim_of(axis, x.ndim, "index_select"))


def _check_index_sample(x: Any, index: Any, **_: Any) -> None:
    check_index("index_sample", index, x.shape[-1], 1, negative=False)


@preceded(_check_index_sample)
@op
def index_sample(x: Array, index: Array) -> Array:
    """Elements of each row: x [b, n], index [b, m] -> [b, m] with x[i, index[i, j]]. No negative index; IndexError."""
    need_integers("index_sample", index)
    if x.ndim != 2 or index.ndim != 2 or x.shape[0] != index.shape[0]:
        raise ShapeError(f"index_sample: needs x [b, n] and index [b, m], got {list(x.shape)} and {list(index.shape)}")
    return read_along(x, bounded(index, x.shape[1], negative=False), 1)


def take_shapes(arr: Array, indices: Array, axis: int, broadcast: bool, what: str) -> tuple[int, list[int], list[int]]:
    """(dim, arr's shape, indices' shape) as take_along_axis uses them. Raises ShapeError if they do not fit.

    With broadcast both expand against each other outside of axis; without, arr is cut to indices there.
    """
    need_integers(what, indices)
    if arr.ndim != indices.ndim:
        raise ShapeError(f"{what}: {list(arr.shape)} and indices {list(indices.shape)} need the same number of dims")
    dim = dim_of(axis, arr.ndim, what)
    outer, inner = list(arr.shape), list(indices.shape)
    for d in range(arr.ndim):
        if d == dim:
            continue
        if broadcast and 1 in (outer[d], inner[d]):
            outer[d] = inner[d] = max(outer[d], inner[d]) if 0 not in (outer[d], inner[d]) else 0
        elif outer[d] < inner[d] or (broadcast and outer[d] != inner[d]):
            raise ShapeError(
                f"{what}: indices {list(indices.shape)} against {list(arr.shape)}, broadcast={broadcast}: dim {d} is "
                f"{inner[d]} against {outer[d]}"
            )
        elif not broadcast:
            outer[d] = inner[d]
    return dim, outer, inner


def _check_take_along(arr: Any, indices: Any, axis: Any, *_: Any, **__: Any) -> None:
    check_along("take_along_axis", indices, arr, axis)


@preceded(_check_take_along)
@op(rule=_take_along_rule)
def take_along_axis(arr: Array, indices: Array, axis: int, broadcast: bool = True) -> Array:
    """Elements of arr along axis at indices of as many dims: out[i, j] = arr[indices[i, j], j] for axis 0.

    broadcast: the other dims of both expand against each other; without it arr is read only as far as indices goes.
    Raises IndexError.
    """
    dim, outer, inner = take_shapes(arr, indices, axis, broadcast, "take_along_axis")
    if broadcast:
        arr, indices = jnp.broadcast_to(arr, outer), jnp.broadcast_to(indices, inner)
    else:
        arr = arr[tuple(slice(n) for n in outer)]
    return read_along(arr, indices, dim)


# anywhere


def _check_gather_nd(x: Any, index: Any, **_: Any) -> None:
    check_coordinates("gather_nd", index, x.shape)


@preceded(_check_gather_nd)
@op
def gather_nd(x: Array, index: Array) -> Array:
    """x at coordinates: index [*b, k] names elements of the first k dims -> [*b, *the other dims of x]. IndexError."""
    at = coordinates("gather_nd", index, x)
    return read(x, at) if at else jnp.broadcast_to(x, index.shape[:-1] + x.shape)


def coordinates(what: str, index: Array, x: Array) -> tuple[Array, ...]:
    """The columns of index [*b, k] as k index arrays into x. Raises ShapeError if k is more than x's dims."""
    need_integers(what, index)
    if index.ndim == 0 or index.shape[-1] > x.ndim:
        raise ShapeError(
            f"{what}: index {list(index.shape)} must end in at most {x.ndim} coordinates of {list(x.shape)}"
        )
    return tuple(jnp.moveaxis(index, -1, 0))


def _check_take(x: Any, index: Any, mode: str = "raise", **_: Any) -> None:
    if mode == "raise":
        check_index("take", index, int(np.prod(x.shape)), 0)


@preceded(_check_take)
@op
def take(x: Array, index: Array, mode: str = "raise") -> Array:
    """Elements of the flattened x -> the shape of index.

    mode: "raise" (IndexError for one out of range), "wrap" (it counts on from the other end) or "clip" (the nearest
    end; a negative one is 0).
    """
    need_integers("take", index)
    if mode not in ("raise", "wrap", "clip"):
        raise ShapeError(f"take: mode={mode!r}; choose 'raise', 'wrap' or 'clip'")
    if mode != "raise":
        index = index.astype(dtypes.int64)
        index = index % x.size if mode == "wrap" else jnp.clip(index, 0, x.size - 1)
    return _slices(x.reshape(-1), index, 0)


# under a mask


@composite
def nonzero(x: AnyTensor, as_tuple: bool = False, name: str | None = None, out: AnyTensor | None = None) -> Any:
    """Indices of the nonzero elements in row-major order: int64 [n, ndim], or with as_tuple one [n] per dim.

    Reads the host: the number of them is the shape. Raises CaptureError inside a capture.
    """
    found = np.argwhere(state.host(x, "nonzero(), whose result has a shape only known on the host"))
    if as_tuple:
        return tuple(OPS["cast"](column, dtypes.int64) for column in found.T)
    return OPS["cast"](found, dtypes.int64, out=out)


@composite
def argwhere(input: AnyTensor) -> AnyTensor:
    """nonzero by another name."""
    return nonzero(input)


def _condition_alone(condition: Any, x: Any = None, y: Any = None, **others: Any) -> Any:
    return nonzero(condition, True) if x is None and y is None and not others.keys() - {"name"} else None


@preceded(_condition_alone)
@op(rule=elementwise)
def where(condition: Array, x: Array | None = None, y: Array | None = None) -> Array:
    """x where condition is True, y elsewhere; all three broadcast, x and y promote.

    Without x and y: nonzero(condition, as_tuple=True). Raises ShapeError if only one of them is given, DTypeError for a
    condition of another dtype than bool.
    """
    if x is None or y is None:
        raise ShapeError("where: takes both x and y, or neither; only one was given")
    need_mask("where", condition, "condition")
    return jnp.where(condition, *promote(x, y))


@composite
def where_(condition: AnyTensor, x: AnyTensor, y: AnyTensor, name: str | None = None) -> AnyTensor:
    """where(condition, x, y) written into x, which is returned."""
    return where(condition, x, y, out=x)


def need_mask(what: str, mask: Any, name: str = "mask") -> None:
    """Raise DTypeError unless mask is bool."""
    if mask.dtype != dtypes.bool_:
        raise DTypeError(f"{what}: {name} is {mask.dtype.name}, needs bool; compare or cast it first")


@composite
def masked_select(x: AnyTensor, mask: AnyTensor, name: str | None = None, out: AnyTensor | None = None) -> AnyTensor:
    """The elements of x where mask is True, in row-major order, as one dim; x and mask broadcast.

    Reads mask on the host: the number of them is the shape. Raises CaptureError inside a capture.
    """
    need_mask("masked_select", mask)
    shape = broadcast_shapes(x.shape, mask.shape)
    value = state.host(mask, "masked_select(), whose result has a shape only known on the host (where() keeps it)")
    at = np.flatnonzero(np.broadcast_to(value, shape))
    whole = x if list(x.shape) == shape else broadcast_to(x, shape)
    return gather(reshape(whole, [-1]), at, 0, out=out)


@op(inplace=True, rule=elementwise)
def masked_fill(x: Array, mask: Array, value: Array) -> Array:
    """x with value (a number, or a Tensor that broadcasts) where mask is True, or not 0; x and mask broadcast."""
    return jnp.where(mask != 0, dtypes.convert(value, x.dtype), x)


def _check_masked_scatter(x: Any, mask: Any, value: Any, **_: Any) -> None:
    found, room = at_hand(mask), int(np.prod(value.shape))
    if found is None or found.dtype != dtypes.bool_:
        return
    need = int(found.sum()) * (int(np.prod(x.shape)) // max(found.size, 1) if found.size else 0)
    if need > room:
        raise ShapeError(f"masked_scatter: mask has {need} True elements, value only {room}; give at least as many")


@preceded(_check_masked_scatter)
@op(inplace=True)
def masked_scatter(x: Array, mask: Array, value: Array) -> Array:
    """x with the elements where mask is True replaced, in row-major order, by successive elements of value.

    mask broadcasts to x. Raises ShapeError if value is too short and mask at hand; else what is missing is NaN.
    """
    need_mask("masked_scatter", mask)
    mask = jnp.broadcast_to(mask, x.shape)
    if value.size == 0:
        return jnp.where(mask, jnp.asarray(dtypes.not_a_number(x.dtype), x.dtype), x)
    nth = jnp.cumsum(mask.reshape(-1)).reshape(x.shape) - 1
    return jnp.where(mask, jnp.take(value.reshape(-1).astype(x.dtype), jnp.maximum(nth, 0), mode="fill"), x)


# as ids


def _check_one_hot(x: Any, num_classes: int = -1, **_: Any) -> Any:
    if num_classes == -1:
        value = state.host(x, "one_hot() without num_classes, which is then 1 + the largest element")
        return one_hot(x, int(value.max()) + 1 if value.size else 0)
    check_index("one_hot", x, num_classes, -1, negative=False)
    return None


@preceded(_check_one_hot)
@op(method=False, rule=_one_hot_rule)
def one_hot(x: Array, num_classes: int = -1) -> Array:
    """Of integers, rows of the default dtype with a 1 at each one's place: [*b] -> [*b, num_classes].

    num_classes=-1 takes 1 + the largest, read on the host. Raises IndexError for one outside [0, num_classes).
    """
    need_integers("one_hot", x)
    return jax.nn.one_hot(x, num_classes, dtype=dtypes.default_dtype())


def _check_shard_index(input: Any, index_num: int, *_: Any, **__: Any) -> None:
    check_index("shard_index", input, index_num, -1, negative=False)


@preceded(_check_shard_index)
@op
def shard_index(input: Array, index_num: int, nshards: int, shard_id: int, ignore_value: int = -1) -> Array:
    """Ids of index_num as the shard that holds them numbers them: input % size where input // size is shard_id.

    size = ceil(index_num / nshards); ids of other shards become ignore_value. Raises IndexError for an id out of range.
    """
    need_integers("shard_index", input)
    if not 0 <= shard_id < nshards:
        raise ShapeError(f"shard_index: shard_id={shard_id} of nshards={nshards}; give one from 0 to {nshards - 1}")
    size = -(-index_num // nshards)
    return jnp.where(input // size == shard_id, input % size, jnp.asarray(ignore_value, input.dtype))


ALIASES = {"take_along_dim": "take_along_axis"}
