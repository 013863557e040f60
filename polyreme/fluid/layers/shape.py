"""Variables rearranged, cut, joined and looked up."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import ShapeError
from polyreme.fluid.layer import layer, one
from polyreme.nn import functional as F
from polyreme.ops import arithmetic as ar
from polyreme.ops import attributes, manipulation, repetition, search, slicing
from polyreme.ops.creation import arange
from polyreme.ops.indices import gather as gathering
from polyreme.ops.indices import scatter as sc
from polyreme.ops.indices.gather import nonzero
from polyreme.ops.math import multiplex as chosen_rows
from polyreme.ops.unique import unique as distinct
from polyreme.program.activations import activate


@layer
def reshape(
    x: Any, shape: Any, actual_shape: Any = None, act: str | None = None, inplace: bool = False, name: str | None = None
) -> Any:
    """x's elements in another shape: -1 for what is left over, 0 for the size x has there, Variables among ints.

    actual_shape: a Variable that holds the shape and is what counts. inplace: results are new values here.
    """
    wanted = shape if actual_shape is None else actual_shape
    if isinstance(wanted, (list, tuple)):
        wanted = [x.shape[i] if type(s) is int and s == 0 else s for i, s in enumerate(wanted)]
    return activate(manipulation.reshape(x, wanted), act)


@layer
def squeeze(input: Any, axes: Sequence[int], name: str | None = None) -> Any:
    """Without these dims, of size 1; without all of those if axes is empty."""
    return manipulation.squeeze(input, builtins.list(axes) or None)


@layer
def unsqueeze(input: Any, axes: Any, name: str | None = None) -> Any:
    """With dims of 1 at these places of the result."""
    return manipulation.unsqueeze(input, axes)


@layer
def flatten(x: Any, axis: int = 1, name: str | None = None) -> Any:
    """A matrix: [product of the dims before axis, product of the others]."""
    if not 0 <= axis <= x.ndim:
        raise ShapeError(f"fluid.layers.flatten: axis={axis} of shape {list(x.shape)}; give 0 to {x.ndim}")
    front, back = x.shape[:axis], x.shape[axis:]
    if min(back, default=1) >= 0:
        return manipulation.reshape(x, [-1, math.prod(back)])
    return manipulation.reshape(x, [math.prod(front), -1])


@layer
def transpose(x: Any, perm: Sequence[int], name: str | None = None) -> Any:
    """Dims in another order."""
    return manipulation.transpose(x, perm)


@layer
def split(input: Any, num_or_sections: Any, dim: Any = -1, name: str | None = None) -> list[Any]:
    """Equal parts along dim, or parts of these sizes."""
    return builtins.list(manipulation.split(input, num_or_sections, dim))


@layer
def stack(x: Any, axis: int = 0) -> Any:
    """Variables of one shape along a new dim."""
    return manipulation.stack(builtins.list(x) if isinstance(x, (list, tuple)) else [x], axis)


@layer
def unstack(x: Any, axis: int = 0, num: int | None = None) -> list[Any]:
    """The slices along axis."""
    return builtins.list(manipulation.unstack(x, axis, num))


@layer
def slice(input: Any, axes: Sequence[int], starts: Any, ends: Any) -> Any:
    """input[start:end] along each of axes; negative numbers count from the end."""
    return slicing.slice(input, axes, starts, ends)


@layer
def strided_slice(input: Any, axes: Sequence[int], starts: Any, ends: Any, strides: Any) -> Any:
    """input[start:end:stride] along each of axes."""
    return slicing.strided_slice(input, axes, starts, ends, strides)


@layer
def crop_tensor(x: Any, shape: Any = None, offsets: Any = None, name: str | None = None) -> Any:
    """The part of this shape that begins at offsets."""
    return slicing.crop(x, shape, offsets)


@layer
def expand(x: Any, expand_times: Any, name: str | None = None) -> Any:
    """x repeated so often along each dim."""
    return repetition.tile(x, expand_times)


@layer
def expand_as(x: Any, target_tensor: Any, name: str | None = None) -> Any:
    """x repeated along each dim until it has target_tensor's shape, whose sizes are multiples of x's."""
    sizes = builtins.list(zip(target_tensor.shape, x.shape, strict=True))
    if any(t < 0 or s < 0 for t, s in sizes):
        return repetition.expand_as(x, target_tensor)
    return repetition.tile(x, [t // s for t, s in sizes])


@layer
def shape(input: Any) -> Any:
    """The sizes of its dims when the Program runs, int32."""
    return ar.cast(attributes.shape(input), "int32")


@layer
def rank(input: Any) -> Any:
    """How many dims it has, int32 []."""
    return ar.cast(attributes.rank(input), "int32")


@layer
def size(input: Any) -> Any:
    """How many elements it has when the Program runs, int64 [1]."""
    return one(attributes.numel(input))


@layer
def gather(input: Any, index: Any, overwrite: bool = True) -> Any:
    """Rows of input at index. overwrite: how gradients of a row that is taken twice are added up; they are the same."""
    return gathering.gather(input, index)


@layer
def gather_nd(input: Any, index: Any, name: str | None = None) -> Any:
    """Parts of input at places [.., k] of its first k dims."""
    return gathering.gather_nd(input, index)


@layer
def scatter(input: Any, index: Any, updates: Any, name: str | None = None, overwrite: bool = True) -> Any:
    """input with updates as its rows at index, or with their sums there unless overwrite."""
    return sc.scatter(input, index, updates, overwrite)


@layer
def scatter_nd_add(ref: Any, index: Any, updates: Any, name: str | None = None) -> Any:
    """ref with updates added at places [.., k] of its first k dims."""
    return sc.scatter_nd_add(ref, index, updates)


@layer
def scatter_nd(index: Any, updates: Any, shape: Any, name: str | None = None) -> Any:
    """updates added up at places [.., k] of zeros."""
    return sc.scatter_nd(index, updates, shape)


@layer
def multiplex(inputs: Sequence[Any], index: Any) -> Any:
    """Row i of inputs[index[i]]."""
    return chosen_rows(builtins.list(inputs), index)


@layer
def topk(input: Any, k: Any, name: str | None = None) -> tuple[Any, Any]:
    """(the k largest along the last dim, where they are)."""
    values, places = search.topk(input, k)
    return values, places


@layer
def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """1 at each id, 0 elsewhere: ids [*b, 1] -> float32 [*b, depth].

    An id out of range is an error where values are known, unless allow_out_of_range: then its row is zeros.
    """
    return one_hot_of(manipulation.squeeze(input, [-1]), depth, allow_out_of_range)


def one_hot_of(ids: Any, depth: int, allow_out_of_range: bool) -> Any:
    """one_hot of ids [*b]."""
    if allow_out_of_range:
        places = ar.equal(manipulation.unsqueeze(ids, [-1]), arange(0, depth, 1, ids.dtype))
        return ar.cast(places, dtypes.float32)
    return ar.cast(F.one_hot(ids, depth), dtypes.float32)


@layer
def pad(x: Any, paddings: Sequence[int], pad_value: float = 0.0, name: str | None = None) -> Any:
    """x with pad_value around it: paddings are [before, after] of dim 0, of dim 1, ..."""
    return F.pad(x, builtins.list(paddings), "constant", pad_value)


@layer
def pad2d(
    input: Any, paddings: Any = (0, 0, 0, 0), mode: str = "constant", pad_value: float = 0.0, data_format: str = "NCHW",
    name: str | None = None,
) -> Any:  # fmt: skip
    """Images with [top, bottom, left, right] more rows and columns: constant, "reflect" or "edge"."""
    top, bottom, left, right = paddings
    kind = {"edge": "replicate"}.get(mode, mode)
    return F.pad(input, [left, right, top, bottom], kind, pad_value, data_format)


@layer
def pad_constant_like(x: Any, y: Any, pad_value: float = 0.0, name: str | None = None) -> Any:
    """y with pad_value behind it in every dim, up to x's shape."""
    return F.pad(y, [n for a, b in zip(x.shape, y.shape, strict=True) for n in (0, a - b)], "constant", pad_value)


@layer
def shard_index(input: Any, index_num: int, nshards: int, shard_id: int, ignore_value: int = -1) -> Any:
    """ids as they are counted in one of nshards shards, ignore_value for those of another."""
    return gathering.shard_index(input, index_num, nshards, shard_id, ignore_value)


@layer
def crop(x: Any, shape: Any = None, offsets: Any = None, name: str | None = None) -> Any:
    """crop_tensor, whose shape may also be that of a Variable."""
    return crop_tensor(x, shape.shape if hasattr(shape, "dtype") else shape, offsets)


@layer
def where(condition: Any) -> Any:
    """The places where a bool Variable is true, int64 [places, dims]. A Program that uses it runs op by op."""
    return nonzero(condition)


@layer
def unique(x: Any, dtype: Any = "int32") -> tuple[Any, Any]:
    """(the distinct elements of x [n] in the order in which they come, which one each of x's is).

    dtype: of the second. A Program that uses it runs op by op.
    """
    return unique_with_counts(x, dtype)[:2]


@layer
def unique_with_counts(x: Any, dtype: Any = "int32") -> tuple[Any, Any, Any]:
    """unique, and how often each element occurs."""
    values, first, inverse, counts = distinct(x, True, True, True, None, dtype)
    order = search.argsort(first)
    place = ar.cast(search.argsort(order), dtype)
    parts = [gathering.gather(v, order) for v in (values, counts)]
    return parts[0], gathering.gather(place, inverse), parts[1]


__all__ = [
    "crop", "crop_tensor", "expand", "expand_as", "flatten", "gather", "gather_nd", "multiplex", "one_hot", "pad",
    "pad2d", "pad_constant_like", "rank", "reshape", "scatter", "scatter_nd", "scatter_nd_add", "shape", "shard_index",
    "size", "slice", "split", "squeeze", "stack", "strided_slice", "topk", "transpose", "unique", "unique_with_counts",
    "unsqueeze", "unstack", "where",
]  # fmt: skip
