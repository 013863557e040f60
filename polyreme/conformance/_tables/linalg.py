"""Contract rows of ops/matrices/linalg.py.

Matrices are well conditioned (identity plus little), so that rounding stays near the dtype's.
"""

import numpy as np
import scipy.linalg as sl

from polyreme.conformance.case import Case
from polyreme.errors import NumericsError, ShapeError


def floats(*shapes, args=()):
    return lambda rng: (*(rng.standard_normal(s).astype("float32") for s in shapes), *args)


def regular(n=3, *others, batch=(), args=()):
    """Matrices [*batch, n, n] near 2 I, other Tensors of given shapes, attributes."""

    def make(rng):
        x = 2 * np.eye(n) + 0.3 * rng.standard_normal((*batch, n, n))
        return (x.astype("float32"), *(rng.standard_normal(s).astype("float32") for s in others), *args)

    return make


def positive(n=3, *others, args=()):
    def make(rng):
        x, *rest = regular(n, *others, args=args)(rng)
        return (x @ x.T).astype("float32"), *rest

    return make


def factor(rng):
    return (np.linalg.cholesky(positive()(rng)[0]), rng.standard_normal((3, 2)).astype("float32"))


def gram(x):
    return x.T @ x


def given(*args):
    return lambda rng: args


def ones(*shapes):
    return tuple(np.ones(s, "float32") for s in shapes)


def rebuilds(x, *, upto=None):
    """A check that factors multiply to x and are what they should be."""

    def check(*got):
        product = (
            got[0] @ got[1]
            if len(got) == 2
            else (got[0][..., : got[1].shape[-1]] * got[1]) @ got[2][: got[1].shape[-1]]
        )
        # 4 terms a product, twice, and the rotations that made the factors
        np.testing.assert_allclose(product, x, atol=64 * np.finfo("float32").eps * np.abs(x).max())
        np.testing.assert_allclose(got[0].T @ got[0], np.eye(got[0].shape[1]), atol=64 * np.finfo("float32").eps)
        assert got[0].shape == upto if upto else True

    return check


def spectrum(x):
    def check(w, v):
        np.testing.assert_allclose(x @ v, v * w, atol=64 * np.finfo("float32").eps * np.abs(x).max())
        np.testing.assert_allclose(np.linalg.norm(v, axis=0), 1, rtol=64 * np.finfo("float32").eps)

    return check


def least_squares(x, y, *_):
    z, residuals, rank, s = np.linalg.lstsq(x, y)
    return z, residuals if x.shape[0] > x.shape[1] else np.zeros(0), np.int32(rank), s


RNG = np.random.default_rng(3)
TALL = RNG.standard_normal((4, 3)).astype("float32")
WIDE = TALL.T.copy()
EVEN = (TALL.T @ TALL).astype("float32")
ANY = RNG.standard_normal((3, 3)).astype("float32")
HALF = "the gradient is shared by both triangles, see test_linalg.py"
RANK2 = np.float32([[1, 2, 3], [2, 4, 6], [1, 0, 1]])
NOT_SQUARE = (ones((2, 3)), ShapeError, r"square matrices .* got shape \[2, 3\]")
VECTOR = (ones((3,)), ShapeError, r"matrices .* got shape \[3\]")
SINGULAR = (ones((2, 2)), NumericsError, "singular")
T = 96  # terms: elimination of a 3 x 3 system, forward and back, with growth below 4

CASES = [
    Case("cholesky", positive(), np.linalg.cholesky, terms=T, no_grad=HALF, bad=((-np.eye(2, dtype="float32"),), NumericsError, "not positive definite")),
    Case("cholesky", positive(args=(True,)), lambda x, u: np.linalg.cholesky(x).T, terms=T, no_grad=HALF, tag="upper", bad=NOT_SQUARE),
    Case("cholesky", given(np.tril(EVEN + np.eye(3, dtype="float32"))), lambda x: np.linalg.cholesky(x + np.tril(x, -1).T), terms=T, no_grad=HALF, tag="triangle"),
    Case("cholesky_solve", lambda rng: factor(rng)[::-1], lambda b, f: np.linalg.solve(gram(np.tril(f).T), b), terms=4 * T, bad=(ones((2, 1), (3, 3)), ShapeError, "cholesky_solve: dim 'n' is 2 in x")),
    Case("cholesky_solve", lambda rng: (factor(rng)[1], factor(rng)[0].T.copy(), True), lambda b, f, u: np.linalg.solve(gram(np.triu(f)), b), terms=4 * T, tag="upper", bad=(ones((2, 1), (2, 3)), ShapeError, "square")),
    Case("cholesky_inverse", lambda rng: factor(rng)[:1], lambda f: np.linalg.inv(gram(np.tril(f).T)), terms=4 * T, bad=NOT_SQUARE),
    Case("cholesky_inverse", lambda rng: (factor(rng)[0].T.copy(), True), lambda f, u: np.linalg.inv(gram(np.triu(f))), terms=4 * T, tag="upper", bad=((np.diag(np.float32([1, 0])),), NumericsError, "zero on its diagonal")),
    Case("inverse", regular(batch=(2,)), np.linalg.inv, terms=T, bad=SINGULAR),
    Case("inverse", given(np.array([[2, 0], [0, 4]])), lambda x: np.linalg.inv(x).astype("float32"), no_grad="integers", tag="int", bad=NOT_SQUARE),
    Case("det", regular(batch=(2,)), np.linalg.det, terms=T, bad=NOT_SQUARE),
    Case("slogdet", regular(batch=(2,)), lambda x: np.stack(np.linalg.slogdet(x)), terms=T, bad=NOT_SQUARE),
    Case("solve", regular(3, (3, 2)), np.linalg.solve, terms=T, bad=((*ones((2, 2), (2, 1)),), NumericsError, "singular")),
    Case("solve", regular(3, (3,)), np.linalg.solve, terms=T, tag="column", bad=(ones((2, 3), (2, 1)), ShapeError, "square")),
    Case("solve", regular(3, (2, 3), batch=(2,)), lambda x, y: np.linalg.solve(x, y[..., None])[..., 0], terms=T, tag="columns", bad=(ones((3, 3), (2, 1)), ShapeError, "solve: dim 'n' is 3 in x")),
    Case("solve", regular(3, (2, 3), args=(False,)), lambda x, y, _: y @ np.linalg.inv(x), terms=T, tag="right"),
    Case("triangular_solve", regular(3, (3, 2)), lambda x, y: sl.solve_triangular(x, y), terms=T, bad=(ones((3, 3), (2, 1)), ShapeError, "triangular_solve: dim 'n' is 3 in x")),
    Case("triangular_solve", regular(3, (3, 2), args=(False, True, True)), lambda x, y, *_: sl.solve_triangular(x, y, lower=True, trans=1, unit_diagonal=True), terms=T, tag="all", bad=(ones((3, 2), (3, 1)), ShapeError, "square")),
    Case("qr", given(TALL), check=rebuilds(TALL), bad=VECTOR),
    Case("qr", given(TALL, "complete"), check=rebuilds(TALL, upto=(4, 4)), no_grad="jax has none for a complete Q", tag="complete", bad=((*ones((2, 2)), "full"), ShapeError, "mode='full'")),
    Case("qr", given(TALL, "r"), lambda x, m: np.linalg.qr(x, "r"), terms=T, tag="r"),
    Case("svd", given(TALL), check=rebuilds(TALL), bad=VECTOR),
    Case("svd", given(TALL, True), check=rebuilds(TALL, upto=(4, 4)), no_grad="any basis will do for the rest; see test_linalg.py", tag="full"),
    Case("svd", given(WIDE), check=rebuilds(WIDE), tag="wide"),
    Case("svdvals", floats((2, 4, 3)), lambda x: np.linalg.svd(x, compute_uv=False), terms=T, bad=VECTOR),
    Case("eigh", given(EVEN), check=spectrum(EVEN), no_grad=HALF, bad=NOT_SQUARE),
    Case("eigh", given(np.triu(EVEN), "U"), check=spectrum(EVEN), no_grad=HALF, tag="upper", bad=((EVEN, "X"), ShapeError, "UPLO='X'")),
    Case("eigvalsh", given(EVEN), np.linalg.eigvalsh, terms=T, no_grad=HALF, bad=NOT_SQUARE),
    Case("eigvalsh", given(np.triu(EVEN), "U"), np.linalg.eigvalsh, terms=T, no_grad=HALF, tag="upper", bad=((EVEN, "X"), ShapeError, "UPLO='X'")),
    Case("pinv", given(TALL), np.linalg.pinv, terms=T, bad=VECTOR),
    Case("pinv", given(EVEN, 1e-6, True), lambda x, r, h: np.linalg.pinv(x, hermitian=True), terms=8 * T, no_grad="x must stay Hermitian", tag="hermitian", bad=((TALL, 1e-6, True), ShapeError, "square")),
    Case("pinv", given(TALL, np.float32([1e-6])), lambda x, r: np.linalg.pinv(x), terms=T, tag="one-rcond"),
    Case("pinv", given(RANK2, 1e-5), lambda x, r: np.linalg.pinv(x.astype("float64"), rcond=r), terms=T, no_grad="the rank jumps", tag="singular"),
    Case("lstsq", lambda rng: (TALL, *floats((4, 2))(rng)), least_squares, terms=T, bad=(ones((3, 2), (4, 1)), ShapeError, "lstsq: dim 'm' is 3 in x")),
    Case("lstsq", lambda rng: (WIDE, *floats((3, 2))(rng), None, "gelsd"), least_squares, terms=T, tag="wide", bad=((*ones((2, 2), (2, 2)), None, "fast"), ShapeError, "driver='fast'")),
    Case("lstsq", given(RANK2, np.float32([[1], [2], [1]])), least_squares, terms=2 * T, no_grad="the rank jumps", tag="singular"),
    Case("matrix_power", regular(args=(3,)), np.linalg.matrix_power, terms=T, bad=((*ones((2, 3)), 2), ShapeError, "square")),
    Case("matrix_power", regular(args=(-2,)), np.linalg.matrix_power, terms=T, tag="negative", bad=((*ones((2, 2)), -1), NumericsError, "matrix_power: .* singular")),
    Case("matrix_power", regular(args=(0,)), np.linalg.matrix_power, no_grad="constant", tag="zero"),
    Case("matrix_exp", floats((2, 3, 3)), lambda x: sl.expm(x.astype("float64")), terms=4 * T, bad=NOT_SQUARE),
    Case("matrix_rank", given(RANK2), lambda x: np.array(2), no_grad="integers", bad=((RANK2, 0.1, False, 0.1), ShapeError, "tol with atol")),
    Case("matrix_rank", given(np.diag(np.float32([4, 1, 0.5])), 0.7), lambda x, tol: np.array(2), no_grad="integers", tag="tol", bad=VECTOR),
    Case("matrix_rank", given(np.diag(np.float32([-4, 1, 0.5])), None, True, 0.7, 0.5), lambda x, *_: np.array(1), no_grad="integers", tag="hermitian", bad=((TALL, None, True), ShapeError, "square")),
    # 1 and 4 by the lower triangle, which is read
    Case("matrix_rank", given(np.float32([[1, 9], [0, 4]]), 4.4, True), lambda *_: np.array(0), no_grad="integers", tag="triangle"),
    Case("matrix_rank", given(np.diag(np.float32([4, 1e-9, 0.5])), None, False, 0.0), lambda x, *_: np.array(3), no_grad="integers", tag="atol"),
    Case("cond", regular(), np.linalg.cond, terms=T, bad=VECTOR),
    *(Case("cond", regular(args=(p,)), np.linalg.cond, terms=2 * T, tag=f"p{p}", bad=((TALL, p), ShapeError, "square") if p not in (2, -2) else ((TALL, 3), ShapeError, "p=3")) for p in (2, -2, "fro", "nuc", 1, -1, np.inf, -np.inf)),
    Case("eig", given(ANY), check=spectrum(ANY), no_grad="a vector's phase is free", bad=NOT_SQUARE),
    Case("eigvals", given(ANY), np.linalg.eigvals, terms=T, bad=NOT_SQUARE),
]  # fmt: skip
