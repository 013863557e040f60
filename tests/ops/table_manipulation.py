"""Contract rows of ops/manipulation.py."""

import numpy as np

from polyreme.errors import ShapeError
from tests.ops.contract import Case


def cube(rng, shape=(2, 3, 4)):
    return rng.uniform(-2, 2, shape).astype("float32")


def of(shape, *rest):
    """A make that gives one random Tensor of the shape and the attributes after it."""
    return lambda rng: (cube(rng, shape), *rest)


def lists(*shapes, rest=()):
    """A make that gives a list of random Tensors and the attributes after it."""
    return lambda rng: ([cube(rng, s) for s in shapes], *rest)


def bad(match, *arguments, error=ShapeError):
    return (arguments, error, match)


X = np.ones((2, 3), "float32")

CASES = [
    Case("reshape", of((2, 3, 4), [0, -1]), lambda x, s: x.reshape(2, 12), bad=bad("6 elements", X, [4, 2])),
    Case("reshape", of((2, 3), [3, 2]), lambda x, s: x.reshape(3, 2), tag="plain", bad=bad("more than one -1", X, [-1, -1])),
    Case("reshape", of((), [1, 1]), lambda x, s: x.reshape(1, 1), tag="0d", bad=bad("copies a dim", X, [2, 3, 0])),
    Case("transpose", of((2, 3, 4), [2, 0, -2]), lambda x, p: x.transpose(2, 0, 1), bad=bad("must name all 2", X, [0])),
    Case("transpose", of((2, 3), [1, 0]), lambda x, p: x.T, tag="2d", bad=bad("names a dim twice", X, [0, 0])),
    Case("t", of((2, 3)), lambda x: x.T, bad=bad("at most 2 dims", np.ones((1, 2, 3)))),
    Case("t", of((3,)), lambda x: x, tag="1d"),
    Case("squeeze", of((1, 3, 1)), np.squeeze, bad=bad("axis=2 of a Tensor with 2 dims", X, 2)),
    Case("squeeze", of((1, 3, 1), [0, 1]), lambda x, a: x[0], tag="axis"),
    Case("unsqueeze", of((2, 3), [2, 0]), lambda x, a: x[None, :, :, None], bad=bad("axis=4", X, 4)),
    Case("unsqueeze", of((), -1), lambda x, a: x.reshape(1), tag="0d"),
    Case("flatten", of((2, 3, 4), 1), lambda x, a: x.reshape(2, 12), bad=bad("comes after", X, 1, 0)),
    Case("flatten", of(()), lambda x: x.reshape(1), tag="0d", bad=bad("axis=3", X, 3)),
    Case("concat", lists((2, 3), (1, 3)), lambda x: np.concatenate(x), bad=bad("concat", [X, np.ones((2, 4), "float32")])),
    Case("concat", lists((2, 3), (2, 1), rest=(-1,)), lambda x, a: np.concatenate(x, 1), tag="last", bad=bad("1 dim or more", [X.sum()])),
    Case("stack", lists((2, 3), (2, 3), rest=(1,)), lambda x, a: np.stack(x, 1), bad=bad("stack", [X, np.ones((2, 4), "float32")])),
    Case("stack", lists((), ()), lambda x: np.stack(x), tag="0d", bad=bad("at least one", [])),
    Case("split", of((6, 2), 3), lambda x, n: np.split(x, 3), bad=bad("2 equal parts do not fill", X, 2, 1)),
    Case("split", of((2, 6), [1, -1, 2], 1), lambda x, n, a: np.split(x, [1, 4], 1), tag="sizes", bad=bad("do not fill dim 1", X, [1, 1], 1)),
]  # fmt: skip
