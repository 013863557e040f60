"""Contract rows of ops/reduce.py."""

import numpy as np

from polyreme.errors import ShapeError
from tests.ops.contract import Case


def floats(*args, shape=(3, 4)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def small(*args):
    return lambda rng: (rng.integers(-9, 9, (3, 4)).astype("int32"), *args)


BAD_AXIS = ((np.ones((2, 3), "float32"), 5), ShapeError, r"axis 5 of a Tensor of shape \[2, 3\]")
TWICE = ((np.ones((2, 3), "float32"), [0, -2]), ShapeError, "twice")

CASES = [
    Case("sum", floats(1), lambda x, axis: x.sum(axis), tag="axis", bad=BAD_AXIS),
    Case("sum", floats(), np.sum, terms=12, bad=TWICE),
    Case("sum", floats([0, 1], None, True), lambda x, axis, d, k: x.sum(keepdims=True), terms=12, tag="keepdim"),
    Case("sum", small(0), lambda x, axis: x.sum(axis, dtype="int64"), no_grad="integers", tag="int"),
    Case("mean", floats(), np.mean, terms=12, bad=BAD_AXIS),
    Case("mean", floats([0], True), lambda x, axis, k: x.mean(0, keepdims=True), tag="keepdim"),
    Case("mean", small(-1), lambda x, axis: x.mean(-1).astype("float32"), no_grad="integers", tag="int"),
    *(
        Case(name, floats(axis, keepdim), lambda x, a, k, name=name: getattr(np, name)(x, axis=a, keepdims=k), tag=tag, bad=BAD_AXIS)
        for name in ("max", "min")
        for axis, keepdim, tag in ((None, False, "all"), (1, True, "axis"), ((0, 1), False, "both"))
    ),
    *(Case(name, small(0), getattr(np, name), no_grad="integers", tag="int") for name in ("max", "min")),
]  # fmt: skip
