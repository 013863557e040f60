"""Contract rows of ops/matrices/factors.py and the float8 product; the oracles are scipy.linalg and NumPy."""

import numpy as np
import scipy.linalg as sl
from scipy.linalg import lapack

from polyreme.conformance.case import Case
from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, DTypeError, ShapeError


def some(*shape, kind="f", args=()):
    def make(rng):
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if kind == "c" else 0)
        return (x.astype("complex64" if kind == "c" else "float32"), *args)

    return make


def packed(x, *_):
    """scipy's LU in LAPACK's layout for each matrix of a batch."""
    flat = [sl.lu_factor(m) for m in x.reshape(-1, *x.shape[-2:])]
    return np.stack([f for f, _ in flat]).reshape(x.shape), np.stack([p + 1 for _, p in flat]).astype("int32").reshape(
        *x.shape[:-2], -1
    )


def without_exchange(x, *_):
    a = x.astype("float64").copy()
    for k in range(min(a.shape)):
        a[k + 1 :, k] /= a[k, k]
        a[k + 1 :, k + 1 :] -= np.outer(a[k + 1 :, k], a[k, k + 1 :])
    return a, np.arange(1, min(a.shape) + 1, dtype="int32")


def parts(f, pivots, *_):
    m, n = f.shape
    k = min(m, n)
    p = np.eye(m)
    for i, j in enumerate(pivots):
        p[[i, j - 1]] = p[[j - 1, i]]
    return p.T, np.tril(f[:, :k], -1) + np.eye(m, k), np.triu(f[:k])


def system(kind, trans="N"):
    """b, and the factors of a regular matrix."""

    def make(rng):
        (a,) = some(3, 3, kind=kind)(rng)
        f, p = sl.lu_factor(a + 3 * np.eye(3, dtype="float32"))
        return (*some(3, 2, kind=kind)(rng), f, (p + 1).astype("int32"), trans)

    return make


def reflectors(m, k, kind="f", *, y=(), args=(), batch=()):
    """x and tau of a QR factorization's layout, and another matrix."""

    def make(rng):
        x, tau = some(*batch, m, k, kind=kind)(rng)[0], some(*batch, k, kind=kind)(rng)[0]
        return (x, tau, *(some(*y, kind=kind)(rng) if y else ()), *args)

    return make


def orthogonal(x, tau):
    q = np.eye(x.shape[-2], dtype=np.result_type(x.dtype, "float64"))
    for i, t in enumerate(tau):
        v = np.concatenate([np.zeros(i), [1], x[i + 1 :, i]])
        q = q @ (np.eye(len(v)) - t * np.outer(v, v.conj()))
    return q


def product(x, tau):
    if x.ndim > 2:
        return np.stack([product(a, t) for a, t in zip(x, tau, strict=True)])
    return orthogonal(x, tau)[:, : x.shape[-1]]


def applied(x, tau, y, left=True, transpose=False):
    q = orthogonal(x, tau)
    q = q.conj().T if transpose else q
    return q @ y if left else y @ q


def rebuilds(x):
    def check(u, s, v):
        # 5 terms a product, three of them, and the rotations that made the factors
        bound = 128 * np.finfo("float32").eps
        np.testing.assert_allclose((u * s) @ v.conj().T, x, atol=bound * np.abs(x).max())
        np.testing.assert_allclose(u.conj().T @ u, np.eye(len(s)), atol=bound)

    return check


def leading(x, q):
    """A check that the singular values are the q largest of x, of lower rank than q."""

    def check(u, s, v):
        np.testing.assert_allclose(s, np.linalg.svd(x)[1][:q], atol=128 * np.finfo("float32").eps * np.abs(x).max())
        assert u.shape == (x.shape[0], q)
        assert v.shape == (x.shape[1], q)

    return check


def ones(*shapes):
    return tuple(np.ones(s, "float32") for s in shapes)


RNG = np.random.default_rng(11)
TALL = RNG.standard_normal((5, 3)).astype("float32")
FLAT = (RNG.standard_normal((6, 2)) @ RNG.standard_normal((2, 8))).astype("float32")  # rank 2
CENTRED = TALL - TALL.mean(0)
F8 = dtypes.float8_e4m3fn
HALVES = "rounded to half precision or less"
FREE = "signs of the vectors depend on the random directions; see test_linalg.py"
T = 96  # terms: elimination of a 3 x 3 system, forward and back, with growth below 4
VECTOR = (ones((3,)), ShapeError, r"matrices .* got shape \[3\]")
THREE = np.int32([1, 2, 3])

CASES = [
    Case("lu", some(2, 3, 3), packed, terms=T, bad=VECTOR),
    Case("lu", some(4, 3, kind="c", args=(True, True)), lambda x, *_: (*((f := lapack.cgetrf(x))[0], (f[1] + 1).astype("int32")), np.int32(0)), terms=T, tag="infos"),
    Case("lu", lambda rng: (np.float32([[1, 2], [2, 4]]), True, True), lambda x, *_: (np.float32([[2, 4], [0.5, 0]]), np.int32([2, 2]), np.int32(2)), no_grad="singular", tag="singular"),
    Case("lu", lambda rng: ((rng.standard_normal((3, 4)) + 3 * np.eye(3, 4)).astype("float32"), False), without_exchange, terms=T, tag="nopivot"),
    Case("lu", lambda rng: (np.ones((0, 3), "float32"), True, True), lambda *_: (np.ones((0, 3)), np.ones(0, "int32"), np.int32(0)), no_grad="no elements", tag="empty"),
    Case("lu_unpack", lambda rng: (*some(4, 3)(rng), np.int32([3, 3, 4])), parts, bad=((*ones((3, 3)), np.int32([1, 2])), ShapeError, r"pivots \[2\]; factors \[3, 3\] need \[3\]")),
    Case("lu_unpack", lambda rng: (*some(2, 3)(rng), np.int32([2, 2]), True, False), lambda *a: parts(*a)[1:], tag="data", bad=(ones((3, 3), (3,)), DTypeError, "pivots are float32")),
    Case("lu_unpack", lambda rng: (*some(2, 3)(rng), np.int32([2, 2]), False), lambda *a: parts(*a)[0], no_grad="constant", tag="pivots"),
    *(Case("lu_solve", system(kind, trans), lambda b, f, p, t: sl.lu_solve((f, p - 1), b, "NTC".index(t)), terms=T, tag=trans + kind,
           bad=((*ones((3, 2), (3, 3)), THREE, "H"), ConfigError, "trans='H'") if trans == "N" else ((*ones((2, 2), (3, 3)), THREE), ShapeError, "lu_solve: dim 'n' is 2 in b")) for kind, trans in (("f", "N"), ("f", "T"), ("c", "C"))),
    Case("householder_product", reflectors(4, 3, batch=(2,)), product, terms=T, bad=(ones((2, 3), (2,)), ShapeError, "more columns than rows")),
    Case("householder_product", reflectors(3, 3, "c"), product, terms=T, tag="complex", bad=(ones((3, 3), (4,)), ShapeError, r"tau \[4\], x \[3, 3\]")),
    Case("ormqr", reflectors(4, 2, y=(4, 3)), applied, terms=T, bad=(ones((3, 2), (2,), (4, 4)), ShapeError, "has 3 rows")),
    Case("ormqr", reflectors(3, 3, "c", y=(3, 2), args=(True, True)), applied, terms=T, tag="turned"),
    Case("ormqr", reflectors(3, 2, "c", y=(4, 3), args=(False,)), applied, terms=T, tag="right"),
    Case("ormqr", reflectors(3, 2, y=(4, 3), args=(False, True)), applied, terms=T, tag="right-turned"),
    Case("svd_lowrank", lambda rng: (TALL, 3), check=rebuilds(TALL), no_grad=FREE, bad=((TALL, 4), ShapeError, "q=4 for matrices 5 x 3")),
    Case("svd_lowrank", lambda rng: (FLAT, 4), check=leading(FLAT, 4), no_grad=FREE, tag="rank", bad=((TALL, 2, -1), ShapeError, "niter=-1")),
    Case("svd_lowrank", lambda rng: (TALL, None, 1, TALL.mean(0, keepdims=True)), check=rebuilds(CENTRED), no_grad=FREE, tag="mean"),
    Case("pca_lowrank", lambda rng: (TALL,), check=rebuilds(CENTRED), no_grad=FREE, bad=VECTOR),
    Case("pca_lowrank", lambda rng: (FLAT, 2, False, 1), check=rebuilds(FLAT), no_grad=FREE, tag="rank", bad=((TALL, 2.5), TypeError, "q=2.5")),
    Case("fp8_fp8_half_gemm_fused", lambda rng: (rng.integers(-8, 9, (2, 3, 4)).astype(F8), rng.integers(-8, 9, (4, 2)).astype(F8)), lambda x, y: (x.astype("float32") @ y.astype("float32")).astype("float16"), no_grad=HALVES, bad=(ones((2, 2), (2, 2)), DTypeError, "x is float32, needs float8_e4m3fn")),
    Case("fp8_fp8_half_gemm_fused", lambda rng: (rng.integers(-8, 9, (4, 3)).astype(F8), rng.integers(-8, 9, (2, 4)).astype(F8), True, True, np.float32([1, -2]), 0.5, "bfloat16", "relu"), lambda x, y, *a: np.maximum(x.astype("float32").T @ y.astype("float32").T * 0.5 + a[2], 0).astype(dtypes.bfloat16), no_grad=HALVES, tag="relu", bad=((ones((2, 2))[0].astype(F8), ones((2, 2))[0].astype(F8), False, False, None, 1.0, "float16", "tanh"), ConfigError, "act='tanh'")),
]  # fmt: skip
