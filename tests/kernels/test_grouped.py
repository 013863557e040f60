import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ShapeError
from polyreme.kernels import (
    grouped_matmul,
    grouped_matmul_plain,
    grouped_outer,
    grouped_outer_plain,
    grouped_triton,
)
from polyreme.kernels.grouped import _MEGABLOX, BLOCK, TAIL, block_counts, matmul_blocks, outer_blocks

from .tolerance import assert_near

ROWS = 2 * BLOCK + TAIL + 5


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def by_numpy(rows, weights, sizes):
    """Rows of each group times its matrix, and x^T y of each with the product as y."""
    rows, weights = rows.astype(np.float64), weights.astype(np.float64)
    out, outer, start = np.zeros((len(rows), weights.shape[2])), np.zeros_like(weights), 0
    for e, size in enumerate(sizes):
        part = slice(start, start + size)
        out[part] = rows[part] @ weights[e]
        outer[e] = rows[part].T @ out[part]
        start += size
    return out, outer


@jax.jit
def both(rows, weights, sizes):
    out = grouped_matmul(rows, weights, sizes)
    return out, grouped_outer(rows, out, sizes)


# one program for all sizes: what a row is multiplied with is data
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, ROWS), min_size=5, max_size=5))
def test_equals_numpy_for_any_sizes(parts):
    sizes = np.diff(np.minimum(np.cumsum([0, *parts]), ROWS)).astype(np.int32)
    rows, weights = normal(0, ROWS, 8), normal(1, 5, 8, 6)
    assert_near(both(rows, weights, sizes), by_numpy(rows, weights, sizes), np.float32, terms=ROWS)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float64])
@pytest.mark.parametrize("transpose", [False, True])
def test_equals_twin_to_the_second_derivative(dtype, transpose):
    rows, sizes = normal(0, 40, 5).astype(dtype), np.array([7, 0, 33 - 7], np.int64)
    weights = normal(1, 3, 4, 5).astype(dtype) if transpose else normal(1, 3, 5, 4).astype(dtype)

    def run(matmul, outer):
        def energy(rows, weights):
            out = matmul(rows, weights, sizes, transpose=transpose)
            return (jnp.cos(out) * out).sum() + (outer(rows, out, sizes) ** 2).sum()

        def slope(rows, weights):
            drows, dweights = jax.grad(energy, (0, 1))(rows, weights)
            return (drows.astype(jnp.float32) ** 2).sum() + (dweights.astype(jnp.float32) ** 2).sum()

        out = matmul(rows, weights, sizes, transpose=transpose)
        orders = jax.grad(energy, (0, 1)), jax.grad(slope, (0, 1))
        return out, *(order(rows, weights) for order in orders[: 2 if dtype == np.float64 else 1])

    got = jax.jit(lambda: run(grouped_matmul, grouped_outer))()
    want = jax.jit(lambda: run(grouped_matmul_plain, grouped_outer_plain))()
    assert got[0].dtype == dtype
    assert_near(got, want, dtype, terms=40 * 5 * 4)


def test_empty_inputs_give_zeros():
    out, outer = both(np.zeros((0, 3), np.float32), np.ones((2, 3, 4), np.float32), np.zeros(2, np.int32))
    assert (out.shape, outer.shape) == ((0, 4), (2, 3, 4))
    assert not outer.any()
    assert grouped_matmul(jnp.ones((4, 3)), jnp.ones((0, 3, 2)), jnp.zeros(0, jnp.int32)).tolist() == [[0, 0]] * 4


@pytest.mark.parametrize(
    "sizes", [[256] * 16, [500, 524] * 4, np.random.default_rng(0).multinomial(4096, [1 / 16] * 16), [4096] + [0] * 15]
)
def test_computes_few_rows_that_are_not_there(sizes):
    for blocks in (matmul_blocks(4096, len(sizes)), outer_blocks(4096)):
        counts = block_counts(np.asarray(sizes), blocks)
        rows = [block * count for block, count in zip(blocks, counts, strict=True)]
        assert np.sum(sizes) <= np.sum(rows) <= 1.1 * np.sum(sizes)


def test_takes_less_memory_than_every_row_with_every_matrix():
    rows, weights, sizes = normal(0, 2048, 128), normal(1, 16, 128, 128), np.full(16, 128, np.int32)

    def scratch(matmul):
        energy = jax.jit(jax.grad(lambda rows, weights: (matmul(rows, weights, sizes) ** 2).sum(), (0, 1)))
        return energy.lower(rows, weights).compile().memory_analysis().temp_size_in_bytes

    assert scratch(grouped_matmul) <= scratch(jax.lax.ragged_dot) / 3


def test_tpu_kernels_interpreted_equal_numpy():
    rows, weights, sizes = normal(0, 150, 16), normal(1, 3, 16, 8), np.array([20, 0, 120], np.int32)
    out = np.asarray(_MEGABLOX.matmul(False, rows, weights, sizes, interpret=True))
    want, want_outer = by_numpy(rows, weights, sizes)
    assert_near(out[:140], want[:140], np.float32, terms=16)
    turned = _MEGABLOX.matmul(True, rows, weights.swapaxes(1, 2).copy(), sizes, interpret=True)
    assert_near(turned[:140], want[:140], np.float32, terms=16)
    assert_near(_MEGABLOX.outer(rows, out, sizes, interpret=True), want_outer, np.float32, terms=150 * 16)


def test_gpu_kernels_interpreted_equal_numpy():
    # several tiles each way, a group of none, rows after the last group, sizes that no tile divides
    rows, weights, sizes = normal(0, 300, 40), normal(1, 3, 40, 136), np.array([150, 0, 140], np.int32)
    want, want_outer = by_numpy(rows, weights, sizes)
    out = np.asarray(grouped_triton.matmul(False, rows, weights, sizes, interpret=True))
    assert_near(out[:290], want[:290], np.float32, terms=40)
    turned = grouped_triton.matmul(True, rows, weights.swapaxes(1, 2).copy(), sizes, interpret=True)
    assert_near(turned[:290], want[:290], np.float32, terms=40)
    assert_near(grouped_triton.outer(rows, out, sizes, interpret=True), want_outer, np.float32, terms=150 * 40)


def test_gpu_kernels_are_left_what_they_do_not_take():
    rows, weights = jnp.ones((4, 3), jnp.float32), jnp.ones((2, 3, 5), jnp.float32)
    assert grouped_triton.takes(rows, weights)
    for one in (rows.astype(jnp.float64), rows.astype(jnp.bfloat16), jnp.ones((0, 3), jnp.float32)):
        assert not grouped_triton.takes(one, weights)
    assert not grouped_triton.takes(rows, jax.ShapeDtypeStruct((256, 4096, 4096), rows.dtype))


def test_refuses_what_does_not_fit():
    rows, weights, sizes = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ShapeError, match=r"rows \[4, 3\] and weights \[2, 3, 5\] do not fit.*\[E, F, D\]"):
        grouped_matmul(rows, weights, sizes, transpose=True)
    with pytest.raises(ShapeError, match="3 sizes for 2 matrices"):
        grouped_matmul(rows, weights, jnp.zeros(3, jnp.int32))
    with pytest.raises(ShapeError, match=r"x \[4, 3\], y \[5, 3\]"):
        grouped_outer(rows, jnp.ones((5, 3)), sizes)
