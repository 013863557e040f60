"""Products of rows in groups with a matrix for each group: what experts compute.

Rows of one group lie together, groups in order, so a product goes over blocks of rows of one group each. No FLOP is
spent on rows that are not there but what fills up each group's last block: TAIL rows, or an eighth of a larger block.
lax.ragged_dot computes every row with every matrix on CPU and GPU, and its weight gradient does so on TPU too.

On TPU the kernels are jax's megablox, on GPU those of grouped_triton. Shape legend: R rows, E groups, D and F widths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.errors import GradError, ShapeError
from polyreme.kernels import grouped_triton, select
from polyreme.kernels.custom_vjp import custom_vjp

BLOCK = 128
"""Rows of a full block: fewer leave the product's kernel waiting for memory."""

TAIL = 32
"""Rows of the blocks that a group ends with."""

WIDE = 4 * BLOCK
"""Rows of a block of a weight's gradient: each block's product but a group's first is added to the sum, which takes as
long as a tenth of the product of BLOCK rows. Groups that have as many on the mean are multiplied by as many at once,
which takes a twentieth less time."""


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transpose: bool = False) -> jax.Array:
    """rows [R, D] times the matrix of each row's group, weights [E, D, F] ([E, F, D] with transpose) -> [R, F].

    sizes [E] integers: rows of each group, in order; a group may be empty, and rows after the last group give 0.
    Products are added up in float32 at least. Reverse mode of any order; for forward mode use the plain twin. Raises
    ShapeError for dims that do not fit.

    >>> rows, weights = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 5 * jnp.eye(2)])
    >>> grouped_matmul(rows, weights, jnp.array([1, 1]))[:, 0].tolist()
    [1.0, 5.0, 0.0]
    """
    _check(rows, weights, sizes, transpose)
    return _matmul(transpose, rows, weights, sizes.astype(jnp.int32))


def grouped_matmul_plain(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transpose: bool = False
) -> jax.Array:
    """The plain twin of grouped_matmul: every row with every matrix, masked."""
    _check(rows, weights, sizes, transpose)
    acc = jnp.promote_types(rows.dtype, jnp.float32)
    dims = "rd,efd,er->rf" if transpose else "rd,edf,er->rf"
    mask = _members(sizes, len(rows)).astype(acc)
    return jnp.einsum(dims, rows.astype(acc), weights.astype(acc), mask).astype(rows.dtype)


def grouped_outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """x^T y of each group's rows: [R, D], [R, F], [E] -> [E, D, F], 0 for an empty group; otherwise as grouped_matmul.

    The gradient of grouped_matmul's weights.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or sizes.ndim != 1:
        raise ShapeError(
            f"grouped_outer: x {list(x.shape)}, y {list(y.shape)} and sizes {list(sizes.shape)}; needs [R, D], [R, F] "
            "and [E]"
        )
    return _outer(x, y, sizes.astype(jnp.int32))


def grouped_outer_plain(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """The plain twin of grouped_outer."""
    acc = jnp.promote_types(x.dtype, jnp.float32)
    mask = _members(sizes, len(x)).astype(acc)
    return jnp.einsum("rd,rf,er->edf", x.astype(acc), y.astype(acc), mask).astype(x.dtype)


def grouped_apply(
    fn: Callable[..., jax.Array], rows: jax.Array, sizes: jax.Array, stacked: Sequence[Any], shared: Sequence[Any],
    block: int,
) -> jax.Array:  # fmt: skip
    """fn of blocks of `block` rows of one group each, with the group's entry of each stacked array: [R, D] -> [R, F].

    fn(rows [block, D], *entries, *shared) -> [block, F] treats every row by itself and closes over no array. sizes [E]
    as in grouped_matmul; rows after the last group give 0. Backward runs fn again and keeps rows and arrays alone;
    there is no second derivative.
    """
    return _apply(fn, block, rows, sizes.astype(jnp.int32), tuple(stacked), tuple(shared))


def block_size(rows: int, groups: int) -> int:
    """Rows of grouped_apply's blocks for so many in so many groups: the half of each group's last one may be idle."""
    size = TAIL
    while size < BLOCK and 2 * size * groups <= rows:
        size *= 2
    return size


def matmul_blocks(rows: int, groups: int) -> tuple[int, ...]:
    """Rows of the blocks of grouped_matmul's loop, largest first, for so many rows in so many groups."""
    is_open = not isinstance(rows, int)  # in an exported program
    return _that_fit(rows, *(() if is_open or rows < WIDE * groups else (WIDE,)), BLOCK, TAIL)


def outer_blocks(rows: int) -> tuple[int, ...]:
    """Rows of the blocks of grouped_outer's loop, largest first."""
    return _that_fit(rows, WIDE, BLOCK, TAIL)


def block_counts(sizes: Any, blocks: Sequence[int]) -> list[Any]:
    """How many blocks of each size, largest first, each group takes: as many as it fills, one more where an eighth at
    most would be idle, and of the smallest what is left. sizes [E] -> a [E] for each.

    >>> [n.tolist() for n in block_counts(jnp.array([300, 255, 31]), (128, 32))]
    [[2, 2, 0], [2, 0, 1]]
    """
    counts, left = [], sizes
    for block in blocks:
        idle = 0 if block == blocks[-1] else block - block // 8
        counts.append(left // block + (left % block > idle))
        left = (left - counts[-1] * block).clip(0)
    return counts


def _that_fit(rows: int, *blocks: int) -> tuple[int, ...]:
    """The blocks that an array of so many rows has room for; one of all rows where none fits."""
    if not isinstance(rows, int):
        return blocks
    return tuple(block for block in blocks if block <= rows) or (rows,)


def _check(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transpose: bool) -> None:
    inner = 2 if transpose else 1
    if rows.ndim != 2 or weights.ndim != 3 or sizes.ndim != 1 or rows.shape[1] != weights.shape[inner]:
        raise ShapeError(
            f"grouped_matmul: rows {list(rows.shape)} and weights {list(weights.shape)} do not fit; "
            f"needs [R, D] and {'[E, F, D]' if transpose else '[E, D, F]'}"
        )
    if sizes.shape[0] != weights.shape[0]:
        raise ShapeError(f"grouped_matmul: {sizes.shape[0]} sizes for {weights.shape[0]} matrices; needs one for each")


def _members(sizes: jax.Array, rows: int) -> jax.Array:
    """[E, R] bool: whether a row is of a group."""
    ends = jnp.cumsum(sizes)
    at = jnp.arange(rows)
    return (at >= (ends - sizes)[:, None]) & (at < ends[:, None])


# derivatives: each of the two functions has the other in its own


@custom_vjp(0)
def _matmul(transpose: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    kernels = _kernels(rows, weights)
    out = kernels.matmul(transpose, rows, weights, sizes)
    return out if kernels.clears else jnp.where((jnp.arange(rows.shape[0]) < sizes.sum())[:, None], out, 0)


def _matmul_fwd(transpose, rows, weights, sizes):
    return _matmul(transpose, rows, weights, sizes), (rows, weights, sizes)


def _matmul_bwd(transpose, residuals, dy):
    rows, weights, sizes = residuals
    dw = _outer(dy, rows, sizes) if transpose else _outer(rows, dy, sizes)
    return _matmul(not transpose, dy, weights, sizes).astype(rows.dtype), dw.astype(weights.dtype), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@jax.custom_vjp
def _outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    return _kernels(x, y).outer(x, y, sizes)


def _outer_fwd(x, y, sizes):
    return _outer(x, y, sizes), (x, y, sizes)


def _outer_bwd(residuals, dw):
    x, y, sizes = residuals
    return _matmul(True, y, dw, sizes).astype(x.dtype), _matmul(False, x, dw, sizes).astype(y.dtype), None


_outer.defvjp(_outer_fwd, _outer_bwd)


class _Kernels(NamedTuple):
    """matmul(transpose, rows, weights, sizes) and outer(x, y, sizes). clears: whether rows of matmul after the last
    group are 0; else they are anything."""

    matmul: Callable[[bool, jax.Array, jax.Array, jax.Array], jax.Array]
    outer: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    clears: bool = False


def _kernels(*arrays: jax.Array) -> _Kernels:
    if select.backend() == "gpu" and grouped_triton.takes(*arrays):
        return _TRITON
    return _MEGABLOX if select.backend() == "tpu" else _BLOCKS


# ---- a loop over blocks, with as many steps as there are ----
# No array is padded: a copy of rows or of a result takes a tenth of the time of their product. A block that would reach
# over the end, of its group or of the array, begins earlier.


def _block_span(size: int, rows: int, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first row of a block for rows from begin to end, and which of its rows [size, 1] these are."""
    row = jnp.minimum(begin, jnp.asarray(rows - size, jnp.int32))
    at = row + lax.iota(jnp.int32, size)
    return row, ((at >= begin) & (at < end))[:, None]


def _with_room(x: jax.Array, size: int) -> jax.Array:
    """x, with `size` rows more where how many it has is open, as in an exported program: a block must fit."""
    return x if isinstance(x.shape[0], int) else jnp.pad(x, ((0, size), (0, 0)))


def _matmul_by_blocks(transpose: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    wanted, blocks = rows.shape[0], matmul_blocks(rows.shape[0], weights.shape[0])
    rows = _with_room(rows, blocks[0])
    acc = jnp.promote_types(rows.dtype, jnp.float32)
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    counts = block_counts(sizes, blocks)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        """out with the rows of group e."""
        weight = lax.dynamic_index_in_dim(weights, e, 0, keepdims=False)

        def multiply(i: jax.Array, out: jax.Array, begin: jax.Array, size: int) -> jax.Array:
            row, is_own = _block_span(size, rows.shape[0], begin + i * size, ends[e])
            block, others = (lax.dynamic_slice_in_dim(a, row, size) for a in (rows, out))
            product = lax.dot_general(block, weight, contracted, preferred_element_type=acc).astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, product, others), row, 0)

        begin = ends[e] - sizes[e]
        for size, count in zip(blocks, counts, strict=True):
            out = lax.fori_loop(0, count[e], partial(multiply, begin=begin, size=size), out)
            begin += count[e] * size
        return out

    out = jnp.zeros((rows.shape[0], weights.shape[1 if transpose else 2]), rows.dtype)
    has_any = 0 not in (*out.shape, *weights.shape)
    return lax.fori_loop(0, weights.shape[0], group, out)[:wanted] if has_any else out


def _outer_by_blocks(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    blocks = outer_blocks(x.shape[0])
    x, y = (_with_room(a, blocks[0]) for a in (x, y))
    acc = jnp.promote_types(x.dtype, jnp.float32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    counts = block_counts(sizes, blocks)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        """out with the matrix of group e."""

        def product(begin: jax.Array, size: int) -> jax.Array:
            row, is_own = _block_span(size, x.shape[0], begin, ends[e])
            left, right = (jnp.where(is_own, lax.dynamic_slice_in_dim(a, row, size), 0) for a in (x, y))
            # transposed first: see kernels.linear.rows_product; XLA compiles no barrier around one row
            turned = lax.optimization_barrier(left.T) if size >= TAIL else left.T
            return lax.dot(turned, right, preferred_element_type=acc)

        def add(i: jax.Array, total: jax.Array, begin: jax.Array, size: int) -> jax.Array:
            return total + product(begin + i * size, size)

        begin, largest = ends[e] - sizes[e], counts[0][e]
        # the first product is the sum so far, which adding it to zeros would read and write twice more
        total = lax.cond(largest > 0, lambda: product(begin, blocks[0]), lambda: jnp.zeros(out.shape[1:], acc))
        total = lax.fori_loop(1, largest, partial(add, begin=begin, size=blocks[0]), total)
        begin += largest * blocks[0]
        for size, count in zip(blocks[1:], counts[1:], strict=True):
            total = lax.fori_loop(0, count[e], partial(add, begin=begin, size=size), total)
            begin += count[e] * size
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), e, 0)

    out = jnp.zeros((sizes.shape[0], x.shape[1], y.shape[1]), x.dtype)
    return lax.fori_loop(0, sizes.shape[0], group, out) if 0 not in (*out.shape, x.shape[0]) else out


_BLOCKS = _Kernels(_matmul_by_blocks, _outer_by_blocks, clears=True)


# ---- any function of rows ----


@custom_vjp(0, 1)
def _apply(fn, block, rows, sizes, stacked, shared):
    padded = jnp.pad(rows, ((0, block), (0, 0)))
    out = jax.eval_shape(fn, padded[:block], *(s[0] for s in stacked), *shared)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        group, row, _ = _nth_block(sizes, block, i)
        y = fn(lax.dynamic_slice_in_dim(padded, row, block), *_entries(stacked, group), *shared)
        # what reaches into the groups behind is written again by them, as blocks come in the order of rows
        return lax.dynamic_update_slice_in_dim(out, y, row, 0)

    whole = jnp.zeros((len(padded), *out.shape[1:]), out.dtype)
    whole = lax.fori_loop(0, _num_blocks(sizes, block), step, whole)[: len(rows)]
    return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], whole, 0)


def _apply_fwd(fn, block, rows, sizes, stacked, shared):
    return _apply(fn, block, rows, sizes, stacked, shared), (rows, sizes, stacked, shared)


def _apply_bwd(fn, block, residuals, dy):
    return _apply_gradient(fn, block, residuals, dy)


@custom_vjp(0, 1)
def _apply_gradient(fn, block, residuals, dy):
    rows, sizes, stacked, shared = residuals
    x, dy = (jnp.pad(a, ((0, block), (0, 0))) for a in (rows, dy))
    moves = [jnp.issubdtype(a.dtype, jnp.inexact) for a in (*stacked, *shared)]

    def zeros(a: jax.Array) -> jax.Array:
        return jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))

    def step(i: jax.Array, carry: tuple) -> tuple:
        dx, d_stacked, d_shared = carry
        group, row, left = _nth_block(sizes, block, i)
        is_here = (jnp.arange(block) < left)[:, None]
        part = lax.dynamic_slice_in_dim(x, row, block)
        # rows of other groups are replaced by one of this: their derivatives here may be infinite, and 0 * inf is NaN
        part = jnp.where(is_here, part, part[:1])
        arrays = (*_entries(stacked, group), *shared)
        wanted = [a for a, m in zip(arrays, moves, strict=True) if m]

        def of(part: jax.Array, *wanted: jax.Array) -> jax.Array:
            chosen = iter(wanted)
            return fn(part, *(next(chosen) if m else a for a, m in zip(arrays, moves, strict=True)))

        _, pull = jax.vjp(of, part, *wanted)
        d_part, *d_wanted = pull(jnp.where(is_here, lax.dynamic_slice_in_dim(dy, row, block), 0))
        count = len(d_stacked)
        d_stacked = [d.at[group].add(new.astype(d.dtype)) for d, new in zip(d_stacked, d_wanted[:count], strict=True)]
        d_shared = [d + new.astype(d.dtype) for d, new in zip(d_shared, d_wanted[count:], strict=True)]
        return lax.dynamic_update_slice_in_dim(dx, d_part, row, 0), d_stacked, d_shared

    count = len(stacked)
    starts = [
        [zeros(a) for a, m in zip(arrays, mask, strict=True) if m]
        for arrays, mask in ((stacked, moves[:count]), (shared, moves[count:]))
    ]
    dx, *sums = lax.fori_loop(0, _num_blocks(sizes, block), step, (jnp.zeros_like(x), *starts))
    there = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    gradients = iter([*sums[0], *sums[1]])
    d_all = [next(gradients).astype(a.dtype) if m else None for a, m in zip((*stacked, *shared), moves, strict=True)]
    return jnp.where(there, dx[: len(rows)], 0), None, tuple(d_all[:count]), tuple(d_all[count:])


_apply.defvjp(_apply_fwd, _apply_bwd)


def _apply_gradient_bwd(fn, block, residuals, dy):
    raise GradError(
        "grouped_apply, which runs experts that are any Layers (MoELayer), has no second derivative; use nn.MoE, whose "
        "experts have derivatives of any order, or take the gradient without create_graph"
    )


_apply_gradient.defvjp(
    lambda fn, block, residuals, dy: (_apply_gradient(fn, block, residuals, dy), None), _apply_gradient_bwd
)


def _num_blocks(sizes: jax.Array, block: int) -> jax.Array:
    return (-(-sizes // block)).sum()


def _nth_block(sizes: jax.Array, block: int, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(group, first row, rows of the group from there on) of the i-th block."""
    counts = -(-sizes // block)
    last = jnp.cumsum(counts)
    group = jnp.searchsorted(last, i, side="right")
    nth = i - last[group] + counts[group]
    return group, (jnp.cumsum(sizes) - sizes)[group] + nth * block, sizes[group] - nth * block


def _entries(stacked: Sequence[jax.Array], group: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(a, group, 0, keepdims=False) for a in stacked]


# ---- TPU ----


def _megablox() -> Any:
    # imported where a TPU needs it: it takes a second. The package has a function of the module's name.
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _matmul_megablox(
    transpose: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool = False
) -> jax.Array:
    padded = jnp.pad(rows, ((0, -len(rows) % BLOCK), (0, 0)))
    with jax.enable_x64(False):  # the kernel counts in the default integers, which must be 32 bits
        out = _megablox().gmm(padded, weights, sizes, rows.dtype, transpose_rhs=transpose, interpret=interpret)
    return out[: len(rows)]


def _outer_megablox(x: jax.Array, y: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    x, y = (jnp.pad(a, ((0, -len(a) % BLOCK), (0, 0))) for a in (x, y))
    with jax.enable_x64(False):
        out = _megablox().tgmm(x.T, y, sizes, x.dtype, interpret=interpret)
    # the kernel never writes the matrix of an empty group
    return jnp.where((sizes > 0)[:, None, None], out, 0)


_MEGABLOX = _Kernels(_matmul_megablox, _outer_megablox)


# ---- GPU ----

_TRITON = _Kernels(grouped_triton.matmul, grouped_triton.outer)
