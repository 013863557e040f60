"""Products of rows in groups on GPUs: two Pallas kernels, by way of Triton.

matmul: a program for each tile of rows of one group and each tile of columns; what tile is whose is worked out before,
on the device, so sizes are data. outer: a program for each tile of each group's matrix, which walks the group's rows.
Tiles begin where groups do, so a group costs at most one tile that is not full.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
MOST = 2**31
"""Entries that an array may have: the kernels count them in 32 bits."""


class Tiles(NamedTuple):
    """Sizes of a program's part: rows, columns, and terms added up at a time; warps and stages of its pipeline."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


# of six each, 16,384 rows in 16 groups x 2,048 x 4,096 in bfloat16: benchmarks/results/gpu_h200_2026-11-26.md
MATMUL_TILES = Tiles(rows=128, columns=256, terms=64, warps=8, stages=4)
OUTER_TILES = Tiles(rows=128, columns=128, terms=64, warps=8, stages=3)
FLOAT32_TILES = Tiles(rows=64, columns=128, terms=32, warps=4, stages=3)


def _pallas() -> tuple[Any, Any]:
    # imported where a GPU needs it: a twentieth of what a process needs to begin
    return (
        importlib.import_module("jax.experimental.pallas"),
        importlib.import_module("jax.experimental.pallas.triton"),
    )


def takes(*arrays: jax.Array) -> bool:
    """Whether the kernels take these arrays: one dtype of DTYPES, fixed sizes, none 0, fewer than MOST entries."""
    sizes = [n for a in arrays for n in a.shape]
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    alike = len({a.dtype for a in arrays}) == 1 and arrays[0].dtype in DTYPES
    return alike and all(math.prod(a.shape) < MOST for a in arrays)


def matmul(
    transpose: bool, rows: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool = False
) -> jax.Array:
    """grouped_matmul in Triton; rows after the last group are undefined."""
    pl, _ = _pallas()
    tiles = FLOAT32_TILES if rows.dtype == jnp.float32 else MATMUL_TILES
    width = weights.shape[1 if transpose else 2]
    # as many tiles as there are at most
    count = pl.cdiv(len(rows), tiles.rows) + len(sizes)
    group, first, left = _row_tiles(sizes, tiles.rows, count)
    body = partial(_matmul_tile, transpose=transpose, inner=rows.shape[1], width=width, tiles=tiles)
    grid = (count, pl.cdiv(width, tiles.columns))
    out = jax.ShapeDtypeStruct((len(rows), width), rows.dtype)
    return _call(body, grid, out, tiles, interpret)(group, first, left, rows, weights)


def outer(x: jax.Array, y: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    """grouped_outer in Triton."""
    pl, _ = _pallas()
    tiles = FLOAT32_TILES if x.dtype == jnp.float32 else OUTER_TILES
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    body = partial(_outer_tile, width=x.shape[1], columns=y.shape[1], tiles=tiles)
    grid = (pl.cdiv(x.shape[1], tiles.rows), pl.cdiv(y.shape[1], tiles.columns), len(sizes))
    out = jax.ShapeDtypeStruct((len(sizes), x.shape[1], y.shape[1]), x.dtype)
    return _call(body, grid, out, tiles, interpret)(starts, sizes, x, y)


def _call(body: Callable, grid: tuple[int, ...], out: jax.ShapeDtypeStruct, tiles: Tiles, interpret: bool) -> Callable:
    pl, triton = _pallas()
    options = triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)
    call = pl.pallas_call(body, out_shape=out, grid=grid, compiler_params=options, interpret=interpret)

    def run(*args: jax.Array) -> jax.Array:
        with jax.enable_x64(False):  # indices are 32 bits wide
            return call(*args)

    return run


def _row_tiles(sizes: jax.Array, size: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each tile its group, its first row and the number of the group's rows from there on, 0 for a tile of no
    group."""
    counts = -(-sizes // size)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), len(sizes) - 1).astype(jnp.int32)
    offset = (number - (ends - counts)[group]) * size
    first = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)[group] + offset
    left = jnp.where(number < ends[-1], jnp.minimum(sizes[group] - offset, size), 0)
    return group, first.astype(jnp.int32), left.astype(jnp.int32)


def _matmul_tile(group_ref, first_ref, left_ref, x_ref, w_ref, out_ref, *, transpose, inner, width, tiles):
    pl, triton = _pallas()
    tile, column = pl.program_id(0), pl.program_id(1) * tiles.columns
    group, first, left = group_ref[tile], first_ref[tile], left_ref[tile]
    rows = pl.ds(first, tiles.rows)
    is_row = (jnp.arange(tiles.rows) < left)[:, None]
    is_column = (column + jnp.arange(tiles.columns) < width)[None, :]
    columns = pl.ds(column, tiles.columns)

    @pl.when(left > 0)
    def _():
        def step(i, total):
            terms = pl.ds(i * tiles.terms, tiles.terms)
            is_term = i * tiles.terms + jnp.arange(tiles.terms) < inner
            x = triton.load(x_ref.at[rows, terms], mask=is_row & is_term[None, :], other=0)
            if transpose:
                mask = is_column.T & is_term[None, :]
                w = triton.load(w_ref.at[group, columns, terms], mask=mask, other=0).T
            else:
                w = triton.load(w_ref.at[group, terms, columns], mask=is_term[:, None] & is_column, other=0)
            return total + lax.dot(x, w, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, pl.cdiv(inner, tiles.terms), step, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
        triton.store(out_ref.at[rows, columns], total.astype(out_ref.dtype), mask=is_row & is_column)


def _outer_tile(start_ref, size_ref, x_ref, y_ref, out_ref, *, width, columns, tiles):
    pl, triton = _pallas()
    group = pl.program_id(2)
    left, right = pl.program_id(0) * tiles.rows, pl.program_id(1) * tiles.columns
    start, size = start_ref[group], size_ref[group]
    is_left = left + jnp.arange(tiles.rows) < width
    is_right = right + jnp.arange(tiles.columns) < columns
    lefts, rights = pl.ds(left, tiles.rows), pl.ds(right, tiles.columns)

    def step(i, total):
        terms = pl.ds(start + i * tiles.terms, tiles.terms)
        is_term = (i * tiles.terms + jnp.arange(tiles.terms) < size)[:, None]
        x = triton.load(x_ref.at[terms, lefts], mask=is_term & is_left[None, :], other=0)
        y = triton.load(y_ref.at[terms, rights], mask=is_term & is_right[None, :], other=0)
        return total + lax.dot(x.T, y, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, pl.cdiv(size, tiles.terms), step, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    mask = is_left[:, None] & is_right[None, :]
    triton.store(out_ref.at[group, lefts, rights], total.astype(out_ref.dtype), mask=mask)
