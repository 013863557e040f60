"""Contract rows of ops/search.py and ops/unique.py."""

import numpy as np
import scipy.stats

from polyreme.conformance.case import Case
from polyreme.errors import DTypeError, ShapeError


def cube(rng, shape=(3, 4)):
    """Values that differ by at least 0.1, so that a finite difference does not change their order."""
    count = int(np.prod(shape))
    return (rng.permutation(count) * 0.1 - 0.5).reshape(shape).astype("float32")


def of(shape, *rest):
    return lambda rng: (cube(rng, shape), *rest)


def integers(low, high, shape, *rest, dtype="int64"):
    return lambda rng: (rng.integers(low, high, shape).astype(dtype), *rest)


def fixed(*arguments):
    return lambda rng: arguments


def floats(*values):
    return np.array(values, "float32")


def best(x, k, axis, largest):
    """What topk gives, by a stable NumPy sort."""
    at = np.argsort(-x if largest else x, axis, kind="stable").take(range(k), axis)
    return np.take_along_axis(x, at, axis), at


def kth(x, k, axis=-1, keepdim=False):
    at = np.argsort(x, axis, kind="stable").take([k - 1], axis)
    value = np.take_along_axis(x, at, axis)
    return (value, at) if keepdim else (value.squeeze(axis), at.squeeze(axis))


def most_frequent(x, axis=-1, keepdim=False):
    value = scipy.stats.mode(x, axis, keepdims=True).mode
    last = x.shape[axis] - 1 - np.flip(x == value, axis).argmax(axis, keepdims=True)
    return (value, last) if keepdim else (value.squeeze(axis), last.squeeze(axis))


X = np.ones((2, 3), "float32")
INTS, BOOL = "integer result", "bool result"
NAN = floats(3, np.nan, 1, 2, -np.inf)
SORTED = floats(1, 3, 3, 5, 7)
ROWS = np.sort(np.random.default_rng(0).uniform(0, 9, (2, 3, 5)).astype("float32"), -1)
PLACES = np.random.default_rng(1).uniform(-1, 10, (2, 3, 4)).astype("float32")


def rows_searched(s, v, *_):
    found = [np.searchsorted(a, b) for a, b in zip(s.reshape(-1, 5), v.reshape(-1, 4), strict=True)]
    return np.reshape(found, v.shape)


SORTS = [
    Case("argmax", of((3, 4)), lambda x: np.int64(x.argmax()), no_grad=INTS, bad=((X, None, False, "float32"), DTypeError, "int32 or int64")),
    Case("argmax", integers(0, 3, (3, 4), 1), lambda x, a: x.argmax(1), no_grad=INTS, tag="ties", bad=((X, 2), ShapeError, "axis=2")),
    Case("argmax", of((3, 4), None, True), lambda x, a, k: np.reshape(x.argmax(), (1, 1)), no_grad=INTS, tag="keepdim"),
    Case("argmax", of((), 0), lambda x, a: np.int64(0), no_grad=INTS, tag="0d"),
    Case("argmin", of((3, 4), -2, True, "int32"), lambda x, a, k, d: x.argmin(0, keepdims=True), no_grad=INTS, bad=((X, -3), ShapeError, "axis=-3")),
    Case("topk", of((3, 5), 2), lambda x, k: best(x, 2, 1, True), bad=((X, 4), ShapeError, "give k from 1 to 3")),
    Case("topk", of((3, 5), 2, 0, False), lambda x, k, a, m: best(x, 2, 0, False), tag="smallest"),
    Case("topk", integers(-3, 3, (3, 5), 3, 1, False), lambda x, k, a, m: best(x, 3, 1, False), no_grad="integers", tag="int"),
    Case("topk", fixed(NAN, 3, -1, False), lambda *_: (floats(-np.inf, 1, 2), np.array([4, 2, 3])), no_grad="NaN", tag="nan"),
    Case("topk", of((), 1), lambda x, k: (x, np.int64(0)), tag="0d"),
    Case("sort", of((3, 4)), np.sort, bad=((X, 2), ShapeError, "axis=2")),
    Case("sort", of((3, 4), 0, True), lambda x, a, d: -np.sort(-x, 0), tag="descending"),
    Case("sort", fixed(NAN), np.sort, no_grad="NaN", tag="nan"),
    Case("sort", of(()), lambda x: x, tag="0d"),
    Case("msort", of((3, 4)), lambda x: np.sort(x, 0)),
    Case("argsort", integers(0, 3, (3, 6)), lambda x: np.argsort(x, kind="stable"), no_grad=INTS, bad=((X, -3), ShapeError, "axis=-3")),
    Case("argsort", integers(0, 3, (6, 2), 0, True), lambda x, *_: np.argsort(-x, 0, kind="stable"), no_grad=INTS, tag="descending"),
    Case("argsort", of(()), lambda x: np.int64(0), no_grad=INTS, tag="0d"),
    Case("kthvalue", of((3, 4), 2), kth, bad=((X, 0), ShapeError, "give k from 1 to 3")),
    Case("kthvalue", of((3, 4), 3, 0, True), kth, tag="keepdim"),
    Case("kthvalue", integers(0, 3, (7,), 4), kth, no_grad=INTS, tag="ties"),
    Case("kthvalue", of((), 1), lambda x, k: (x, np.int64(0)), tag="0d"),
    Case("mode", integers(0, 4, (5, 9)), most_frequent, no_grad="integers", bad=((np.ones((2, 0)),), ShapeError, "is empty")),
    Case("mode", lambda rng: (rng.integers(0, 3, (6, 2)).astype("float32"), 0, True), most_frequent, no_grad="ties move", tag="keepdim"),
    Case("mode", of((3, 4)), most_frequent, tag="distinct"),
    Case("mode", of(()), lambda x: (x, np.int64(0)), tag="0d"),
]  # fmt: skip

PLACED = [
    Case("searchsorted", fixed(SORTED, floats(0, 3, 9, np.nan)), np.searchsorted, no_grad=INTS, bad=((X, SORTED), ShapeError, "one set of")),
    Case("searchsorted", fixed(SORTED, floats(0, 3, 9), True, True), lambda s, v, *_: np.searchsorted(s, v, "right"), no_grad=INTS, tag="right", bad=((SORTED, SORTED, False, True, "left"), ShapeError, "agrees with right")),
    Case("searchsorted", fixed(ROWS, PLACES), rows_searched, no_grad=INTS, tag="rows"),
    Case("searchsorted", fixed(floats(3, 1, 5), floats(3), False, False, None, np.array([1, 0, 2])), lambda s, v, *_: np.array([1]), no_grad=INTS, tag="sorter", bad=((SORTED, SORTED, False, False, None, np.array([0])), ShapeError, "sorter")),
    Case("bucketize", fixed(PLACES, SORTED), lambda x, s: np.searchsorted(s, x), no_grad=INTS, bad=((X, X), ShapeError, "must be 1-D")),
    Case("bucketize", fixed(SORTED, SORTED, True, True), lambda x, s, *_: np.searchsorted(s, x, "right"), no_grad=INTS, tag="right"),
]  # fmt: skip

NEAR = (floats(1, np.inf, np.nan, 2, -np.inf), floats(1.000001, np.inf, np.nan, 2.1, np.inf))
COMPARED = [
    Case("isclose", fixed(*NEAR), np.isclose, no_grad=BOOL, bad=((X, X[0]), ShapeError, "must have one shape")),
    Case("isclose", fixed(*NEAR, 0.1, 0.0, True), lambda x, y, *_: np.isclose(x, y, 0.1, 0.0, True), no_grad=BOOL, tag="nan"),
    Case("allclose", fixed(*NEAR), lambda x, y: np.False_, no_grad=BOOL, bad=((X, X[0]), ShapeError, "must have one shape")),
    Case("allclose", fixed(X, X + 1e-6), lambda x, y: np.True_, no_grad=BOOL, tag="true"),
    Case("equal_all", fixed(X, X), lambda x, y: np.True_, no_grad=BOOL),
    Case("equal_all", fixed(X, X[0]), lambda x, y: np.False_, no_grad=BOOL, tag="shapes"),
    Case("isin", lambda rng: (rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (5,))), np.isin, no_grad=BOOL),
    Case("isin", fixed(NAN, NAN.reshape(5, 1)), lambda x, t: ~np.isnan(x), no_grad=BOOL, tag="nan"),
    Case("isin", fixed(X, np.ones((0,), "float32"), False, True), lambda x, *_: np.ones((2, 3), bool), no_grad=BOOL, tag="empty"),
]  # fmt: skip


def in_a_row(x, inverse=False, counts=False):
    new = np.concatenate([[True], x[1:] != x[:-1]])
    every = (x[new], np.cumsum(new) - 1, np.diff(np.flatnonzero(new), append=len(x)))
    return [a for a, wanted in zip(every, (True, inverse, counts), strict=True) if wanted]


HOST = "the number of elements found is the shape"
TABLE = np.array([[2, 1, 1], [1, 1, 1], [2, 1, 1]])
UNIQUE = [
    Case("unique", lambda rng: (rng.integers(0, 5, (3, 4)).astype("float32"),), np.unique, no_grad="ties move", host=HOST, bad=((X, True, False, False, None, "float32"), DTypeError, "int32 or int64")),
    Case("unique", of((5,), True, True, True), np.unique, host=HOST, tag="all"),
    Case("unique", integers(0, 4, (9,), False, True, False, None, "int32"), lambda x, *_: np.unique(x, return_inverse=True), no_grad="integers", host=HOST, tag="inverse"),
    Case("unique", fixed(TABLE, False, False, True, 0), lambda x, *_: np.unique(x, return_counts=True, axis=0), no_grad="integers", host=HOST, tag="axis", bad=((TABLE, False, False, False, 2), ShapeError, "axis=2")),
    Case("unique", fixed(TABLE, False, False, False, 1), lambda x, *_: np.unique(x, axis=1), no_grad="integers", host=HOST, tag="columns"),
    Case("unique_consecutive", integers(0, 2, (9,), True, True), in_a_row, no_grad="integers", host=HOST, bad=((X, False, False, -3), ShapeError, "axis=-3")),
    Case("unique_consecutive", of((2, 3)), lambda x: x.reshape(-1), host=HOST, tag="distinct"),
    Case("unique_consecutive", fixed(np.array([[2, 1], [2, 1], [1, 1]]), False, True, 0), lambda x, *_: (x[1:], np.array([2, 1])), no_grad="integers", host=HOST, tag="axis"),
    Case("unique_consecutive", fixed(np.array([[2, 2, 1]]), False, False, -1), lambda x, *_: x[:, 1:], no_grad="integers", host=HOST, tag="columns"),
]  # fmt: skip

CASES = [*SORTS, *PLACED, *COMPARED, *UNIQUE]
