"""Contract rows of ops/scan.py."""

import numpy as np
from scipy.integrate import cumulative_trapezoid

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def floats(*args, shape=(3, 4)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def given(*args):
    return lambda rng: args


def running(accumulate, better):
    """(values, indices) along axis 1, of equal elements the last."""

    def ref(x, axis):
        values = accumulate(x, axis)
        index = np.zeros(x.shape, "int64")
        for row in range(x.shape[0]):
            for at in range(1, x.shape[1]):
                index[row, at] = at if better(x[row, at], values[row, at - 1]) else index[row, at - 1]
        return values, index

    return ref


def ramp(rng):
    return np.cumsum(rng.uniform(0.5, 1.5, 4)).astype("float32")


BAD_AXIS = ((np.ones((2, 3), "float32"), 5), ShapeError, r"axis 5 of a Tensor of shape \[2, 3\]")
TIES = np.array([[1, 3, 3, 2, 5], [4, 4, 1, 0, 0]])
NAN = np.float32([2, np.nan, 5, 7])

CASES = [
    Case("cumsum", floats(), lambda x: np.cumsum(x), terms=12, bad=BAD_AXIS),
    Case("cumsum", floats(0), np.cumsum, tag="axis"),
    Case("cumsum", lambda rng: (rng.integers(0, 9, (3, 4)).astype("int32"), 1, "float64"), lambda x, a, d: np.cumsum(x, a).astype(d), no_grad="integers", tag="dtype"),
    Case("cumsum", floats(0, shape=()), lambda x, a: x, tag="0d", bad=((np.array(1.0), 1), ShapeError, "axis 1 of a 0-D Tensor")),
    Case("cumsum", floats(shape=()), np.cumsum, tag="0d-flat"),
    Case("cumprod", floats(1), np.cumprod, bad=BAD_AXIS),
    Case("cumprod", given(np.float32([2, 0, 3, 4])), np.cumprod, tag="zero"),
    Case("logcumsumexp", floats(1), np.logaddexp.accumulate, bad=BAD_AXIS),
    Case("logcumsumexp", given(np.float32([1000, 1001])), lambda x: np.logaddexp.accumulate(x.astype("float64")), terms=16, tag="large"),
    Case("logcumsumexp", given(np.complex64([1 + 9j, 0.5 - 20j, -1 + 4j])), lambda x: np.log(np.cumsum(np.exp(x.astype("complex128")))), tag="complex"),
    Case("cummax", floats(1), running(np.maximum.accumulate, np.greater_equal), bad=BAD_AXIS),
    Case("cummin", floats(1), running(np.minimum.accumulate, np.less_equal), bad=BAD_AXIS),
    Case("cummax", given(TIES, 1), running(np.maximum.accumulate, np.greater_equal), no_grad="integers", tag="ties"),
    Case("cummin", given(TIES, 1), running(np.minimum.accumulate, np.less_equal), no_grad="integers", tag="ties"),
    Case("cummax", given(NAN), lambda x: (np.float32([2, np.nan, np.nan, np.nan]), np.array([0, 1, 1, 1])), no_grad="not finite", tag="nan"),
    Case("cummin", given(NAN, 0, "int32"), lambda x, *_: (np.float32([2, np.nan, np.nan, np.nan]), np.array([0, 1, 1, 1])), no_grad="not finite", tag="nan"),
    Case("diff", floats(), np.diff, bad=((np.array(1.0),), ShapeError, "0-D")),
    Case("diff", floats(2, 0), np.diff, tag="twice", bad=((np.ones(3), 0), ShapeError, "n=0")),
    Case("diff", lambda rng: (*floats()(rng), 1, 0, *floats(shape=(1, 4))(rng), *floats(shape=(2, 4))(rng)), np.diff, tag="joined"),
    Case("diff", given(np.array([True, False, False])), np.diff, no_grad="bool result", tag="bool"),
    Case("trapezoid", floats(), np.trapezoid, bad=((np.ones(3), np.ones(3), 1.0), ShapeError, r"both x and dx=1.0")),
    Case("trapezoid", lambda rng: (*floats()(rng), ramp(rng)), np.trapezoid, tag="x", bad=((np.ones(3), np.ones(2)), ShapeError, "x has 2 samples")),
    Case("trapezoid", floats(None, 0.5, 0), np.trapezoid, tag="dx"),
    Case("cumulative_trapezoid", lambda rng: (*floats()(rng), ramp(rng)), lambda y, x: cumulative_trapezoid(y, x), bad=((np.array(1.0),), ShapeError, "0-D")),
    Case("cumulative_trapezoid", floats(None, 0.5, 0), lambda y, x, dx, a: cumulative_trapezoid(y, None, dx, a), tag="dx"),
]  # fmt: skip
