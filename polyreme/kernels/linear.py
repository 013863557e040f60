"""The affine map of the last dim."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from polyreme.errors import ShapeError
from polyreme.kernels import select


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x @ weight + bias over the last dim: [..., in], [in, out], [out] -> [..., out].

    On CPU the leading dims are flattened first: the weight gradient is then one 2-D product (rows_product), which XLA
    gives to its fast matmul; contracting over two leading dims takes about twice as long. Small 2-D ones stay plain. A
    leading dim that is sharded stays sharded (it is the major one of the flattened dim); a sharded second dim is
    gathered there, on CPU only: join such dims first (ops.segment.join_tokens). A single row is multiplied in parts,
    which threads take. That gradient is made as [in, out]; JAX
    makes [out, in] and transposes, which XLA cannot undo where a sum over devices stands between, and every pass of the
    optimizer then reads across rows.
    Reverse mode of any order; for forward mode use linear_plain.

    Raises ShapeError when the dims do not fit.

    >>> linear(jnp.ones((2, 5, 3)), jnp.ones((3, 4)), jnp.ones(4)).shape
    (2, 5, 4)
    """
    _check(x, weight, bias)
    *leading, inner = x.shape
    if _is_split_row(x, weight):
        y = _split_row_product(x.reshape(inner), weight)
    elif select.backend() == "gpu" and _are_few(leading):
        y = tile_product(x.reshape(math.prod(leading), inner), weight)
    elif select.backend() != "cpu" or x.ndim < 2 or (x.ndim == 2 and not _is_large(x, weight.shape[1])):
        return linear_plain(x, weight, bias)
    else:
        y = _product(x.reshape(math.prod(leading), inner), weight)
    y = y.reshape(*leading, weight.shape[1])
    return y if bias is None else y + bias


def linear_plain(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """The plain twin of linear: the product on the dims as they come."""
    y = jnp.matmul(x, weight)
    return y if bias is None else y + bias


ROW_PARTS = 4
"""Into how many parts a CPU divides the sums of a product of one row."""
LEAST_SPLIT = 1 << 16
"""Numbers of the smallest weight for which that is done."""


def _is_split_row(x: jax.Array, weight: jax.Array) -> bool:
    """Whether x is one row and the product is one that XLA gives to a single thread as it stands, though it waits for
    memory that two would read sooner."""
    return (
        select.backend() == "cpu"
        and all(isinstance(n, int) for n in x.shape)
        and math.prod(x.shape[:-1]) == 1
        and x.dtype == weight.dtype == jnp.float32
        and weight.shape[0] % ROW_PARTS == 0
        and LEAST_SPLIT <= weight.size < LARGE
    )


def _split_row_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[in] @ [in, out], as a product of a batch of parts of `in`, whose members XLA computes side by side, and their
    sum."""
    ins, outs = weight.shape
    parts = ROW_PARTS, ins // ROW_PARTS
    return jnp.einsum("pk,pkn->pn", x.reshape(parts), weight.reshape(*parts, outs)).sum(0)


TILE_ROWS = 8
"""Rows of the smallest product of a GPU's matrix units."""


def _are_few(leading: Sequence[int]) -> bool:
    """Whether the rows of these dims are known, and fewer than TILE_ROWS."""
    return all(isinstance(n, int) for n in leading) and 0 < math.prod(leading) < TILE_ROWS


def tile_product(x: jax.Array, y: jax.Array, acc: jnp.dtype | None = None) -> jax.Array:
    """x y: [n, k], [k, m] -> [n, m], accumulated in dtype acc if given.

    On a GPU a few rows are filled up to a tile. XLA makes a multiplication and a sum of a product of one row, with a
    matrix of the weight's size written between them, or turns the weight to float32 first.
    """
    rows = x.shape[0]
    if select.backend() != "gpu" or not _are_few((rows,)):
        return jnp.matmul(x, y, preferred_element_type=acc)
    filled = jnp.pad(x, ((0, TILE_ROWS - rows), (0, 0)))
    return jnp.matmul(filled, y, preferred_element_type=acc)[:rows]


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[n, in] @ [in, out]."""
    return jnp.matmul(x, weight)


def _product_fwd(x, weight):
    return jnp.matmul(x, weight), (x, weight)


def _product_bwd(residuals, dy):
    x, weight = residuals
    return jnp.matmul(dy, weight.T).astype(x.dtype), rows_product(x, dy).astype(weight.dtype)


_product.defvjp(_product_fwd, _product_bwd)


LARGE = 1 << 23
"""Multiplications from which on a product's kernel matters more than what a barrier keeps XLA from merging: the layers
of a small network differentiated several times have fewer (1024 x 64 x 64), those of a transformer more."""


def _is_large(x: jax.Array, width: int) -> bool:
    """False for a batch whose size is open, as in an exported program: the compiler sees no size either."""
    return all(isinstance(n, int) for n in (*x.shape, width)) and x.size * width >= LARGE


def rows_product(x: jax.Array, y: jax.Array, acc: jnp.dtype | None = None) -> jax.Array:
    """x^T y: [..., n, a], [..., n, b] -> [..., a, b], accumulated in dtype acc if given.

    On CPU the transposed x of a large product is made first, which the barrier keeps XLA from undoing: it then gives
    the product to the kernels that it gives all others to. Else it calls oneDNN, which for this order runs at a third
    of the speed without AVX-512, and at 0.7 of it for 1024 rows by 256 with it; the transpose costs 2 to 15% of the
    product (benchmarks/products.py).
    """
    turned = jnp.swapaxes(x, -1, -2)
    if select.backend() == "cpu" and _is_large(x, y.shape[-1]):
        turned = jax.lax.optimization_barrier(turned)
    return jnp.matmul(turned, y, preferred_element_type=acc)


def _check(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> None:
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            f"linear: x {list(x.shape)} and weight {list(weight.shape)} do not fit; "
            "the last dim of x must equal the first of a 2-D weight [in, out]"
        )
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ShapeError(f"linear: bias {list(bias.shape)} must be [{weight.shape[1]}], the out dim of weight")
