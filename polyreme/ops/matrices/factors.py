"""Matrices given by their factors: LU and what solves with it, Householder reflectors, low-rank SVD and PCA.

Matrices are the last two dims, leading dims are a batch. The layouts are LAPACK's: L (its unit diagonal left
out) and U in one matrix, pivots counted from 1, reflectors below the diagonal.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax, random

from polyreme.core import dims
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote
from polyreme.core.op import DRAWN, Key, op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.creation import republish
from polyreme.ops.matrices.linalg import matrices, square, triangular, turned


@op(amp="fp32")
def lu(x: Array, pivot: bool = True, get_infos: bool = False) -> Any:
    """(LU, pivots): row exchanges and factors with P L U = x; x [*b, m, n], pivots [*b, min(m, n)] int32.

    LU holds U on and above the diagonal and L, whose diagonal is 1, below. Row i was exchanged with row pivots[i] - 1,
    one i after the other; without pivot none was. get_infos adds [*b] int32: 0, or i where U[i - 1, i - 1] is the first
    diagonal element to be 0, with which no system can be solved. lu_unpack gives P, L and U.
    """
    x = matrices(x, "lu")
    if pivot:
        packed, pivots, _ = lax.linalg.lu(x)
        pivots = pivots + 1
    else:
        packed = _eliminate(x)
        pivots = jnp.broadcast_to(jnp.arange(1, min(x.shape[-2:]) + 1), (*x.shape[:-2], min(x.shape[-2:])))
    pivots = pivots.astype(dtypes.int32)
    return (packed, pivots, _first_zero(packed)) if get_infos else (packed, pivots)


def _first_zero(packed: Array) -> Array:
    """1 + the place of the first zero on the diagonal, 0 where there is none."""
    zero = jnp.diagonal(packed, axis1=-2, axis2=-1) == 0
    if not zero.shape[-1]:
        return jnp.zeros(zero.shape[:-1], dtypes.int32)
    return jnp.where(zero.any(-1), jnp.argmax(zero, -1) + 1, 0).astype(dtypes.int32)


def _eliminate(x: Array) -> Array:
    """L and U in one matrix, by elimination without exchanging rows."""
    m, n = x.shape[-2:]
    rows, columns = jnp.arange(m), jnp.arange(n)

    def step(a: Array, k: Array) -> tuple[Array, None]:
        row = lax.dynamic_index_in_dim(a, k, -2)
        column = lax.dynamic_index_in_dim(a, k, -1)
        pivot = lax.dynamic_index_in_dim(row, k, -1)
        below = (rows > k)[:, None]
        factors = jnp.where(below, column / pivot, 0)
        a = a - factors * jnp.where(columns > k, row, 0)
        return jnp.where(below & (columns == k), factors, a), None

    return lax.scan(step, x, jnp.arange(min(m, n)))[0]


def _permutation(pivots: Array, rows: int) -> Array:
    """The order [*b, rows] in which a product P L U has its rows in L U."""
    return lax.linalg.lu_pivots_to_permutation((pivots - 1).astype(dtypes.int32), rows)


def _check_pivots(pivots: Array, factors: Array, what: str) -> None:
    if not dtypes.is_integer(pivots.dtype):
        raise DTypeError(f"{what}: pivots are {pivots.dtype.name}, need int32 as lu gives them")
    wanted = (*factors.shape[:-2], min(factors.shape[-2:]))
    if pivots.shape != wanted:
        raise ShapeError(f"{what}: pivots {list(pivots.shape)}; factors {list(factors.shape)} need {list(wanted)}")


@op(amp="fp32")
def lu_unpack(
    x: Array, y: Array, unpack_ludata: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array] | tuple[Array | None, ...]:
    """(P, L, U) from lu's factors x [*b, m, n] and pivots y: P [*b, m, m] permutes rows, P L U is what lu was given.

    L is [*b, m, k] and U [*b, k, n], k = min(m, n). unpack_ludata=False gives None for L and U, unpack_pivots=False
    for P.
    """
    x = matrices(x, "lu_unpack")
    _check_pivots(y, x, "lu_unpack")
    m, n = x.shape[-2:]
    k = min(m, n)
    order = _permutation(y, m)
    # column i of P has its one in the row that came to place i
    p = (order[..., None, :] == jnp.arange(m)[:, None]).astype(x.dtype)
    return p, jnp.tril(x[..., :k], -1) + jnp.eye(m, k, dtype=x.dtype), jnp.triu(x[..., :k, :])


def _ask_for(
    x: AnyTensor, y: AnyTensor, unpack_ludata: bool = True, unpack_pivots: bool = True, name: str | None = None
) -> tuple[AnyTensor, AnyTensor, AnyTensor]:
    p, lower, upper = _unpacked(x, y, unpack_ludata, unpack_pivots)
    kept = bool(unpack_ludata)
    return p if unpack_pivots else None, lower if kept else None, upper if kept else None


_unpacked = lu_unpack
lu_unpack = republish(_unpacked, _ask_for)


@op(amp="fp32", method=False)
def lu_solve(b: Array, lu: Array, pivots: Array, trans: str = "N") -> Array:
    """The solution x of A x = b, where lu and pivots are A's: b [*b, n, k], lu [*b, n, n], pivots [*b, n].

    trans: "N", or "T" for A's transpose, "C" for its conjugate transpose.
    """
    if trans not in ("N", "T", "C"):
        raise ConfigError(f"lu_solve: trans={trans!r}; choose 'N', 'T' (transpose) or 'C' (conjugate transpose)")
    b, lu = promote(matrices(b, "lu_solve"), square(lu, "lu_solve"))
    dims.check("lu_solve", {"b": "*_a n k", "lu": "*_b n _"}, {"b": b.shape, "lu": lu.shape})
    _check_pivots(pivots, lu, "lu_solve")
    batch = jnp.broadcast_shapes(b.shape[:-2], lu.shape[:-2])
    order = jnp.broadcast_to(_permutation(pivots, b.shape[-2]), (*batch, b.shape[-2]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    if trans == "N":
        half = triangular(lu, jnp.take_along_axis(b, order[..., None], -2), lower=True, turn=False, unit=True)
        return triangular(lu, half, lower=False, turn=False)
    half = triangular(lu, b, lower=False, turn=True, conjugate=trans == "C")
    solved = triangular(lu, half, lower=True, turn=True, unit=True, conjugate=trans == "C")
    return jnp.take_along_axis(solved, jnp.argsort(order, -1)[..., None], -2)


def _reflect(x: Array, tau: Array, y: Array, turn: bool) -> Array:
    """Q y, or Q^H y: Q = H_1 ... H_k, H_i = I - tau_i v_i v_i^H, v_i is column i of x below the diagonal, 1 on it."""
    count = tau.shape[-1]
    v = jnp.tril(x[..., :count], -1) + jnp.eye(x.shape[-2], count, dtype=x.dtype)
    batch = jnp.broadcast_shapes(x.shape[:-2], tau.shape[:-1], y.shape[:-2])

    def step(y: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        v, tau = one
        along = jnp.sum(jnp.conj(v)[..., None] * y, -2, keepdims=True)
        return y - tau[..., None, None] * v[..., None] * along, None

    factors = (jnp.moveaxis(v, -1, 0), jnp.moveaxis(jnp.conj(tau) if turn else tau, -1, 0))
    return lax.scan(step, jnp.broadcast_to(y, (*batch, *y.shape[-2:])), factors, reverse=not turn)[0]


def _reflectors(x: Array, tau: Array, what: str) -> tuple[Array, Array]:
    x, tau = promote(matrices(x, what), tau)
    if tau.shape[:-1] != x.shape[:-2] or tau.shape[-1] > x.shape[-1] or x.shape[-2] < tau.shape[-1]:
        raise ShapeError(f"{what}: tau {list(tau.shape)}, x {list(x.shape)}; needs one number a column of x, at most")
    return x, tau


@op(amp="fp32")
def householder_product(x: Array, tau: Array) -> Array:
    """The first n columns of H_1 H_2 ... H_k, k reflectors as QR factorizations hold them: [*b, m, n], [*b, k], m >= n.

    H_i = I - tau_i v_i v_i^H; v_i is column i of x below its diagonal, 1 on it and 0 above.
    """
    x, tau = _reflectors(x, tau, "householder_product")
    m, n = x.shape[-2:]
    if m < n:
        raise ShapeError(f"householder_product: x {list(x.shape)} has more columns than rows; needs m >= n")
    return _reflect(x, tau, jnp.broadcast_to(jnp.eye(m, n, dtype=x.dtype), x.shape), False)


@op(amp="fp32")
def ormqr(x: Array, tau: Array, y: Array, left: bool = True, transpose: bool = False) -> Array:
    """Q y, or y Q with left=False; transpose takes Q^H for Q. Q [*b, r, r] has x's reflectors, see householder_product.

    x [*b, r, k], tau [*b, k], y [*b, m, n], where r is m, or n with left=False. Q itself is never made.
    """
    x, tau = _reflectors(x, tau, "ormqr")
    x, y = promote(x, matrices(y, "ormqr"))
    tau = tau.astype(x.dtype)
    if x.shape[-2] != y.shape[-2 if left else -1]:
        raise ShapeError(
            f"ormqr: x {list(x.shape)} has {x.shape[-2]} rows, y {list(y.shape)} with left={left} does not"
        )
    return _reflect(x, tau, y, transpose) if left else turned(_reflect(x, tau, turned(y), not transpose))


def _low_rank(x: Array, q: int | None, niter: int, key: Array, what: str) -> tuple[Array, Array, Array]:
    """(U, S, V) by algorithms 4.4 and 5.1 of N. Halko, P.-G. Martinsson and J. Tropp, SIAM Review 53(2), 2011."""
    m, n = x.shape[-2:]
    rank = min(6, m, n) if q is None else q
    if not isinstance(rank, int) or not 0 <= rank <= min(m, n):
        raise ShapeError(f"{what}: q={q!r} for matrices {m} x {n}; give an int from 0 to {min(m, n)}")
    if not isinstance(niter, int) or niter < 0:
        raise ShapeError(f"{what}: niter={niter!r}; give the number of iterations, 0 or more")
    drawn = random.normal(key, (n, rank), x.dtype)
    basis = jnp.linalg.qr(x @ drawn)[0]
    for _ in range(niter):
        basis = jnp.linalg.qr(turned(x) @ basis)[0]
        basis = jnp.linalg.qr(x @ basis)[0]
    u, s, vh = jnp.linalg.svd(turned(basis) @ x, full_matrices=False)
    return basis @ u, s, turned(vh)


@op(amp="fp32")
def svd_lowrank(
    x: Array, q: int | None = None, niter: int = 2, M: Array | None = None, key: Key = DRAWN
) -> tuple[Array, Array, Array]:
    """(U, S, V): x - M is nearly U diag(S) V^H, of rank q (6, or less if x is smaller); x [*b, m, n].

    U [*b, m, q], S [*b, q] descending, V [*b, n, q]. It projects x on random directions, which niter rounds turn
    towards the largest singular values: exact where x has rank q or less, else as good as those values fall off. M is
    subtracted from x, for which it is broadcast ([*b, 1, n]: the mean of rows). Source: Halko et al., SIAM Review
    53(2), 2011, algorithms 4.4 and 5.1.
    """
    x = matrices(x, "svd_lowrank")
    return _low_rank(x if M is None else x - M, q, niter, key, "svd_lowrank")


@op(amp="fp32")
def pca_lowrank(
    x: Array, q: int | None = None, center: bool = True, niter: int = 2, key: Key = DRAWN
) -> tuple[Array, Array, Array]:
    """(U, S, V) of svd_lowrank for observations in rows, their mean subtracted if center: V's columns are the axes.

    The share of variance along column i is S[i]^2 / (m - 1); x @ V gives the coordinates.
    """
    x = matrices(x, "pca_lowrank")
    return _low_rank(x - jnp.mean(x, -2, keepdims=True) if center else x, q, niter, key, "pca_lowrank")
