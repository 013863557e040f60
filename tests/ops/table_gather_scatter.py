"""Contract rows of ops/gather_scatter.py."""

import numpy as np

from polyreme.errors import DTypeError, ShapeError
from tests.ops.contract import Case


def cube(rng, shape=(4, 3)):
    return rng.uniform(-2, 2, shape).astype("float32")


def of(shape, *rest):
    return lambda rng: (cube(rng, shape), *rest)


def at(*values):
    return np.array(values)


X = np.ones((2, 3), "float32")
HOST = "the number of elements found is the shape"

CASES = [
    Case("gather", of((4, 3), at(2, 0, 2, -1)), lambda x, i: x[i], bad=((X, at(0.5)), DTypeError, "needs int32")),
    Case("gather", of((4, 3), at([1], [0]), 1), lambda x, i, a: x[:, i[:, 0]], tag="column", bad=((X, at([0, 1])), ShapeError, "must be")),
    Case("gather", of((4, 3), np.array(1)), lambda x, i: x[1], tag="0d"),
    Case("nonzero", lambda rng: (rng.integers(0, 2, (3, 4)),), np.argwhere, no_grad="integers", host=HOST),
    Case("nonzero", lambda rng: (rng.integers(0, 2, (3, 4)), True), lambda x, t: np.nonzero(x), no_grad="integers", host=HOST, tag="tuple"),
    Case(
        "where",
        lambda rng: (rng.integers(0, 2, (4, 3)).astype(bool), cube(rng), cube(rng, (3,))),
        np.where,
        bad=((X > 0, X), ShapeError, "only one was given"),
    ),
    Case("where", lambda rng: (rng.integers(0, 2, (4, 3)).astype(bool), cube(rng), 0), np.where, tag="scalar"),
    Case("where", lambda rng: (rng.integers(0, 2, (3, 4)).astype(bool),), np.nonzero, no_grad="integers", host=HOST, tag="alone"),
    Case(
        "where_",
        lambda rng: (rng.integers(0, 2, (4, 3)).astype(bool), cube(rng), cube(rng)),
        np.where,
        no_grad="in place on a leaf: where is tested",
    ),
]  # fmt: skip
