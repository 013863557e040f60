"""Kernels of sparse Tensors: sums and products over stored elements, and the neighbours that convolutions read.

`where` says at which coordinates elements are stored: [indices] with indices [sparse dims, n], or [crows,
cols] of rows compressed, [rows + 1] and [n], for a batch of matrices [batch * (rows + 1)] and [n]. All shapes follow
from those of the arguments, so every kernel can be captured; elements may repeat and stand in any order. Where an index
is out of range, reads give NaN and writes are dropped; what is public checks before.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import promote
from polyreme.core.op import op
from polyreme.ops.by_index import read
from polyreme.ops.messages import added, extreme

Shape = tuple[int, ...]


def coordinates(where: list[Array], shape: Shape) -> list[Array]:
    """One int64 [n] for each sparse dim; shape is that of the sparse dims."""
    if len(where) == 1:
        return list(where[0].astype(dtypes.int64))
    crows, cols = (a.astype(dtypes.int64) for a in where)
    *batch, rows, _ = shape
    ends = crows.reshape(-1, rows + 1)
    begins = (ends[:, :-1] + (jnp.cumsum(ends[:, -1]) - ends[:, -1])[:, None]).reshape(-1)
    # one more wherever a row begins; this scan takes a third of the time of jnp.repeat or jnp.cumsum on a processor
    steps = jnp.zeros(cols.shape, dtypes.int64).at[begins[1:]].add(1, mode="drop")
    at = jax.lax.associative_scan(jnp.add, steps)
    return [at // rows, at % rows, cols] if batch else [at, cols]


def flat(at: list[Array], shape: Shape) -> Array:
    """The place of each coordinate in the row-major order of shape."""
    place = jnp.zeros(at[0].shape if at else (0,), dtypes.int64)
    for index, size in zip(at, shape, strict=True):
        place = place * size + index
    return place


@op(method=False)
def sparse_coordinates(where: list[Array], shape: Shape) -> Array:
    """Coordinates of the stored elements, [sparse dims, n], in the dtype of the given indices."""
    return jnp.stack(coordinates(where, shape)).astype(where[-1].dtype)


@op(method=False)
def sparse_scatter(values: Array, where: list[Array], shape: Shape) -> Array:
    """values [n, *dense] added into zeros of shape, which is that of the sparse dims -> [*shape, *dense]."""
    at = flat(coordinates(where, shape), shape)
    dense = added(values, at, math.prod(shape))
    return dense.reshape(*shape, *values.shape[1:])


@op(method=False)
def sparse_gather(x: Array, where: list[Array], sparse_dim: int) -> Array:
    """The elements of a dense x at stored coordinates of its first sparse_dim dims -> [n, *dense]."""
    shape = x.shape[:sparse_dim]
    at = flat(coordinates(where, shape), shape)
    return read(x.reshape(-1, *x.shape[sparse_dim:]), (at,))


@op(method=False)
def sparse_at(values: Array, where: list[Array], wanted: list[Array], shape: Shape) -> Array:
    """The elements of a sparse Tensor of shape, that of the sparse dims, at coordinates: [m, *dense], 0 where it has
    none.

    Elements stored twice are added up. wanted: coordinates [m], told as `where` tells those of values [n, *dense].
    """
    stored, asked = (flat(coordinates(part, shape), shape) for part in (where, wanted))
    known = jnp.sort(asked)
    if not known.size:
        return jnp.zeros((0, *values.shape[1:]), values.dtype)
    nearest = jnp.minimum(jnp.searchsorted(known, stored), known.size - 1)
    sums = added(values, jnp.where(known[nearest] == stored, nearest, known.size), known.size)
    return read(sums, (jnp.searchsorted(known, asked),))


@op(method=False)
def sparse_reshape(where: list[Array], shape: Shape, to: Shape) -> Array:
    """Coordinates in shape as coordinates in `to`, which has as many elements -> [len(to), n]."""
    place = flat(coordinates(where, shape), shape)
    found = []
    for size in reversed(to):
        found.append(place % max(size, 1))
        place = place // max(size, 1)
    return jnp.stack(found[::-1]).astype(where[-1].dtype)


@op(method=False)
def sparse_compress(indices: Array, shape: Shape) -> tuple[Array, Array, Array]:
    """(crows, cols, order): the compressed rows of coordinates [2 or 3, n], and where each element came from."""
    at = list(indices.astype(dtypes.int64))
    order = jnp.argsort(flat(at, shape), stable=True)
    *batch, rows, _ = shape
    num = math.prod(batch) * rows
    counts = jnp.zeros((num,), dtypes.int64).at[flat(at[:-1], shape[:-1])].add(1, mode="drop")
    ends = jnp.cumsum(counts.reshape(-1, rows), axis=1) if rows else counts.reshape(math.prod(batch), 0)
    crows = jnp.pad(ends, ((0, 0), (1, 0))).reshape(-1)
    return crows.astype(indices.dtype), indices[-1][order], order


# products


@op(amp="fp32", method=False)
def sparse_matmul(values: Array, y: Array, where: list[Array], shape: Shape) -> Array:
    """A sparse matrix by a dense one: shape [*batch, m, k], y [*batch, k, n] -> [*batch, m, n]."""
    *batch, rows, inner = shape
    at = coordinates(where, shape)
    place = flat(at[:-2], tuple(batch)) if batch else 0
    left, right = place * rows + at[-2], place * inner + at[-1]
    values, y = promote(values, y)
    picked = read(y.reshape(-1, y.shape[-1]), (right,))
    total = added(values[:, None] * picked, left, math.prod(batch) * rows)
    return total.reshape(*batch, rows, y.shape[-1])


@op(amp="fp32", method=False)
def sampled_matmul(x: Array, y: Array, where: list[Array]) -> Array:
    """Elements of x @ y at stored coordinates: x [*batch, m, k], y [*batch, k, n] -> [stored]."""
    x, y = promote(x, y)
    *batch, rows, _ = x.shape
    at = coordinates(where, (*batch, rows, y.shape[-1]))
    place = flat(at[:-2], tuple(batch)) if batch else 0
    left = read(x.reshape(-1, x.shape[-1]), (place * rows + at[-2],))
    columns = jnp.swapaxes(y, -1, -2).reshape(-1, y.shape[-2])
    right = read(columns, (place * y.shape[-1] + at[-1],))
    return jnp.sum(left * right, axis=1)


@op(amp="fp32", method=False)
def sparse_softmax(values: Array, where: list[Array], shape: Shape, dim: int, keep: Array | None = None) -> Array:
    """exp(values), divided by the sum over the stored elements that differ in sparse dim `dim` only.

    keep [n]: elements that are False count for nothing and become 0. values [n, *dense] -> the same.
    """
    at = coordinates(where, shape)
    rest = tuple(s for d, s in enumerate(shape) if d != dim)
    ids, num = flat([a for d, a in enumerate(at) if d != dim], rest), math.prod(rest)
    if len(rest) == 0:
        ids = jnp.zeros(values.shape[:1], dtypes.int64)
    if keep is not None:
        keep = keep.reshape(keep.shape + (1,) * (values.ndim - 1))
        values = jnp.where(keep, values, -jnp.inf)
    top = jax.lax.stop_gradient(extreme(values, ids, num, True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    risen = jnp.exp(values - jnp.take(top, ids, axis=0, mode="fill"))
    total = jnp.take(added(risen, ids, num), ids, axis=0, mode="fill")
    return risen / jnp.where(total == 0, 1, total)


# convolution


@op(method=False)
def window_sources(
    sites: Array, outs: Array, spatial: Shape, kernel: Shape, steps: tuple[Shape, Shape, Shape]
) -> Array:
    """The stored element that each place of each output's window reads: [m, window], n where there is none.

    sites [1 + d, n] and outs [1 + d, m]: batch and spatial coordinates, of the elements and of the outputs, those of
    the elements without repetition. spatial: sizes of the input. steps: stride, padding before, dilation, each [d].
    """
    stride, pads, dilation = steps
    batches, *place = coordinates([sites], spatial)
    known = flat([batches, *place], (0, *spatial))
    order = jnp.argsort(known)
    known = known[order]
    sources = []
    for offset in itertools.product(*(range(k) for k in kernel)):
        position = [
            o.astype(dtypes.int64) * s - p + k * d
            for o, s, p, k, d in zip(outs[1:], stride, pads, offset, dilation, strict=True)
        ]
        inside = jnp.ones(position[0].shape, bool)
        for a, size in zip(position, spatial, strict=True):
            inside &= (a >= 0) & (a < size)
        wanted = flat([outs[0].astype(dtypes.int64), *position], (0, *spatial))
        sources.append(_position(known, order, wanted, inside))
    return jnp.stack(sources, 1)


def _position(known: Array, order: Array, wanted: Array, inside: Array) -> Array:
    count = known.shape[0]
    if not count:
        return jnp.zeros(wanted.shape, order.dtype)
    nearest = jnp.minimum(jnp.searchsorted(known, wanted), count - 1)
    return jnp.where(inside & (known[nearest] == wanted), order[nearest], count)


@op(amp="low", method=False)
def window_matmul(values: Array, sources: Array, weight: Array, bias: Array | None = None, groups: int = 1) -> Array:
    """The products of a convolution with the elements its windows read: values [n, c], sources [m, window] -> [m, out].

    weight [*kernel, c / groups, out]; a source of n is a place without an element, which counts as 0.
    """
    unpromoted = values
    values, weight = promote(values, weight)
    picked = read(values, (sources,), fill_value=0)
    window, inner, outs = sources.shape[1], weight.shape[-2], weight.shape[-1]
    picked = picked.reshape(-1, window, groups, inner)
    weight = weight.reshape(window, inner, groups, outs // groups)
    total = jnp.einsum("mwgi,wigo->mgo", picked, weight, preferred_element_type=_accumulator(values.dtype))
    total = total.reshape(-1, outs).astype(jnp.result_type(unpromoted, weight))
    return total if bias is None else total + bias.astype(total.dtype)


def _accumulator(dtype: Any) -> Any:
    return dtypes.float32 if dtype in (dtypes.float16, dtypes.bfloat16) else dtype


@op(method=False)
def window_max(values: Array, sources: Array) -> Array:
    """The largest of the elements that each window reads: values [n, c], sources [m, window] -> [m, c]."""
    return jnp.max(jnp.take(values, sources, axis=0, mode="fill", fill_value=-jnp.inf), axis=1)
