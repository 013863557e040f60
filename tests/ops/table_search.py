"""Contract rows of ops/search.py."""

import numpy as np

from polyreme.errors import DTypeError, ShapeError
from tests.ops.contract import Case


def cube(rng, shape=(3, 4)):
    """Values that differ by at least 0.1, so that a finite difference does not change their order."""
    count = int(np.prod(shape))
    return (rng.permutation(count) * 0.1 - 0.5).reshape(shape).astype("float32")


def of(shape, *rest):
    return lambda rng: (cube(rng, shape), *rest)


def ints(low, high, shape, *rest, dtype="int64"):
    return lambda rng: (rng.integers(low, high, shape).astype(dtype), *rest)


def best(x, k, axis, largest):
    """What topk gives, by a stable NumPy sort."""
    at = np.argsort(-x if largest else x, axis, kind="stable").take(range(k), axis)
    return np.take_along_axis(x, at, axis), at


X = np.ones((2, 3), "float32")
INTS = "integer result"

CASES = [
    Case("argmax", of((3, 4)), lambda x: np.int64(x.argmax()), no_grad=INTS, bad=((X, None, False, "float32"), DTypeError, "int32 or int64")),
    Case("argmax", ints(0, 3, (3, 4), 1), lambda x, a: x.argmax(1), no_grad=INTS, tag="ties", bad=((X, 2), ShapeError, "axis=2")),
    Case("argmax", of((3, 4), None, True), lambda x, a, k: np.reshape(x.argmax(), (1, 1)), no_grad=INTS, tag="keepdim"),
    Case("argmax", of((), 0), lambda x, a: np.int64(0), no_grad=INTS, tag="0d"),
    Case("argmin", of((3, 4), -2, True, "int32"), lambda x, a, k, d: x.argmin(0, keepdims=True), no_grad=INTS, bad=((X, -3), ShapeError, "axis=-3")),
    Case("topk", of((3, 5), 2), lambda x, k: best(x, 2, 1, True), bad=((X, 4), ShapeError, "give k from 1 to 3")),
    Case("topk", of((3, 5), 2, 0, False), lambda x, k, a, m: best(x, 2, 0, False), tag="smallest"),
    Case("topk", ints(-3, 3, (3, 5), 3, 1, False), lambda x, k, a, m: best(x, 3, 1, False), no_grad="integers", tag="int"),
    Case("topk", of((), 1), lambda x, k: (x, np.int64(0)), tag="0d"),
]  # fmt: skip
