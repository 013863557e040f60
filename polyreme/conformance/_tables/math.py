"""Contract rows of ops/math.py."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError


def within(low, high, shape=(3, 4)):
    return lambda rng: (rng.uniform(low, high, shape).astype("float32"),)


def unary(name, ref, low=-2.0, high=2.0, **more):
    return Case(name, within(low, high), ref, **more)


def pair(*args, low=-2.0, high=2.0):
    return lambda rng: (*within(low, high)(rng), *within(low, high, (4,))(rng), *args)


def given(*args):
    return lambda rng: args


def integers(*args):
    return lambda rng: (rng.integers(-30, 30, (3, 4)), rng.integers(1, 12, (4,)), *args)


def returns(value):
    """A check, with no oracle, that the result is this value and dtype."""

    def check(got):
        assert got.dtype == np.asarray(value).dtype
        np.testing.assert_array_equal(got, value)

    return check


INT = "integers"
LOWEST = np.int32([-(2**31)] * 3)
BOOL = "bool result"

ODD = np.float32([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5])
MISMATCH = ((np.ones((2, 3), "float32"), np.ones((2, 4), "float32")), ShapeError, r"\[2, 3\].*\[2, 4\]")
FLOATS = ((np.ones(3, "float32"), np.ones(3, "int64")), DTypeError, "takes integers, got float32")
IMAGINARY = ((np.ones(2, "complex64"),), DTypeError, "takes real numbers, got complex64")

CASES = [
    unary("abs", np.abs),
    Case("abs", given(np.complex64([3 + 4j, 0.5 - 1j])), np.abs, tag="complex"),
    Case("abs", given(np.array([-3, 2])), np.abs, no_grad=INT, tag="int"),
    unary("exp", np.exp),
    Case("exp", given(np.array([0, 1, 2])), lambda x: np.exp(x).astype("float32"), no_grad=INT, tag="int"),
    Case("exp", given(np.array(0.5, "float32")), np.exp, tag="0d"),
    unary("expm1", np.expm1),
    unary("log", np.log, 0.1, 3.0),
    unary("log2", np.log2, 0.1, 3.0),
    unary("log10", np.log10, 0.1, 3.0),
    unary("log1p", np.log1p, -0.5, 3.0),
    unary("sqrt", np.sqrt, 0.1, 3.0),
    unary("rsqrt", lambda x: 1 / np.sqrt(x), 0.1, 3.0),
    unary("square", np.square),
    unary("reciprocal", np.reciprocal, 0.5, 2.0),
    Case("reciprocal", given(np.array([1, 2, -4])), lambda x: np.float32([1, 0.5, -0.25]), no_grad=INT, tag="int"),
    unary("sin", np.sin),
    unary("cos", np.cos),
    unary("tan", np.tan, -1.0, 1.0),
    unary("asin", np.arcsin, -0.9, 0.9),
    unary("acos", np.arccos, -0.9, 0.9),
    unary("atan", np.arctan),
    unary("sinh", np.sinh),
    unary("cosh", np.cosh),
    unary("tanh", np.tanh),
    unary("asinh", np.arcsinh),
    unary("acosh", np.arccosh, 1.2, 3.0),
    unary("atanh", np.arctanh, -0.9, 0.9),
    unary("sigmoid", sp.expit),
    unary("deg2rad", np.deg2rad, -180, 180),
    unary("rad2deg", np.rad2deg),
    unary("sinc", np.sinc),
    Case("sinc", given(np.float32([0.0, 1.0, -0.5])), np.sinc, tag="zero"),
    unary("ceil", np.ceil),
    unary("floor", np.floor),
    Case("floor", given(np.array([-3, 2])), np.floor, no_grad=INT, tag="int", check=returns(np.array([-3, 2]))),
    unary("trunc", np.trunc),
    unary("frac", lambda x: x - np.trunc(x)),
    unary("round", np.round),
    Case("round", given(np.float32([0.5, 1.5, -2.5, 2.6])), np.round, no_grad="at a jump", tag="half"),
    Case("round", lambda rng: (*within(-200, 200)(rng), -1), np.round, tag="tens"),
    unary("sign", np.sign),
    Case("signbit", given(np.float32([-1, -0.0, 0.0, 2])), np.signbit, no_grad=BOOL),
    Case("signbit", given(np.array([-1, 0, 2])), np.signbit, no_grad=BOOL, tag="int"),
    unary("positive", np.positive),
    Case("scale", lambda rng: (*within(-2, 2)(rng), 2.5, 0.5), lambda x, a, b: a * x + b, bad=((np.ones(2), 1.0, 0.0, True, "gelu"), ShapeError, "act='gelu'")),
    Case("scale", lambda rng: (*within(-2, 2)(rng), np.array(2.0, "float32"), 0.5, False, "tanh"), lambda x, a, b, *_: np.tanh(a * (x + b)), tag="before"),
    Case("scale", given(np.array([1, 2]), 3, 1), lambda x, a, b: a * x + b, no_grad=INT, tag="int", check=returns(np.array([4, 7]))),
    Case("scale", given(np.array([1, 2]), 3.0, 1.0), lambda x, a, b: (a * x + b).astype("int64"), no_grad=INT, tag="int-whole", check=returns(np.array([4, 7]))),
    Case("scale", given(np.array([1, 2]), 3), lambda x, a: a * x, no_grad=INT, tag="int-alone", check=returns(np.array([3, 6]))),
    unary("stanh", lambda x: 1.7159 * np.tanh(0.67 * x)),
    Case("clip", lambda rng: (*within(-2, 2)(rng), -0.5, 0.7), np.clip, bad=((np.ones(2, "float32"), 0.7, -0.5), ConfigError, "min=0.7 is above max=-0.5")),
    Case("clip", lambda rng: (*within(-2, 2)(rng), np.float32([0, 0.1, 0.2, 0.3])), lambda x, low: np.maximum(x, low), tag="tensor",
         bad=((np.ones((2, 3), "float32"), np.ones(4, "float32")), ShapeError, "clip")),
    Case("clip", given(np.arange(5), None, 3), np.clip, no_grad=INT, tag="int", check=returns(np.array([0, 1, 2, 3, 3]))),
    Case("nan_to_num", given(ODD), np.nan_to_num, no_grad="not finite"),
    Case("nan_to_num", given(ODD, 1.0, 2.0, 3.0), lambda x, *to: np.nan_to_num(x, True, *to), no_grad="not finite", tag="given"),
    Case("nan_to_num", within(-2, 2), np.nan_to_num, tag="finite"),
    *(Case(n, given(ODD), getattr(np, n), no_grad=BOOL) for n in ("isfinite", "isinf", "isnan")),
    *(Case(n, given(ODD), getattr(np, n), no_grad=BOOL, bad=IMAGINARY) for n in ("isposinf", "isneginf")),
    *(Case(n, given(np.arange(3)), getattr(np, n), no_grad=BOOL, tag="int") for n in ("isfinite", "isinf", "isnan", "isposinf", "isneginf")),
    *(Case(n, pair(), getattr(np, n), bad=MISMATCH) for n in ("maximum", "minimum", "fmax", "fmin")),
    *(Case(n, given(ODD, np.float32(0.5).reshape(())), getattr(np, n), no_grad="not finite", tag="nan") for n in ("maximum", "minimum", "fmax", "fmin")),
    *(Case(n, integers(), getattr(np, n), no_grad=INT, tag="int") for n in ("maximum", "minimum", "fmax", "fmin")),
    Case("atan2", pair(), np.arctan2, bad=MISMATCH),
    Case("hypot", pair(), np.hypot, bad=MISMATCH),
    Case("hypot", given(np.float32([3e30, 0, np.inf, 1e-30]), np.float32([4e30, 0, 1, 1e-30])), np.hypot, no_grad="extreme values", tag="extreme"),
    Case("lerp", pair(0.3), lambda x, y, w: x + w * (y - x)),
    Case("lerp", lambda rng: (*pair()(rng), *within(0, 1, (3, 1))(rng)), lambda x, y, w: x + w * (y - x), tag="tensor", bad=((*MISMATCH[0], 0.5), ShapeError, "lerp")),
    Case("logaddexp", pair(), np.logaddexp, bad=MISMATCH),
    Case("copysign", pair(), np.copysign, bad=MISMATCH),
    Case("copysign", lambda rng: (np.int8([1, -2, 0]), np.int8([-1, 1, -1])), lambda x, y: np.int8([-1, 2, 0]), no_grad="integers", tag="int"),
    Case("copysign", lambda rng: (np.array([True, False]), np.array([[False], [True], [True]])), lambda x, y: np.broadcast_to(x, (3, 2)), no_grad="integers", tag="bool"),
    Case("nextafter", pair(), np.nextafter, no_grad="its gradient is 0, its slope 1", bad=MISMATCH),
    Case("ldexp", lambda rng: (*within(-2, 2)(rng), np.array([-3, 0, 2, 5])), lambda x, y: np.ldexp(x, y), bad=MISMATCH),
    Case("ldexp", pair(), lambda x, y: x * np.exp2(y), tag="float"),
    Case("ldexp", given(np.float32([2.0**-100, 1.5]), np.array([200, -100])), np.ldexp, no_grad="extreme values", tag="extreme"),
    Case("frexp", given(np.float32([3.0, -0.3, 0.0, 1e-30, 2.0**100])), np.frexp, no_grad="the exponent's gradient is 0, see test_math.py"),
    Case("frexp", given(np.array([8, 3])), lambda x: tuple(np.float32(v) for v in np.frexp(x)), no_grad=INT, tag="int"),
    Case("heaviside", lambda rng: (*within(-2, 2)(rng), np.float32(0.5).reshape(())), np.heaviside, bad=MISMATCH),
    Case("heaviside", given(np.float32([-1, 0, 2]), np.float32(0.5).reshape(())), np.heaviside, no_grad="at the jump", tag="zero"),
    *(Case(n, integers(), getattr(np, n), no_grad=INT, bad=FLOATS) for n in ("gcd", "lcm")),
    *(Case(n, given(LOWEST, np.int32([6, 0, -(2**31)])), getattr(np, n), no_grad=INT, tag="lowest") for n in ("gcd", "lcm")),
    *(Case(f"bitwise_{n}_shift", integers(), getattr(np, f"{n}_shift"), no_grad=INT, bad=FLOATS) for n in ("left", "right")),
    Case("bitwise_right_shift", given(np.int32([-8, 9]), np.int32([1, 2]), False), lambda x, y, _: (x.view("uint32") >> y.view("uint32")).view("int32"), no_grad=INT, tag="logical"),
    Case("add_n", lambda rng: ([*within(-1, 1)(rng), *within(-1, 1)(rng), *within(-1, 1)(rng)],), lambda v: v[0] + v[1] + v[2],
         bad=(([np.ones(2), np.ones(3)],), ShapeError, r"\[2\] and \[3\]")),
    Case("add_n", within(-1, 1), lambda x: x, tag="one", bad=(([],), ShapeError, "at least one")),
    Case("increment", given(np.float32([1.5]), 2), lambda x, v: x + v, no_grad="changes a leaf in place", bad=((np.ones(2),), ShapeError, "one element")),
    Case("multiplex", lambda rng: ([*within(-1, 1)(rng), *within(-1, 1)(rng)], np.array([[1], [0], [1]])), lambda v, i: np.stack([v[k][r] for r, k in enumerate(i[:, 0])]),
         bad=(([np.ones((2, 2)), np.ones((2, 2))], np.array([0])), ShapeError, r"\[1\] for Tensors of 2 rows")),
]  # fmt: skip
