"""Contract rows of ops/reduce.py."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def floats(*args, shape=(3, 4)):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def small(*args):
    return lambda rng: (rng.integers(-9, 9, (3, 4)).astype("int32"), *args)


def bits(*args):
    return lambda rng: (rng.integers(0, 2, (3, 4)), *args)


def given(*args):
    return lambda rng: args


def over_dims(name, ref, make=floats, terms=12, **more):
    """Rows over all dims, one dim kept, and two dims; ref(x, axis=, keepdims=)."""
    return [
        Case(name, make(axis, keepdim), lambda x, a, k, *_: ref(x, axis=a, keepdims=k), tag=tag, bad=bad, terms=terms, **more)
        for axis, keepdim, tag, bad in ((None, False, "all", BAD_AXIS), (1, True, "axis", TWICE), ((0, -1), False, "both", None))
    ]  # fmt: skip


def with_dtype(fn):
    return lambda x, axis, dtype, keepdim: fn(x, axis=axis, keepdims=keepdim)


BAD_AXIS = ((np.ones((2, 3), "float32"), 5), ShapeError, r"axis 5 of a Tensor of shape \[2, 3\]")
TWICE = ((np.ones((2, 3), "float32"), [0, -2]), ShapeError, "twice")
SHARES = np.float32([[1.5, 2.0], [3.9, 100.0]])
HOLES = np.float32([[1, np.nan, 3], [np.nan, np.nan, 5]])
ALL_NAN = np.float32([[1, np.nan], [np.nan, np.nan]])
SUMS = (("sum", np.sum), ("nansum", np.nansum))

CASES = [
    Case("reduce_as", lambda rng: tuple(rng.standard_normal(s).astype("float32") for s in ((2, 3, 4), (3, 1))), lambda x, t: x.sum((0, 2))[:, None], bad=((np.ones((2, 3)), np.ones(2)), ShapeError, r"target \[2\] does not broadcast to x \[2, 3\]")),
    Case("reduce_as", lambda rng: (rng.integers(0, 2, (3, 4)) > 0, np.zeros((), "float32")), lambda x, t: x.sum(), no_grad="bool", tag="bool"),
    Case("reduce_as", given(np.ones((0, 3), "float32"), np.ones((1, 3), "float32")), lambda x, t: np.zeros((1, 3), "float32"), no_grad="no elements", tag="none"),
    *(Case(n, floats(1), lambda x, axis, f=f: f(x, axis), tag="axis", bad=BAD_AXIS) for n, f in SUMS),
    *(Case(n, floats(), f, terms=12, bad=TWICE) for n, f in SUMS),
    *(Case(n, floats([0, 1], None, True), with_dtype(lambda x, axis, f=f, **k: f(x, axis=tuple(axis), **k)), terms=12, tag="keepdim") for n, f in SUMS),
    *(Case(n, small(0), lambda x, axis, f=f: f(x, axis, dtype="int64"), no_grad="integers", tag="int") for n, f in SUMS),
    Case("sum", floats(0, shape=()), lambda x, axis: x, tag="0d"),
    Case("sum", floats([]), lambda x, axis: x.sum(), terms=12, tag="empty-axis"),
    Case("sum", small(0, "float64"), lambda x, axis, d: x.sum(axis, dtype=d), no_grad="integers", tag="dtype"),
    *(Case(name, given(SHARES, None, *more), lambda x, *_, f=f, dtype: f(x.astype("int8"), dtype=dtype), kwargs={"dtype": "int8"}, no_grad="integers", tag="int8")
      for name, f, more in (("sum", np.sum, ()), ("nansum", np.sum, ()), ("prod", np.prod, ()))),
    Case("sum", given(SHARES, None, "bool"), lambda x, *_: np.bool_(True), no_grad="bool", tag="bool"),
    Case("nansum", given(HOLES, 0), np.nansum, no_grad="not finite", tag="nan"),
    *over_dims("mean", np.mean),
    Case("mean", small(-1), lambda x, axis: x.mean(-1).astype("float32"), no_grad="integers", tag="int"),
    *over_dims("nanmean", np.nanmean),
    Case("nanmean", given(HOLES, 1), np.nanmean, no_grad="not finite", tag="nan"),
    Case("nanmean", given(ALL_NAN, 1), lambda x, a: np.float32([1, np.nan]), no_grad="not finite", tag="all-nan"),
    *over_dims("prod", np.prod, terms=24),
    Case("prod", given(np.float32([[2, 0, 3], [0, 0, 1]]), 1), np.prod, tag="zero"),
    Case("prod", small(0, False, "float64"), lambda x, axis, k, d: x.prod(axis, dtype=d), no_grad="integers", tag="dtype"),
    *(row for name in ("max", "min", "amax", "amin") for row in over_dims(name, getattr(np, name))),
    *(Case(name, small(0), getattr(np, name), no_grad="integers", tag="int") for name in ("max", "min", "amax", "amin")),
    Case("max", given(HOLES, 0), np.max, no_grad="not finite", tag="nan"),
    *(row for name in ("all", "any") for row in over_dims(name, getattr(np, name), bits, no_grad="bool result")),
    *over_dims("count_nonzero", np.count_nonzero, bits, no_grad="integers"),
    *over_dims("logsumexp", sp.logsumexp),
    Case("logsumexp", given(np.float32([1000, 1000])), lambda x: np.float32(1000 + np.log(2)), tag="large"),
    Case("logsumexp", given(np.array([1, 2])), lambda x: sp.logsumexp(x).astype("float32"), no_grad="integers", tag="int"),
    *(Case("var", floats(a, u, k), lambda x, a, u, k, correction: np.var(x, a, ddof=correction if u is None else u, keepdims=k), kwargs={"correction": c}, tag=tag, bad=b, terms=24)
      for a, u, k, c, tag, b in ((None, None, False, 1, "all", BAD_AXIS), (1, False, True, 1, "biased", TWICE), ((0, 1), None, False, 0, "correction", None), (0, None, False, 1.5, "real", None))),
    *(Case("std", floats(a, u, k), lambda x, a, u, k: np.std(x, a, ddof=int(u), keepdims=k), tag=tag, bad=b, terms=24)
      for a, u, k, tag, b in ((None, True, False, "all", BAD_AXIS), (1, False, True, "biased", TWICE))),
    Case("std", small(0), lambda x, a: np.std(x, a, ddof=1).astype("float32"), no_grad="integers", tag="int"),
]  # fmt: skip
