"""Contract rows of ops/float8.py."""

import ml_dtypes
import numpy as np

from polyreme.conformance._tables.attention import floats, then
from polyreme.conformance.case import Case
from polyreme.errors import DTypeError, ShapeError

F8 = ml_dtypes.float8_e4m3fn
ROUNDED = "rounds to float8 or bfloat16"
ODD = np.ones((2, 3), "float32")


def swiglu(x, prob=None):
    a, b = np.split(x.astype("float64"), 2, -1)
    return a / (1 + np.exp(-a)) * b * (1 if prob is None else prob[..., None])


def check_quantized(pow2):
    """Within half a step of float8 (3 bits after the first) of what was quantized, and the largest near 448."""

    def check(q, scale):
        want = swiglu(*WIDE)
        assert q.dtype == F8
        assert q.shape == (2, 130)
        assert scale.shape == (2, 2)
        back = q.astype("float64") * np.repeat(scale, 128, 1)[:, :130]
        np.testing.assert_allclose(back, want, rtol=2**-4, atol=2**-9 * scale.max())
        low = 224 if pow2 else 448
        assert low <= np.abs(q.astype("float64"))[:, :128].max() <= 448
        if pow2:
            np.testing.assert_array_equal(np.log2(scale) % 1, 0)

    return check


WIDE = np.random.default_rng(0).standard_normal((2, 260)).astype("float32"), np.array([0.5, 2], "float32")
SMALL = np.arange(-130, 130, dtype="float32").reshape(2, 130).astype(F8)
SCALES = np.array([[0.5, 2], [1, 4]], "float32")


def dequantized(x, scale):
    return (x.astype("float64") * np.repeat(scale, 128, 1)[:, : x.shape[1]]).astype(ml_dtypes.bfloat16)


def gradients(o1, dy, p):
    a, b = np.split(o1.astype("float64"), 2, -1)
    s = 1 / (1 + np.exp(-a))
    da, db = dy * p[:, None] * b * (s + a * s * (1 - s)), dy * p[:, None] * a * s
    return np.concatenate([da, db], -1), (dy * swiglu(o1)).sum(-1), swiglu(o1, p)


def entropy(label, softmax, grad):
    return ((softmax - np.eye(softmax.shape[1])[label[:, 0]]) * grad).astype(ml_dtypes.bfloat16)


def added(ids, grad, out):
    total = grad.copy()
    np.add.at(total, ids, out)
    return total


CASES = [
    Case("fused_weighted_swiglu_act_quant", lambda rng: WIDE, check=check_quantized(False), no_grad=ROUNDED, bad=((ODD,), ShapeError, "make it even")),
    Case("fused_weighted_swiglu_act_quant", lambda rng: (*WIDE, True), check=check_quantized(True), no_grad=ROUNDED, tag="pow2"),
    Case("fused_act_dequant", lambda rng: (SMALL, SCALES), dequantized, no_grad=ROUNDED, bad=((ODD, SCALES), DTypeError, "x is float32")),
    Case("fused_act_dequant", lambda rng: (SMALL, np.array([[126 + 128 * 256], [127 + 129 * 256]], "int32")), lambda x, _: dequantized(x, SCALES), no_grad=ROUNDED, tag="packed", bad=((SMALL, SCALES[:, :1]), ShapeError, r"x_scale \[2, 1\]")),
    Case("fused_swiglu_weighted_bwd", lambda rng: (*floats((3, 8), (3, 4))(rng), np.array([0.5, 1, 2], "float32")), gradients, terms=16, no_grad="computed in float32", bad=((ODD, ODD, ODD), ShapeError, "make it even")),
    Case("cross_entropy_with_softmax_bwd_w_downcast", lambda rng: (np.array([[1], [0]]), np.array([[0.25, 0.75], [0.5, 0.5]], "float32"), np.array([[1], [2]], "float32")), entropy, no_grad=ROUNDED),
    Case("rows_added", then(lambda rng: (np.array([1, 0, 1]),), *floats((2, 3), (3, 3))(np.random.default_rng(0))), added),
]  # fmt: skip
