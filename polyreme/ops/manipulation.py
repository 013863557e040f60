"""Shape and order of Tensors, joining and splitting: reshape, transpose, flip, concat, split and their relatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core.annotations import Axes, Sizes
from polyreme.core.dtype import promote
from polyreme.core.op import composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ShapeError
from polyreme.ops.bounds import dim_of, dims_of, ints
from polyreme.ops.creation import assign
from polyreme.ops.sharding import along_axis, cuts, dim_names, last_two_swapped, permutes, regroups, without

# shape


def resolve_shape(asked: tuple[int, ...], have: tuple[int, ...], what: str) -> tuple[int, ...]:
    """given with 0 replaced by the dim of have at its place and -1 by what is left over."""
    if asked.count(-1) > 1 or any(s < -1 for s in asked):
        raise ShapeError(f"{what}: shape {list(asked)} has more than one -1 or a size below it; give one -1 at most")
    if 0 in have and 0 in asked and -1 not in asked:
        return asked  # no elements on either side: a 0 copies nothing
    if any(s == 0 and i >= len(have) for i, s in enumerate(asked)):
        raise ShapeError(f"{what}: a 0 in shape {list(asked)} copies a dim that {list(have)} does not have")
    shape = [have[i] if s == 0 else s for i, s in enumerate(asked)]
    copied = {i for i, s in enumerate(asked) if s == 0}
    if 0 in have and -1 in shape:
        # without the dims that are copied on both sides, so that [0, -1] of [0, 3, 4] is [0, 12]
        rest = math.prod(s for i, s in enumerate(have) if i not in copied)
        others = math.prod(s for i, s in enumerate(shape) if i not in copied and s != -1)
        shape[shape.index(-1)] = rest // others
    size, known = math.prod(have), math.prod(s for s in shape if s != -1)
    if -1 in shape and known and size % known == 0:
        shape[shape.index(-1)] = size // known
    if math.prod(shape) != size or -1 in shape:
        raise ShapeError(f"{what}: {list(have)} has {size} elements, which do not fill shape {list(asked)}")
    return tuple(shape)


def _order(perm: Sequence[int], ndim: int) -> list[int]:
    """perm counted from 0; the reverse order for none."""
    return [d % ndim for d in perm] if perm else list(reversed(range(ndim)))


def _moved_order(call: OpCall, ndim: int) -> list[int]:
    source, destination = ([d % ndim for d in ints(call.attrs[name])] for name in ("source", "destination"))
    order = [i for i in range(ndim) if i not in source]
    for there, here in sorted(zip(destination, source, strict=True)):
        order.insert(there, here)
    return order


def _swapped_order(call: OpCall, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = call.attrs["axis0"], call.attrs["axis1"]
    order[a], order[b] = order[b], order[a]
    return order


def _concat_rule(call: OpCall) -> ShardingRule:
    """The joined dim is whole."""
    names = without(dim_names(call.outs[0]), call.dim(call.attrs["axis"]))
    return ShardingRule((names,) * len(call.shapes), (names,), linear="moves", piecewise=True)


def _stack_rule(call: OpCall) -> ShardingRule:
    """The new dim is whole."""
    dim = call.attrs["axis"] % len(call.outs[0])
    names = dim_names(call.shapes[0])
    out = (*names[:dim], None, *names[dim:])
    return ShardingRule((names,) * len(call.shapes), (out,), linear="moves", piecewise=True)


@op(inplace=True, rule=regroups)
def reshape(x: Array, shape: Sequence[int]) -> Array:
    """The elements of x in row-major order under another shape; 0 keeps the dim at its place, one -1 is inferred.

    Raises ShapeError if the numbers of elements differ.
    """
    return jnp.reshape(x, resolve_shape(ints(shape), x.shape, "reshape"))


@op(method=True, rule=regroups)
def ravel(input: Array) -> Array:
    """All elements in row-major order as one dim."""
    return jnp.reshape(input, -1)


@op(inplace=True, rule=regroups)
def flatten(x: Array, start_axis: int = 0, stop_axis: int = -1) -> Array:
    """x with dims start_axis to stop_axis, both included, made one; a 0-D Tensor becomes 1-D."""
    if x.ndim == 0:
        return jnp.reshape(x, (1,))
    start, stop = dim_of(start_axis, x.ndim, "flatten"), dim_of(stop_axis, x.ndim, "flatten")
    if start > stop:
        raise ShapeError(f"flatten: start_axis={start_axis} comes after stop_axis={stop_axis} in {list(x.shape)}")
    return jnp.reshape(x, (*x.shape[:start], math.prod(x.shape[start : stop + 1]), *x.shape[stop + 1 :]))


@op(rule=regroups)
def unflatten(x: Array, axis: int, shape: Sequence[int]) -> Array:
    """x with dim axis made several of the sizes in shape, one of which may be -1."""
    dim = dim_of(axis, x.ndim, "unflatten")
    sizes = resolve_shape(ints(shape), (x.shape[dim],), "unflatten")
    return jnp.reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


@op(inplace=True, rule=regroups)
def squeeze(x: Array, axis: Axes | None = None) -> Array:
    """x without its dims of size 1: all of them, or those in axis; a dim in axis of another size stays."""
    dims = range(x.ndim) if axis in (None, ()) else dims_of(axis, x.ndim, "squeeze") if x.ndim else ()
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


@op(inplace=True, rule=regroups)
def unsqueeze(x: Array, axis: Axes) -> Array:
    """x with a dim of size 1 put in at axis; several are put in one after the other."""
    for at in ints(axis):
        x = jnp.expand_dims(x, dim_of(at, x.ndim + 1, "unsqueeze"))
    return x


def _check_at_least(inputs: tuple, what: str, grow: Any) -> Any:
    if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) and any(hasattr(x, "shape") for x in inputs[0]):
        inputs = tuple(inputs[0])
    tensors = [x if hasattr(x, "shape") else assign(x) for x in inputs]
    grown = [unsqueeze(x, grow(len(x.shape))) for x in tensors]
    if not grown:
        raise ShapeError(f"{what}: needs at least one Tensor")
    return grown[0] if len(grown) == 1 else grown


@composite
def atleast_1d(*inputs: Any, name: str | None = None) -> Any:
    """Each Tensor with 1 dim or more: [] -> [1]. A list of several, one Tensor for one."""
    return _check_at_least(inputs, "atleast_1d", lambda ndim: [0] * (1 - ndim))


@composite
def atleast_2d(*inputs: Any, name: str | None = None) -> Any:
    """Each Tensor with 2 dims or more: [] -> [1, 1], [n] -> [1, n]. A list of several, one Tensor for one."""
    return _check_at_least(inputs, "atleast_2d", lambda ndim: [0] * (2 - ndim))


@composite
def atleast_3d(*inputs: Any, name: str | None = None) -> Any:
    """Each Tensor with 3 dims or more: [] -> [1, 1, 1], [n] -> [1, n, 1], [m, n] -> [m, n, 1]. Lists as atleast_2d."""
    return _check_at_least(inputs, "atleast_3d", lambda ndim: ([0, 1, 2], [0, 2], [2])[ndim] if ndim < 3 else [])


# order of dims and elements


@op(inplace=True, rule=permutes(lambda call, ndim: _order(call.attrs["perm"], ndim)))
def transpose(x: Array, perm: Sequence[int]) -> Array:
    """x with its dims in the order perm: dim i of the result is dim perm[i] of x."""
    dims = dims_of(ints(perm), x.ndim, "transpose")
    if len(dims) != x.ndim:
        raise ShapeError(f"transpose: perm {list(dims)} must name all {x.ndim} dims of {list(x.shape)}")
    return jnp.transpose(x, dims)


@op(rule=permutes(lambda call, ndim: _order(call.attrs["dims"], ndim)))
def permute(input: Array, dims: Sequence[int]) -> Array:
    """transpose by another name."""
    return transpose.op.fn(input, dims)


@op(inplace=True, rule=permutes(last_two_swapped))
def t(input: Array) -> Array:
    """A matrix transposed; 0-D and 1-D pass unchanged, more dims raise ShapeError."""
    if input.ndim > 2:
        raise ShapeError(f"t: takes at most 2 dims, got {list(input.shape)}; use transpose with a perm")
    return input.T


@op(rule=permutes(_moved_order))
def moveaxis(x: Array, source: Axes, destination: Axes) -> Array:
    """x with the dims of source put at destination; the other dims keep their order."""
    a, b = dims_of(source, x.ndim, "moveaxis source"), dims_of(destination, x.ndim, "moveaxis destination")
    if len(a) != len(b):
        raise ShapeError(f"moveaxis: source {list(a)} and destination {list(b)} name different numbers of dims")
    return jnp.moveaxis(x, a, b)


@op(rule=permutes(_swapped_order))
def swapaxes(x: Array, axis0: int, axis1: int) -> Array:
    """x with two dims exchanged."""
    return jnp.swapaxes(x, dim_of(axis0, x.ndim, "swapaxes"), dim_of(axis1, x.ndim, "swapaxes"))


@op(rule=along_axis("moves"))
def flip(x: Array, axis: Axes) -> Array:
    """x with the elements along each dim of axis in reverse order."""
    return jnp.flip(x, dims_of(axis, x.ndim, "flip"))


@op
def rot90(x: Array, k: int = 1, axes: Sequence[int] = (0, 1)) -> Array:
    """x turned k quarter turns in the plane of two dims, from the first toward the second."""
    plane = dims_of(axes, x.ndim, "rot90")
    if len(plane) != 2:
        raise ShapeError(f"rot90: axes={axes} must name two dims")
    return jnp.rot90(x, k, plane)


@op(rule=along_axis("moves"))
def roll(x: Array, shifts: Axes, axis: Axes | None = None) -> Array:
    """x with elements moved by shifts along axis, those pushed out coming in at the start; without axis, flattened."""
    if axis in (None, ()):
        if len(ints(shifts)) != 1:
            raise ShapeError(f"roll: {len(ints(shifts))} shifts without axis, which takes one; give axis too")
        return jnp.roll(x, ints(shifts)[0])
    dims = tuple(dim_of(a, x.ndim, "roll") for a in ints(axis))
    if len(ints(shifts)) != len(dims):
        raise ShapeError(f"roll: {len(ints(shifts))} shifts for {len(dims)} dims; give one each")
    return jnp.roll(x, ints(shifts), dims)


# joining


@op(rule=_concat_rule)
def concat(x: list[Array], axis: int = 0) -> Array:
    """Tensors joined along a dim; their other dims must agree, dtypes promote."""
    if not x or x[0].ndim == 0:
        raise ShapeError(
            f"concat: needs Tensors of 1 dim or more, got {[list(a.shape) for a in x]}; stack joins 0-D ones"
        )
    if len({a.ndim for a in x}) > 1:
        shapes = [list(a.shape) for a in x]
        raise ShapeError(f"concat: Tensors of different numbers of dims, {shapes}; unsqueeze or reshape some of them")
    return jnp.concatenate(promote(*x), dim_of(axis, x[0].ndim, "concat"))


@op(rule=_stack_rule)
def stack(x: list[Array], axis: int = 0) -> Array:
    """Tensors of one shape joined along a new dim at axis; dtypes promote."""
    if not x:
        raise ShapeError("stack: needs at least one Tensor, got an empty list")
    return jnp.stack(promote(*x), dim_of(axis, x[0].ndim + 1, "stack"))


def _join(join: Any, x: list[Array], what: str) -> Array:
    if not x:
        raise ShapeError(f"{what}: needs at least one Tensor, got an empty list")
    return join(promote(*x))


@op(method=False)
def hstack(x: list[Array]) -> Array:
    """Tensors joined along dim 1, those of at most 1 dim along dim 0; dtypes promote."""
    return _join(jnp.hstack, x, "hstack")


@op(method=False)
def vstack(x: list[Array]) -> Array:
    """Tensors joined along dim 0, each made 2-D or more by a leading dim; dtypes promote."""
    return _join(jnp.vstack, x, "vstack")


@op(method=False)
def dstack(x: list[Array]) -> Array:
    """Tensors joined along dim 2, each made 3-D or more as atleast_3d does; dtypes promote."""
    return _join(jnp.dstack, x, "dstack")


@op(method=False)
def column_stack(x: list[Array]) -> Array:
    """Tensors joined along dim 1, those of at most 1 dim as columns; dtypes promote."""
    return _join(jnp.column_stack, x, "column_stack")


@op
def block_diag(inputs: list[Array]) -> Array:
    """A matrix with the given ones along its diagonal and zeros elsewhere; 0-D and 1-D Tensors are rows."""
    if not inputs or any(a.ndim > 2 for a in inputs):
        raise ShapeError(f"block_diag: takes Tensors of at most 2 dims, got {[list(a.shape) for a in inputs]}")
    return jax.scipy.linalg.block_diag(*promote(*inputs))


# splitting


def _cut_at(x: Array, dim: int, ends: Sequence[int]) -> list[Array]:
    """x cut along dim: part i ends at ends[i], the last part takes the rest."""
    starts = (0, *ends)
    stops = (*ends, x.shape[dim])
    index = [slice(None)] * dim
    return [x[(*index, slice(a, b))] for a, b in zip(starts, stops, strict=True)]


@op(rule=cuts)
def split(x: Array, num_or_sections: Sizes, axis: int = 0) -> list[Array]:
    """A list of parts of x along axis: that many equal ones, or ones of the sizes given, one of which may be -1.

    Raises ShapeError if the parts do not fill the dim exactly.
    """
    dim = dim_of(axis, x.ndim, "split")
    size = x.shape[dim]
    if isinstance(num_or_sections, int):
        if num_or_sections < 1 or size % num_or_sections:
            raise ShapeError(
                f"split: {num_or_sections} equal parts do not fill dim {dim} of {list(x.shape)}; "
                "give a list of sizes, or use tensor_split"
            )
        sizes = [size // num_or_sections] * num_or_sections
    else:
        sizes = list(num_or_sections)
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = size - sum(s for s in sizes if s != -1)
        if sum(sizes) != size or min(sizes, default=-1) < 0:
            raise ShapeError(f"split: sizes {list(num_or_sections)} do not fill dim {dim} of {list(x.shape)}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return _cut_at(x, dim, ends)


@op(rule=cuts)
def chunk(x: Array, chunks: int, axis: int = 0) -> list[Array]:
    """split into that many equal parts; raises ShapeError if they do not fill the dim."""
    return split.op.fn(x, chunks, axis)


def _tensor_split(x: Array, num_or_indices: Any, dim: int, what: str) -> list[Array]:
    size = x.shape[dim]
    if not isinstance(num_or_indices, int):
        return _cut_at(x, dim, num_or_indices)
    if num_or_indices < 1:
        raise ShapeError(f"{what}: {num_or_indices} parts; give 1 or more")
    part, longer = divmod(size, num_or_indices)
    return _cut_at(x, dim, [(i + 1) * part + min(i + 1, longer) for i in range(num_or_indices - 1)])


@op(rule=cuts)
def tensor_split(x: Array, num_or_indices: Sizes, axis: int = 0) -> list[Array]:
    """A list of parts along axis: that many, the first ones longer by one if need be, or cut before each index."""
    return _tensor_split(x, num_or_indices, dim_of(axis, x.ndim, "tensor_split"), "tensor_split")


def _need_dims(x: Array, ndim: int, what: str) -> None:
    if x.ndim < ndim:
        raise ShapeError(f"{what}: needs {ndim} dims or more, got {list(x.shape)}")


@op
def hsplit(x: Array, num_or_indices: Sizes) -> list[Array]:
    """tensor_split along dim 1, or dim 0 of a 1-D Tensor."""
    _need_dims(x, 1, "hsplit")
    return _tensor_split(x, num_or_indices, min(x.ndim - 1, 1), "hsplit")


@op
def vsplit(x: Array, num_or_indices: Sizes) -> list[Array]:
    """tensor_split along dim 0 of a Tensor of 2 dims or more."""
    _need_dims(x, 2, "vsplit")
    return _tensor_split(x, num_or_indices, 0, "vsplit")


@op
def dsplit(x: Array, num_or_indices: Sizes) -> list[Array]:
    """tensor_split along dim 2 of a Tensor of 3 dims or more."""
    _need_dims(x, 3, "dsplit")
    return _tensor_split(x, num_or_indices, 2, "dsplit")


@op(rule=cuts)
def unbind(input: Array, axis: int = 0) -> list[Array]:
    """The slices along axis, as a list of Tensors without that dim."""
    dim = dim_of(axis, input.ndim, "unbind")
    return [jax.lax.index_in_dim(input, i, dim, keepdims=False) for i in range(input.shape[dim])]


@op(rule=cuts)
def unstack(x: Array, axis: int = 0, num: int | None = None) -> list[Array]:
    """The slices along axis, as a list of Tensors without that dim; num, if given, must be how many there are."""
    dim = dim_of(axis, x.ndim, "unstack")
    if num not in (None, x.shape[dim]):
        raise ShapeError(f"unstack: num={num}, but dim {dim} of {list(x.shape)} has size {x.shape[dim]}")
    return unbind.op.fn(x, axis)


ALIASES = {"cat": "concat", "concatenate": "concat", "reverse": "flip", "row_stack": "vstack", "swapdims": "swapaxes"}
