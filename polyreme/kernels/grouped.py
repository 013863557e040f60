"""Products of rows in groups with a matrix for each group: what experts compute.

Rows of one group lie together, groups in order, so a product goes over blocks of rows of one group each. No FLOP is
spent on rows that are not there but what fills up each group's last block (TAIL rows at most). lax.ragged_dot computes
every row with every matrix on CPU and GPU, and its weight gradient does so on TPU too.

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

BLOCK = 128
"""Rows of a full block: fewer leave the product's kernel waiting for memory, more gain nothing."""

TAIL = 32
"""Rows of the blocks that a group ends with."""

WIDE = 4 * BLOCK
"""Rows of a block of a weight's gradient: each block's product is added to the sum, which takes as long as a tenth of
the product of BLOCK rows."""


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


def block_counts(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Full blocks and tail blocks of each group: BLOCK and TAIL rows are computed for one of them."""
    return sizes // BLOCK, -(-(sizes % BLOCK) // TAIL)


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
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
# No array is padded: a copy of rows or of a result takes a tenth of the time of their product. A tail block that would
# reach over the end begins earlier, and counts the rows that are its own.


class _Tail(NamedTuple):
    """A tail block: its first row, and which of its rows [size, 1] are those of the group from `begin` to `end`."""

    row: jax.Array
    is_own: jax.Array

    @classmethod
    def of(cls, size: int, rows: int, begin: jax.Array, end: jax.Array) -> _Tail:
        row = jnp.minimum(begin, jnp.asarray(rows - size, jnp.int32))
        at = row + lax.iota(jnp.int32, size)
        return cls(row, ((at >= begin) & (at < end))[:, None])


def _with_room(x: jax.Array, size: int) -> jax.Array:
    """x, with `size` rows more where how many it has is open, as in an exported program: a block must fit."""
    return x if isinstance(x.shape[0], int) else jnp.pad(x, ((0, size), (0, 0)))


def _matmul_by_blocks(transpose: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    wanted, rows = rows.shape[0], _with_room(rows, BLOCK)
    acc = jnp.promote_types(rows.dtype, jnp.float32)
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    full, tails = block_counts(sizes)
    count = rows.shape[0]
    tail_size = min(TAIL, count)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        """out with the rows of group e."""
        weight = lax.dynamic_index_in_dim(weights, e, 0, keepdims=False)

        def product(row: jax.Array, size: int) -> jax.Array:
            block = lax.dynamic_slice_in_dim(rows, row, size)
            return lax.dot_general(block, weight, contracted, preferred_element_type=acc).astype(out.dtype)

        def whole(i: jax.Array, out: jax.Array) -> jax.Array:
            row = starts[e] + i * BLOCK
            return lax.dynamic_update_slice_in_dim(out, product(row, BLOCK), row, 0)

        def tail(i: jax.Array, out: jax.Array) -> jax.Array:
            begin = starts[e] + full[e] * BLOCK + i * TAIL
            row, is_own = _Tail.of(tail_size, count, begin, starts[e] + sizes[e])
            others = lax.dynamic_slice_in_dim(out, row, tail_size)
            new = jnp.where(is_own, product(row, tail_size), others)
            return lax.dynamic_update_slice_in_dim(out, new, row, 0)

        if count >= BLOCK:
            out = lax.fori_loop(0, full[e], whole, out)
        return lax.fori_loop(0, tails[e], tail, out)

    out = jnp.zeros((count, weights.shape[1 if transpose else 2]), rows.dtype)
    has_any = 0 not in (*out.shape, *weights.shape)
    return lax.fori_loop(0, weights.shape[0], group, out)[:wanted] if has_any else out


def _outer_by_blocks(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    x, y = (_with_room(a, WIDE) for a in (x, y))
    acc = jnp.promote_types(x.dtype, jnp.float32)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    count = x.shape[0]
    tail_size = min(TAIL, count)
    wide = sizes // WIDE
    full, tails = block_counts(sizes - wide * WIDE)

    def block(row: jax.Array, size: int, total: jax.Array, is_own: jax.Array | None = None) -> jax.Array:
        """total with the product of `size` rows from `row` on, or of those of them that are the group's own."""
        left, right = (lax.dynamic_slice_in_dim(a, row, size) for a in (x, y))
        if is_own is not None:
            left, right = (jnp.where(is_own, a, 0) for a in (left, right))
        # transposed first: see kernels.linear.rows_product; XLA compiles no barrier around one row
        turned = lax.optimization_barrier(left.T) if size >= TAIL else left.T
        return total + lax.dot(turned, right, preferred_element_type=acc)

    def group(e: jax.Array, out: jax.Array) -> jax.Array:
        first = starts[e] + wide[e] * WIDE

        def tail(i: jax.Array, total: jax.Array) -> jax.Array:
            begin = first + full[e] * BLOCK + i * TAIL
            row, is_own = _Tail.of(tail_size, count, begin, starts[e] + sizes[e])
            return block(row, tail_size, total, is_own)

        total = jnp.zeros(out.shape[1:], acc)
        if count >= WIDE:
            total = lax.fori_loop(0, wide[e], lambda i, total: block(starts[e] + i * WIDE, WIDE, total), total)
        if count >= BLOCK:
            total = lax.fori_loop(0, full[e], lambda i, total: block(first + i * BLOCK, BLOCK, total), total)
        total = lax.fori_loop(0, tails[e], tail, total)
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), e, 0)

    out = jnp.zeros((sizes.shape[0], x.shape[1], y.shape[1]), x.dtype)
    return lax.fori_loop(0, sizes.shape[0], group, out) if 0 not in (*out.shape, count) else out


_BLOCKS = _Kernels(_matmul_by_blocks, _outer_by_blocks, clears=True)


# ---- any function of rows ----


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
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
