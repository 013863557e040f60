"""Contract rows of ops/quantile.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def floats(*args, shape=(3, 4)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def given(*args):
    return lambda rng: args


def lower(x, axis, keepdim, mode):
    """The lower middle element and its index."""
    order = np.argsort(x, axis)
    index = np.take(order, [(x.shape[axis] - 1) // 2], axis)
    values = np.take_along_axis(x, index, axis)
    return (values, index) if keepdim else (values.squeeze(axis), index.squeeze(axis))


BAD_AXIS = ((np.ones((2, 3), "float32"), 5), ShapeError, r"axis 5 of a Tensor of shape \[2, 3\]")
BAD_SHARE = ((np.ones(3, "float32"), 0.5, 5), ShapeError, "axis 5")
HOLES = np.float32([[1, np.nan, 3, 7], [np.nan, np.nan, 5, np.nan]])
ROWS = {"median": np.median, "nanmedian": np.nanmedian}
QUANTILES = {"quantile": np.quantile, "nanquantile": np.nanquantile}
METHODS = ("lower", "higher", "nearest", "midpoint")

CASES = [
    *(Case(n, floats(), f, bad=BAD_AXIS) for n, f in ROWS.items()),
    *(Case(n, floats(1, True), lambda x, a, k, f=f: f(x, a, keepdims=k), tag="axis", bad=((np.ones(2), None, False, "max"), ShapeError, "mode='max'")) for n, f in ROWS.items()),
    *(Case(n, floats([0, 2], shape=(3, 2, 5)), lambda x, a, f=f: f(x, tuple(a)), tag="both", bad=((np.ones((2, 0)), 1, False, "min"), ShapeError, "no elements")) for n, f in ROWS.items()),
    *(Case(n, floats(axis, keepdim, "min"), lower, tag=f"min{axis}") for n in ROWS for axis, keepdim in ((0, False), (1, True))),
    Case("median", floats(None, False, "min"), lambda x, *_: np.sort(x.ravel())[5], tag="min-all"),
    Case("median", given(np.array([[1, 4, 2], [7, 5, 9]]), 1), lambda x, a: np.float32([2, 7]), no_grad="integers", tag="int"),
    Case("median", given(HOLES, 1), np.median, no_grad="not finite", tag="nan"),
    Case("nanmedian", given(HOLES, 1), np.nanmedian, no_grad="not finite", tag="nan"),
    Case("nanmedian", given(HOLES, 0), lambda x, a: np.float32([1, np.nan, 4, 7]), no_grad="not finite", tag="all-nan"),
    *(Case(n, given(np.ones((2, 0), "float32"), 1), lambda x, a: np.full(2, np.nan), no_grad="no elements", tag="empty") for n in ROWS),
    *(Case(n, given(np.ones((2, 0), "float32"), [0.3, 0.5], 1), lambda x, q, a: np.full((2, 2), np.nan), no_grad="no elements", tag="empty") for n in QUANTILES),
    *(Case(n, given(np.full((), 2, "float32"), 0.3, None, True), lambda x, *_: x, tag="0d") for n in QUANTILES),
    *(Case(n, floats(0.3), f, bad=BAD_SHARE) for n, f in QUANTILES.items()),
    *(Case(n, floats([0.25, 0.9], 1, True), lambda x, q, a, k, f=f: f(x, q, a, keepdims=k), tag="several", bad=((np.ones(3), [0.5, 1.5]), ShapeError, "q=1.5")) for n, f in QUANTILES.items()),
    *(Case(n, floats(0.4, [0, 1], False, m), lambda x, q, a, k, m, f=f: f(x, q, tuple(a), method=m), tag=m) for n, f in QUANTILES.items() for m in METHODS),
    # places 5.5 and 2.75 of 12; 1 and 0.5 of the three that are numbers
    *(Case(n, floats([0.5, 0.25], None, False, "nearest"), lambda x, q, a, k, m, f=f: f(x, q, method=m), tag="ties") for n, f in QUANTILES.items()),
    Case("nanquantile", given(HOLES[:1].T, [0.5, 0.25], 0, False, "nearest"), lambda x, *_: np.float32([[3], [1]]), no_grad="not finite", tag="nan-nearest"),
    Case("quantile", given(HOLES, 0.5, 1, False, "nearest"), lambda x, *_: np.full(2, np.nan), no_grad="not finite", tag="nan-nearest"),
    Case("quantile", given(np.array([1, 2, 4]), 0.25), lambda x, q: np.quantile(x, q).astype("float32"), no_grad="integers", tag="int",
         bad=((np.ones(3), 0.5, None, False, "cubic"), ShapeError, "interpolation='cubic'")),
    Case("quantile", given(HOLES, 0.5, 1), np.quantile, no_grad="not finite", tag="nan"),
    Case("nanquantile", given(HOLES, 0.3, 1), np.nanquantile, no_grad="not finite", tag="nan"),
]  # fmt: skip
