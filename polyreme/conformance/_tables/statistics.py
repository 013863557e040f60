"""Contract rows of ops/statistics.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import DTypeError, ShapeError


def floats(*args, shape=(3, 8)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def given(*args):
    return lambda rng: args


def counts(x, bins, low, high, weight=None, density=False):
    return np.histogram(x, bins, (low, high), density, weight)[0]


COUNTS = "integers"
CUBE = ((np.ones((2, 2, 2), "float32"),), ShapeError, r"\[2, 2, 2\]")
VALUES = np.array([0, 1, 1, 3])
SUMS = np.float32([0.5, 1, 2, 4])

POINTS = np.float32([[0, 1], [1, 0], [2, 0], [2, 2], [9, 9]])
EDGES = [np.float32([0, 1.5, 2]), np.float32([0, 0.5, 1, 2])]


def grid(x, bins=10, ranges=None, density=False, weights=None):
    pairs = None if ranges is None else list(zip(ranges[::2], ranges[1::2], strict=True))
    hist, edges = np.histogramdd(
        x.reshape(-1, x.shape[-1]), bins, pairs, density, None if weights is None else weights.reshape(-1)
    )
    return (hist.astype(x.dtype), *(e.astype(x.dtype) for e in edges))


CASES = [
    Case("histogramdd", given(POINTS, 2), grid, no_grad="jumps at the edges", bad=((np.ones(3, "float32"),), ShapeError, r"points \[\.\.\., n\], got float32 of shape \[3\]")),
    Case("histogramdd", given(POINTS, [3, 2], [0.0, 2.0, 0.0, 2.0], True, np.float32([1, 2, 4, 8, 16])), grid, no_grad="jumps at the edges", tag="density", bad=((POINTS, [3]), ShapeError, "1 bins for points of 2 dims")),
    Case("histogramdd", given(POINTS.reshape(5, 1, 2), EDGES), grid, no_grad="jumps at the edges", tag="edges", bad=((POINTS, 0), ShapeError, "bins=0")),
    Case("histogramdd", given(np.float32([[1, 2], [1, 2]]), 2), grid, no_grad="jumps at the edges", tag="equal", bad=((POINTS, 2, [0.0, 1.0]), ShapeError, "2 ranges for 2 dims")),
    Case("histogram", floats(5), lambda x, n: np.histogram(x, n)[0], no_grad=COUNTS, bad=((np.ones(2), 0), ShapeError, "bins=0")),
    Case("histogram", given(np.float32([-5, -1, 0, 0.5, 1, 7]), 4, -1, 1), counts, no_grad=COUNTS, tag="edges", bad=((np.ones(2), 4, 2, 1), ShapeError, "min=2, max=1")),
    Case("histogram", given(np.array([3, 3, 3]), 4), lambda x, n: np.array([0, 0, 3, 0]), no_grad=COUNTS, tag="equal"),
    Case("histogram", lambda rng: (*floats(shape=(8,))(rng), 4, -2, 2, np.arange(8, dtype="float32"), True), counts, no_grad="jumps at the edges", tag="density",
         bad=((np.ones(2), 4, 0, 1, np.ones(3)), ShapeError, r"weight has shape \[3\], input \[2\]")),
    Case("histogram_bin_edges", floats(5), np.histogram_bin_edges, bad=((np.ones(2), -1), ShapeError, "bins=-1")),
    Case("histogram_bin_edges", given(np.array([1, 2]), 4, 0, 8), lambda x, n, a, b: np.float32([0, 2, 4, 6, 8]), no_grad="integers", tag="given"),
    Case("bincount", given(VALUES), np.bincount, no_grad=COUNTS, host="the result's length is the largest value", bad=((np.array([-1, 2]),), ShapeError, "integers >= 0, got -1")),
    Case("bincount", given(VALUES, SUMS, 6), np.bincount, tag="weights", host="the result's length is the largest value", bad=((VALUES, np.ones(2)), ShapeError, r"weights has shape \[2\]")),
    Case("bincount", given(VALUES), lambda x, length: np.bincount(x)[:length], kwargs={"length": 3}, no_grad=COUNTS, tag="length", bad=((np.ones(3),), ShapeError, "vector of integers, got float64")),
    Case("bincount", given(VALUES[:0], None, 2), lambda x, w, n: np.zeros(2, "int64"), no_grad=COUNTS, tag="empty", host="the result's length is the largest value", bad=((VALUES, None, -1), ShapeError, "minlength=-1")),
    Case("cov", floats(), np.cov, terms=24, bad=CUBE),
    Case("cov", lambda rng: (*floats()(rng), False, False), lambda x, r, d: np.cov(x, rowvar=r, ddof=0), terms=24, tag="columns",
         bad=((np.ones((2, 2)), True, True, np.ones(2)), DTypeError, "fweights are counts, got float64")),
    Case("cov", lambda rng: (*floats()(rng), True, True, np.arange(1, 9), rng.uniform(0.5, 1, 8).astype("float32")), lambda x, r, d, f, a: np.cov(x, ddof=1, fweights=f, aweights=a), terms=48, tag="weights", bad=((np.ones((3, 8)), False, True, np.arange(8)), ShapeError, r"fweights \[8\]; needs \[3\]")),
    Case("cov", floats(shape=(6,)), np.cov, terms=24, tag="vector"),
    Case("corrcoef", floats(), np.corrcoef, terms=48, bad=CUBE),
    Case("corrcoef", floats(False, shape=(8, 3)), lambda x, r: np.corrcoef(x, rowvar=r), terms=48, tag="columns"),
]  # fmt: skip
