"""Rows added up by segment, and messages along the edges of a graph: what geometric and sparse are made of.

A segment without rows is 0. A read out of range gives NaN and a write is dropped where the value of an index
is not at hand (see ops.bounds); where it is, IndexError.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote
from polyreme.core.op import composite, op
from polyreme.errors import ArgumentTypeError, ConfigError, ShapeError, did_you_mean
from polyreme.ops.bounds import check_index, preceded
from polyreme.ops.by_index import bounded, read
from polyreme.ops.indices.gather import as_column

# rows by segment


def added(data: Array, ids: Array, num: int) -> Array:
    """Sums of rows by id: data [n, *], ids [n] -> [num, *]. Half precision is added up in float32; bool is or'ed."""
    if data.dtype == bool:
        return jnp.zeros((num, *data.shape[1:]), bool).at[bounded(ids, num, negative=False)].max(data)
    wide = data.astype(dtypes.float32) if data.dtype.itemsize < 4 and dtypes.is_floating(data.dtype) else data
    zeros = jnp.zeros((num, *data.shape[1:]), wide.dtype)
    return zeros.at[bounded(ids, num, negative=False)].add(wide).astype(data.dtype)


def counted(ids: Array, num: int, ndim: int) -> Array:
    """Rows of each segment, shaped to divide an array of ndim dims, and at least 1."""
    found = jnp.zeros((num,), dtypes.int32).at[bounded(ids, num, negative=False)].add(1)
    return jnp.maximum(found, 1).reshape((num,) + (1,) * (ndim - 1))


def _mean(data: Array, ids: Array, num: int) -> Array:
    return quotient(added(data, ids, num), counted(ids, num, data.ndim).astype(data.dtype))


def quotient(x: Array, y: Array) -> Array:
    """x / y; of integers rounded towards zero, in their dtype."""
    return jax.lax.div(*jnp.broadcast_arrays(x, y)) if dtypes.is_integer(x.dtype) else x / y


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def extreme(data: Array, ids: Array, num: int, largest: bool) -> Array:
    """The largest or smallest of the rows of each segment; its derivative is shared by rows that are equal."""
    if dtypes.is_floating(data.dtype):
        worst = jnp.asarray(-jnp.inf if largest else jnp.inf, data.dtype)
    else:
        worst = jnp.asarray(dtypes.iinfo(data.dtype).min if largest else dtypes.iinfo(data.dtype).max, data.dtype)
    at = bounded(ids, num, negative=False)
    start = jnp.full((num, *data.shape[1:]), worst).at[at]
    found = start.max(data) if largest else start.min(data)
    present = jnp.zeros((num,), bool).at[at].set(True)
    return jnp.where(present.reshape((num,) + (1,) * (data.ndim - 1)), found, jnp.zeros((), data.dtype))


@extreme.defjvp
def _extreme_jvp(num: int, largest: bool, primals: tuple, tangents: tuple) -> tuple:
    data, ids = primals
    out = extreme(data, ids, num, largest)
    here = data == read(out, (bounded(ids, num, negative=False),), fill_value=0)
    share = jnp.maximum(added(here.astype(out.dtype), ids, num), 1)
    return out, added(jnp.where(here, tangents[0], 0), ids, num) / share


_REDUCE: dict[str, Callable[..., Array]] = {
    "sum": added,
    "mean": _mean,
    "max": lambda data, ids, num: extreme(data, ids, num, True),
    "min": lambda data, ids, num: extreme(data, ids, num, False),
}
_MESSAGE: dict[str, Callable[..., Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": quotient,
}


def _choose(what: str, name: str, value: str, table: dict[str, Callable[..., Array]]) -> Callable[..., Array]:
    if value not in table:
        raise ConfigError(f"{what}: {name}={value!r}{did_you_mean(value, table)}")
    return table[value]


def _check_segment(data: Any, segment_ids: Any, num_segments: int, *_: Any, **__: Any) -> None:
    check_index("segment_reduce", segment_ids, num_segments, 0, negative=False)


@preceded(_check_segment)
@op(amp="fp32", method=False)
def segment_reduce(data: Array, segment_ids: Array, num_segments: int, reduce_op: str = "sum") -> Array:
    """Rows reduced by segment: data [n, *], ids [n] in any order -> [num_segments, *]; a segment without rows is 0.

    reduce_op: "sum", "mean" (of integers rounded towards zero), "max" or "min". Raises IndexError.
    """
    reduce = _choose("segment_reduce", "reduce_op", reduce_op, _REDUCE)
    ids = as_column("segment_reduce", segment_ids)
    if data.ndim == 0 or data.shape[0] != ids.shape[0]:
        raise ShapeError(f"segment_reduce: data {list(data.shape)} needs a row for each of {ids.shape[0]} segment_ids")
    return reduce(data, ids, num_segments)


def _segments(what: str, segment_ids: Any) -> int:
    """1 + the largest id."""
    ids = state.host(segment_ids, f"{what}(), whose result has 1 + max(segment_ids) rows (send_u_recv takes out_size),")
    return int(ids.max()) + 1 if ids.size else 0


def _by_segment(name: str, meaning: str) -> Any:
    def reduce(data: Any, segment_ids: Any, name: str | None = None) -> Any:
        return segment_reduce(data, segment_ids, _segments(what, segment_ids), how)

    what, how = f"segment_{name}", name
    reduce.__name__ = reduce.__qualname__ = what
    reduce.__doc__ = (
        f"{meaning} of the rows of each segment: data [n, *], segment_ids [n] -> [1 + max(segment_ids), *].\n\n"
        "    A segment without rows is 0. Reads segment_ids on the host: the largest is the shape."
    )
    return composite(reduce, method=False)


segment_sum = _by_segment("sum", "Sum")
segment_mean = _by_segment("mean", "Mean")
segment_max = _by_segment("max", "Largest")
segment_min = _by_segment("min", "Smallest")

# messages along edges


def _align(x: Array, y: Array) -> tuple[Array, Array]:
    """x and y [edges, *] with dims of size 1 put in after the first, so that the others broadcast."""
    ndim = max(x.ndim, y.ndim)
    x, y = (a.reshape(a.shape[:1] + (1,) * (ndim - a.ndim) + a.shape[1:]) for a in (x, y))
    return promote(x, y)


def _rows(x: Array, index: Array) -> Array:
    return read(x, (bounded(index, x.shape[0], negative=False),))


def _edges(what: str, src_index: Array, dst_index: Array) -> tuple[Array, Array]:
    src, dst = as_column(what, src_index), as_column(what, dst_index)
    if src.shape != dst.shape:
        raise ShapeError(
            f"{what}: src_index {list(src_index.shape)} and dst_index {list(dst_index.shape)} are the ends of the same "
            "edges; give as many of each"
        )
    return src, dst


def _check_recv(what: str, x: Any, src_index: Any, dst_index: Any, out_size: int) -> None:
    check_index(what, src_index, x.shape[0], 0, negative=False)
    check_index(what, dst_index, out_size, 0, negative=False)


def _check_u_recv(x: Any, src_index: Any, dst_index: Any, reduce_op: str, out_size: int) -> None:
    _check_recv("send_u_recv", x, src_index, dst_index, out_size)


@preceded(_check_u_recv)
@op(amp="fp32", method=False)
def gather_reduce(x: Array, src_index: Array, dst_index: Array, reduce_op: str, out_size: int) -> Array:
    """send_u_recv with its number of rows known."""
    src, dst = _edges("send_u_recv", src_index, dst_index)
    return _choose("send_u_recv", "reduce_op", reduce_op, _REDUCE)(_rows(x, src), dst, out_size)


def _check_ue_recv(
    x: Any, y: Any, src_index: Any, dst_index: Any, message_op: str, reduce_op: str, out_size: int
) -> None:
    _check_recv("send_ue_recv", x, src_index, dst_index, out_size)


@preceded(_check_ue_recv)
@op(amp="fp32", method=False)
def gather_message_reduce(
    x: Array, y: Array, src_index: Array, dst_index: Array, message_op: str, reduce_op: str, out_size: int
) -> Array:
    """send_ue_recv with its number of rows known."""
    src, dst = _edges("send_ue_recv", src_index, dst_index)
    if y.ndim == 0 or y.shape[0] != src.shape[0]:
        raise ShapeError(f"send_ue_recv: y {list(y.shape)} needs a row for each of {src.shape[0]} edges")
    message = _choose("send_ue_recv", "message_op", message_op, _MESSAGE)(*_align(_rows(x, src), y))
    return _choose("send_ue_recv", "reduce_op", reduce_op, _REDUCE)(message, dst, out_size)


def _check_uv(x: Any, y: Any, src_index: Any, dst_index: Any, *_: Any, **__: Any) -> None:
    check_index("send_uv", src_index, x.shape[0], 0, negative=False)
    check_index("send_uv", dst_index, y.shape[0], 0, negative=False)


@preceded(_check_uv)
@op(method=False)
def send_uv(x: Array, y: Array, src_index: Array, dst_index: Array, message_op: str = "add") -> Array:
    """A message for each edge from both of its ends: x[src_index] and y[dst_index] combined -> [edges, *].

    message_op: "add", "sub", "mul" or "div"; dims after the first broadcast. Raises IndexError.
    """
    src, dst = _edges("send_uv", src_index, dst_index)
    return _choose("send_uv", "message_op", message_op, _MESSAGE)(*_align(_rows(x, src), _rows(y, dst)))


def _out_size(what: str, x: Any, out_size: Any) -> int:
    if isinstance(out_size, state.TensorState):
        out_size = int(state.host(out_size, f"{what}(out_size=Tensor)").reshape(()))
    if out_size is not None and not isinstance(out_size, numbers.Integral):
        raise ArgumentTypeError(f"{what}: out_size={out_size!r}; give an integer or None")
    return int(x.shape[0]) if out_size is None or out_size <= 0 else int(out_size)


@composite(method=False)
def send_u_recv(
    x: AnyTensor,
    src_index: AnyTensor,
    dst_index: AnyTensor,
    reduce_op: str = "sum",
    out_size: Any = None,
    name: str | None = None,
) -> AnyTensor:
    """Rows of x sent along edges and reduced where they arrive: the rows x[src_index[e]] with one dst_index[e].

    x [nodes, *] -> [out_size, *], by default as many rows as x; rows without an edge are 0. reduce_op: "sum", "mean",
    "max" or "min". Raises IndexError.
    """
    return gather_reduce(x, src_index, dst_index, reduce_op, _out_size("send_u_recv", x, out_size))


@composite(method=False)
def send_ue_recv(
    x: AnyTensor,
    y: AnyTensor,
    src_index: AnyTensor,
    dst_index: AnyTensor,
    message_op: str = "add",
    reduce_op: str = "sum",
    out_size: Any = None,
    name: str | None = None,
) -> AnyTensor:
    """Rows of x combined with those of the edges y [edges, *], and reduced where they arrive.

    The message of edge e is x[src_index[e]] message_op y[e], whose dims after the first broadcast; message_op: "add",
    "sub", "mul" or "div". The rest is as in send_u_recv.
    """
    size = _out_size("send_ue_recv", x, out_size)
    return gather_message_reduce(x, y, src_index, dst_index, message_op, reduce_op, size)
