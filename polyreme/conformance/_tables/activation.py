"""Contract rows of ops/activation.py."""

import jax
import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

KEY = jax.random.PRNGKey(3)
RANDOM = "random numbers differ from call to call"


def x(*args, shape=(3, 4), low=-3.0, high=3.0):
    return lambda rng: (rng.uniform(low, high, shape).astype("float32"), *args)


def ints(*args):
    return lambda rng: (rng.integers(-4, 5, (3, 4)), *args)


def softplus(v):
    return np.logaddexp(0, v)


def gelu_tanh(v, approximate=True):
    return v / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


def shrink(v, t):
    return np.sign(v) * np.maximum(np.abs(v) - t, 0)


def as_float(fn):
    return lambda v, *a, **k: fn(v.astype("float64"), *a, **k).astype("float32")


def check_rrelu(got):
    data = RRELU[0]
    np.testing.assert_array_equal(got[data > 0], data[data > 0])
    slope = got[data < 0] / data[data < 0]
    assert np.all((slope >= 0.1) & (slope <= 0.4))
    assert slope.std() > 0.05  # uniform on [0.1, 0.4) has 0.087


def check_gumbel(got):
    # a sum of 4 rounded terms
    np.testing.assert_allclose(got.sum(1), 1, rtol=4 * 4 * np.finfo("float32").eps)
    assert got.std() > 0


def check_hard_gumbel(got):
    # the straight-through form adds and subtracts the soft one
    assert np.all(np.abs(got - np.round(got)) <= 4 * np.finfo("float32").eps)
    np.testing.assert_array_equal(np.round(got).sum(1), 1)


def gumbel_ref(v, temperature, hard, axis, key):
    return sp.softmax((v + np.asarray(jax.random.gumbel(key, v.shape, "float32"))) / temperature, axis)


def log_softmax_wide(v, axis, dtype):
    return sp.log_softmax(v.astype(dtype), axis)


RRELU = (np.random.default_rng(0).uniform(-3, 3, 400).astype("float32"), 0.1, 0.4)
ZEROS = (np.zeros(3, "float32"),)

CASES = [
    Case("relu", x(), lambda v: np.maximum(v, 0)),
    Case("relu", ints(), lambda v: np.maximum(v, 0), no_grad="integers", tag="int"),
    Case("relu", lambda rng: (np.array(-2, "float32"),), lambda v: np.float32(0), tag="0d"),
    Case("relu6", x(high=9), lambda v: np.clip(v, 0, 6)),
    Case("elu", x(0.7), lambda v, a: np.where(v > 0, v, a * np.expm1(v))),
    Case("elu", ints(), as_float(lambda v: np.where(v > 0, v, np.expm1(v))), no_grad="integers", tag="int"),
    Case("selu", x(), lambda v: 1.0507009873554805 * np.where(v > 0, v, 1.6732632423543772 * np.expm1(v)), bad=((*ZEROS, 0.5), ConfigError, "scale=0.5")),
    Case("celu", x(0.7), lambda v, a: np.where(v > 0, v, a * np.expm1(v / a)), bad=((*ZEROS, 0), ConfigError, "alpha=0")),
    Case("gelu", x(), lambda v: v * sp.ndtr(v), terms=16, bad=((*ZEROS, "erf"), ConfigError, "approximate='erf'")),
    Case("gelu", x(True), gelu_tanh, terms=16, tag="tanh"),
    Case("silu", x(), lambda v: v * sp.expit(v)),
    Case("mish", x(), lambda v: v * np.tanh(softplus(v))),
    Case("hardsigmoid", x(0.2, 0.4), lambda v, s, o: np.clip(s * v + o, 0, 1)),
    Case("hardswish", x(low=-5, high=5), lambda v: v * np.clip(v + 3, 0, 6) / 6),
    Case("hardtanh", x(-1.5, 1.0), np.clip, bad=((*ZEROS, 1.0, -1.0), ConfigError, "min < max")),
    Case("hardshrink", x(0.6), lambda v, t: np.where(np.abs(v) > t, v, 0)),
    Case("hardshrink", x(-0.5), lambda v, t: v, tag="below"),
    Case("softshrink", x(0.6), shrink, bad=((*ZEROS, -1.0), ConfigError, "threshold=-1.0")),
    Case("tanhshrink", x(), lambda v: v - np.tanh(v)),
    Case("thresholded_relu", x(0.8, 0.25), lambda v, t, o: np.where(v > t, v, o)),
    Case("softplus", x(), softplus),
    Case("softplus", x(2.0, 3.0), lambda v, b, t: np.where(b * v > t, v, softplus(b * v) / b), tag="beta", bad=((np.ones(2), 0.0), ConfigError, "beta=0.0 divides by zero")),
    Case("softplus", x(shape=(4,), low=80, high=200), lambda v: v, tag="large"),
    Case("softsign", x(), lambda v: v / (1 + np.abs(v))),
    Case("leaky_relu", x(0.1), lambda v, s: np.where(v > 0, v, s * v)),
    Case("prelu", lambda rng: (*x(shape=(2, 3, 4))(rng), *x(shape=(3,))(rng)), lambda v, w: np.where(v > 0, v, w[:, None] * v), bad=((np.ones((2, 3), "float32"), np.ones(2, "float32")), ShapeError, r"weight \[2\]")),
    Case("prelu", lambda rng: (*x(shape=(2, 4, 3))(rng), *x(shape=(3,))(rng), "NLC"), lambda v, w, d: np.where(v > 0, v, w * v), bad=((np.ones((2, 3), "float32"), np.ones(3, "float32"), "CN"), ConfigError, "data_format='CN'"), tag="last"),
    Case("prelu", lambda rng: (*x(shape=(5,))(rng), np.float32([0.3])), lambda v, w: np.where(v > 0, v, w * v), tag="one"),
    Case("rrelu_train", lambda rng: RRELU, check=check_rrelu, no_grad=RANDOM),
    Case("rrelu_train", x(0.1, 0.4), lambda v, low, high, key: np.where(v > 0, v, v * np.asarray(jax.random.uniform(key, v.shape, "float32", low, high))), kwargs={"key": KEY}, no_grad="the slopes depend on the dtype they are drawn in", tag="key"),
    Case("rrelu", lambda rng: RRELU, check=check_rrelu, no_grad=RANDOM, bad=((*ZEROS, 0.5, 0.2), ConfigError, "lower=0.5, upper=0.2")),
    Case("rrelu", x(0.1, 0.4, False), lambda v, low, high, t: np.where(v > 0, v, 0.25 * v), tag="eval"),
    Case("log_sigmoid", x(), sp.log_expit),
    Case("log_sigmoid", x(shape=(4,), low=-200, high=-90), lambda v: v, tag="large"),
    Case("maxout", x(3, 1, shape=(2, 6, 2)), lambda v, g, a: v.reshape(2, 2, 3, 2).max(2), bad=((np.ones((2, 4), "float32"), 3), ShapeError, "groups=3")),
    Case("maxout", x(2, -1), lambda v, g, a: v.reshape(3, 2, 2).max(2), bad=((np.ones((2, 4), "float32"), 2, 5), ShapeError, "axis=5"), tag="last"),
    Case("glu", x(), lambda v: v[:, :2] * sp.expit(v[:, 2:]), bad=((np.ones((2, 3), "float32"),), ShapeError, "odd")),
    Case("glu", x(0, shape=(4, 3)), lambda v, a: v[:2] * sp.expit(v[2:]), tag="axis"),
    Case("swiglu", x(), lambda v: v[:, :2] * sp.expit(v[:, :2]) * v[:, 2:], bad=((np.ones((2, 3), "float32"),), ShapeError, "odd")),
    Case("swiglu", lambda rng: (*x()(rng), *x()(rng)), lambda v, w: v * sp.expit(v) * w, bad=((np.ones((2, 3), "float32"), np.ones((2, 1), "float32")), ShapeError, "same shape"), tag="two"),
    Case("softmax", x(), lambda v: sp.softmax(v, -1), bad=((np.ones((2, 3), "float32"), 2), ShapeError, "axis=2")),
    Case("softmax", x(0), sp.softmax, tag="axis"),
    Case("softmax", x(shape=()), lambda v: np.float32(1), tag="0d"),
    Case("softmax", ints(-1, "float64"), lambda v, a, d: sp.softmax(v.astype("float64"), a), no_grad="integers", tag="int"),
    Case("softmax", lambda rng: (np.float32([[1e4, 1e4 - 1, -1e4]]),), lambda v: sp.softmax(v, -1), tag="large"),
    Case("log_softmax", x(), lambda v: sp.log_softmax(v, -1), bad=((np.ones((2, 3), "float32"), 2), ShapeError, "axis=2")),
    Case("log_softmax", x(0, "float64"), log_softmax_wide, tag="axis"),
    Case("gumbel_softmax", x(0.7, False, -1), check=check_gumbel, no_grad=RANDOM, bad=((np.ones((2, 3), "float32"), 0.0), ConfigError, "temperature=0.0")),
    Case("gumbel_softmax", x(0.7, False, 0), gumbel_ref, kwargs={"key": KEY}, no_grad="the noise depends on the dtype it is drawn in", tag="key"),
    Case("gumbel_softmax", x(0.7, True), check=check_hard_gumbel, no_grad=RANDOM, tag="hard"),
    Case("gumbel_softmax", x(shape=()), lambda v: np.float32(1), no_grad=RANDOM, tag="0d"),
    Case("gumbel_softmax", lambda rng: (np.ones((2, 0), "float32"), 1.0, True), lambda v, *_: v, no_grad=RANDOM, tag="empty"),
]  # fmt: skip
