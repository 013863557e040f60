"""Shape, order and joining of Tensors: reshape, transpose, concat, split and their relatives.

Floor: 2.  Results are copies as far as a user can see (a view does not share later writes); XLA removes those it can.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core.dtype import promote
from polyreme.core.op import op
from polyreme.errors import ShapeError


def dim_of(axis: int, ndim: int, what: str) -> int:
    """axis counted from the start; raises ShapeError, beginning with `what`, if there is no such dim."""
    if isinstance(axis, tuple) and len(axis) == 1:
        axis = axis[0]
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{what}: axis={axis} of a Tensor with {ndim} dims; give one from {-ndim} to {ndim - 1}")
    return axis % ndim


def dims_of(axes: Any, ndim: int, what: str) -> tuple[int, ...]:
    """Each of axes (an int or several) counted from the start; ShapeError if out of range or named twice."""
    dims = tuple(dim_of(a, ndim, what) for a in (axes if isinstance(axes, tuple) else (axes,)))
    if len(set(dims)) < len(dims):
        raise ShapeError(f"{what}: axis={axes} names a dim twice; name each once")
    return dims


def _ints(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


# shape


def _resolve_shape(given: tuple[int, ...], have: tuple[int, ...], what: str) -> tuple[int, ...]:
    """given with 0 replaced by the dim of have at its place and -1 by what is left over."""
    if given.count(-1) > 1 or any(s < -1 for s in given):
        raise ShapeError(f"{what}: shape {list(given)} has more than one -1 or a size below it; give one -1 at most")
    if any(s == 0 and i >= len(have) for i, s in enumerate(given)):
        raise ShapeError(f"{what}: a 0 in shape {list(given)} copies a dim that {list(have)} does not have")
    shape = [have[i] if s == 0 else s for i, s in enumerate(given)]
    size, known = math.prod(have), math.prod(s for s in shape if s != -1)
    if -1 in shape and known and size % known == 0:
        shape[shape.index(-1)] = size // known
    if math.prod(shape) != size or -1 in shape:
        raise ShapeError(f"{what}: {list(have)} has {size} elements, which do not fill shape {list(given)}")
    return tuple(shape)


@op(inplace=True)
def reshape(x: Array, shape: Sequence[int]) -> Array:
    """The elements of x in row-major order under another shape; 0 keeps the dim at its place, one -1 is inferred.

    Raises ShapeError if the numbers of elements differ.
    """
    return jnp.reshape(x, _resolve_shape(_ints(shape), x.shape, "reshape"))


@op(inplace=True)
def transpose(x: Array, perm: Sequence[int]) -> Array:
    """x with its dims in the order perm: dim i of the result is dim perm[i] of x."""
    dims = dims_of(_ints(perm), x.ndim, "transpose")
    if len(dims) != x.ndim:
        raise ShapeError(f"transpose: perm {list(dims)} must name all {x.ndim} dims of {list(x.shape)}")
    return jnp.transpose(x, dims)


@op(inplace=True)
def t(input: Array) -> Array:
    """A matrix transposed; 0-D and 1-D pass unchanged, more dims raise ShapeError."""
    if input.ndim > 2:
        raise ShapeError(f"t: takes at most 2 dims, got {list(input.shape)}; use transpose with a perm")
    return input.T


@op(inplace=True)
def squeeze(x: Array, axis: Any = None) -> Array:
    """x without its dims of size 1: all of them, or those in axis; a dim in axis of another size stays."""
    dims = range(x.ndim) if axis in (None, ()) else dims_of(axis, x.ndim, "squeeze") if x.ndim else ()
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


@op(inplace=True)
def unsqueeze(x: Array, axis: Any) -> Array:
    """x with a dim of size 1 put in at axis; several are put in one after the other."""
    for at in _ints(axis):
        x = jnp.expand_dims(x, dim_of(at, x.ndim + 1, "unsqueeze"))
    return x


@op(inplace=True)
def flatten(x: Array, start_axis: int = 0, stop_axis: int = -1) -> Array:
    """x with dims start_axis to stop_axis, both included, made one; a 0-D Tensor becomes 1-D."""
    if x.ndim == 0:
        return jnp.reshape(x, (1,))
    start, stop = dim_of(start_axis, x.ndim, "flatten"), dim_of(stop_axis, x.ndim, "flatten")
    if start > stop:
        raise ShapeError(f"flatten: start_axis={start_axis} comes after stop_axis={stop_axis} in {list(x.shape)}")
    return jnp.reshape(x, (*x.shape[:start], math.prod(x.shape[start : stop + 1]), *x.shape[stop + 1 :]))


# joining and splitting


@op
def concat(x: list[Array], axis: int = 0) -> Array:
    """Tensors joined along a dim; their other dims must agree, dtypes promote."""
    if not x or x[0].ndim == 0:
        raise ShapeError(
            f"concat: needs Tensors of 1 dim or more, got {[list(a.shape) for a in x]}; stack joins 0-D ones"
        )
    return jnp.concatenate(promote(*x), dim_of(axis, x[0].ndim, "concat"))


@op
def stack(x: list[Array], axis: int = 0) -> Array:
    """Tensors of one shape joined along a new dim at axis; dtypes promote."""
    if not x:
        raise ShapeError("stack: needs at least one Tensor, got an empty list")
    return jnp.stack(promote(*x), dim_of(axis, x[0].ndim + 1, "stack"))


def _cut(x: Array, dim: int, ends: Sequence[int]) -> list[Array]:
    """x cut along dim: part i ends at ends[i], the last part takes the rest."""
    starts = (0, *ends)
    stops = (*ends, x.shape[dim])
    index = [builtins.slice(None)] * dim
    return [x[(*index, builtins.slice(a, b))] for a, b in zip(starts, stops, strict=True)]


@op
def split(x: Array, num_or_sections: Any, axis: int = 0) -> list[Array]:
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
            sizes[sizes.index(-1)] = size - builtins.sum(s for s in sizes if s != -1)
        if builtins.sum(sizes) != size or builtins.min(sizes, default=-1) < 0:
            raise ShapeError(f"split: sizes {list(num_or_sections)} do not fill dim {dim} of {list(x.shape)}")
    ends = [builtins.sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return _cut(x, dim, ends)
