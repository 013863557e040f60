"""Contract rows of ops/arithmetic.py and ops/indices/subscripts.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def pair(rng, low=-2.0, high=2.0):
    return rng.uniform(low, high, (3, 4)).astype("float32"), rng.uniform(low, high, (4,)).astype("float32")


def positive(rng):
    return pair(rng, 0.5, 2.0)


def integers(rng):
    return rng.integers(-9, 9, (3, 4)), rng.integers(1, 5, (4,))


def bools(rng):
    return rng.integers(0, 2, (3, 4)).astype(bool), rng.integers(0, 2, (4,)).astype(bool)


MISMATCH = ((np.ones((2, 3), "float32"), np.ones((2, 4), "float32")), ShapeError, r"\[2, 3\].*\[2, 4\]")
COMPARISONS = ("equal", "not_equal", "less_than", "less_equal", "greater_than", "greater_equal")
NUMPY_NAMES = {"less_than": "less", "greater_than": "greater"}

CASES = [
    Case("add", pair, lambda x, y: x + y, bad=MISMATCH),
    Case("add", pair, lambda x, y, alpha: x + alpha * y, kwargs={"alpha": 3}, tag="alpha"),
    Case("subtract", pair, lambda x, y: x - y, bad=MISMATCH),
    Case("multiply", pair, lambda x, y: x * y, bad=MISMATCH),
    Case("divide", positive, lambda x, y: x / y, bad=MISMATCH),
    Case("divide", integers, lambda x, y, rounding_mode: np.trunc(x / y).astype("int64"), kwargs={"rounding_mode": "trunc"}, no_grad="integers", tag="trunc"),
    Case("divide", integers, lambda x, y: (x / y).astype("float32"), no_grad="integers", tag="int"),
    Case("floor_divide", integers, lambda x, y: x // y, no_grad="integers", bad=MISMATCH),
    Case("remainder", integers, lambda x, y: x % y, no_grad="integers", bad=MISMATCH),
    Case("pow", positive, lambda x, y: x**y, bad=MISMATCH),
    Case("pow", lambda rng: (np.complex64([0, 0, 0, 1 + 1j]), np.complex64([2 + 1j, 0.5 + 2j, 2, 1 + 2j])), lambda x, y: x**y, no_grad="none at 0", tag="complex zero"),
    Case("neg", lambda rng: pair(rng)[:1], lambda x: -x),
    Case("matmul", lambda rng: (np.ones((2, 3, 0), "float32"), np.ones((0, 5), "float32")), np.matmul, no_grad="no elements", tag="nothing-summed"),
    Case(
        "matmul",
        lambda rng: (rng.standard_normal((2, 3, 4)).astype("float32"), rng.standard_normal((4, 5)).astype("float32")),
        lambda x, y: x @ y,
        bad=((np.ones((2, 3), "float32"), np.ones((4, 5), "float32")), ShapeError, "matmul"),
    ),
    Case(
        "matmul",
        lambda rng: (rng.standard_normal((2, 4, 3)).astype("float32"), rng.standard_normal((2, 5, 4)).astype("float32"), True, True),
        lambda x, y, a, b: x.swapaxes(1, 2) @ y.swapaxes(1, 2),
        tag="transposed",
    ),
    *(Case(n, integers, getattr(np, NUMPY_NAMES.get(n, n)), no_grad="bool result", bad=MISMATCH) for n in COMPARISONS),
    *(Case(f"logical_{n}", bools, getattr(np, f"logical_{n}"), no_grad="bool result", bad=MISMATCH) for n in ("and", "or", "xor")),
    Case("logical_not", lambda rng: bools(rng)[:1], np.logical_not, no_grad="bool result"),
    *(Case(f"bitwise_{n}", integers, getattr(np, f"bitwise_{n}"), no_grad="integers", bad=MISMATCH) for n in ("and", "or", "xor")),
    Case("bitwise_not", lambda rng: integers(rng)[:1], np.bitwise_not, no_grad="integers"),
    Case("cast", lambda rng: (*pair(rng)[:1], "float64"), lambda x, d: x.astype(d)),
    Case("cast", lambda rng: (*pair(rng)[:1], "int32"), lambda x, d: x.astype(d), no_grad="integers", tag="int"),
    Case("getitem", lambda rng: (pair(rng)[0], [np.array([2, 0])], (("array",), ("slice", 1, None, 2))), lambda x, a, s: x[a[0], 1::2]),
    Case(
        "setitem",
        lambda rng: (*pair(rng), [np.array(1)], (("int",), ("all",))),
        lambda x, v, a, s: np.concatenate([x[:1], v[None], x[2:]]),
    ),
    Case(
        "setitem_where",
        lambda rng: (pair(rng)[0], np.float32(7).reshape(()), rng.integers(0, 2, 3).astype(bool)),
        lambda x, v, m: np.where(m[:, None], v, x),
    ),
]  # fmt: skip
