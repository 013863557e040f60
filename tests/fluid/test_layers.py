"""Layers without state against NumPy: every case goes into one Program, which runs once."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special
from scipy.special import expit as sigmoid

import polyreme as paddle
from polyreme import fluid
from tests.fluid.table import Case, check, run_cases

L = fluid.layers
R = np.random.RandomState(0)
A = R.randn(3, 4).astype("float32")
B = R.randn(3, 4).astype("float32")
V = R.randn(4).astype("float32")
C = R.randn(2, 3, 4, 4).astype("float32")
M = R.randn(3).astype("float32")
P = (R.rand(3, 4) * 0.8 + 0.1).astype("float32")
P = P / P.sum(1, keepdims=True)
IDS = np.array([[1], [3], [0]])
BITS = np.array([[1.0, 0, 0, 1], [0, 1, 1, 0], [-100, 1, 0, 0]], "float32")
SIGNS = np.array([[1.0], [-1], [1]], "float32")


def soft(x: np.ndarray) -> np.ndarray:
    return special.softmax(x, -1)


def windows(x: np.ndarray, reduce: Callable) -> np.ndarray:
    return reduce(x.reshape(2, 3, 2, 2, 2, 2), axis=(3, 5))


def smooth(x, y, sigma):
    d, s = np.abs(x - y), sigma**2
    return np.where(d < 1 / s, s * d * d / 2, d - 0.5 / s).sum(1, keepdims=True)


def bce(x, y):
    return np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))


def huber(r, delta):
    return np.where(np.abs(r) <= delta, r * r / 2, delta * (np.abs(r) - delta / 2))


def neighbours(x, n):
    padded = np.pad(x * x, ((0, 0), (n // 2, n // 2), (0, 0), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] for i in range(n))


def nearest(x, out):
    at = np.floor(np.arange(out) * (x.shape[-1] - 1) / (out - 1) + 0.5).astype(int)
    return x[:, :, at][:, :, :, at]


CASES = [
    Case("mean", L.mean, (A,), A.mean(keepdims=True).reshape(1)),
    Case("mul", lambda x, y: L.mul(x, y, 2, 1), (C[0], C[1, 0]), C[0] @ C[1, 0]),
    Case("mul flat", lambda x, y: L.mul(x, y, 1, 1), (C[0], R.randn(16, 2).astype("f")), None),
    Case("matmul", lambda x, y: L.matmul(x, y, transpose_y=True, alpha=0.5), (A, B), 0.5 * A @ B.T),
    Case("matmul of vectors", lambda x, y: L.matmul(x, y), (V, V), [V @ V]),
    Case("elementwise_add axis", lambda x, y: L.elementwise_add(x, y, axis=1, act="relu"), (C, M),
         np.maximum(C + M[:, None, None], 0)),
    Case("elementwise_sub axis 0", lambda x, y: L.elementwise_sub(x, y, axis=0), (A, M), A - M[:, None]),
    Case("elementwise_mul", L.elementwise_mul, (A, V), A * V),
    Case("elementwise_div", L.elementwise_div, (A, B), A / B),
    Case("elementwise_max", L.elementwise_max, (A, B), np.maximum(A, B)),
    Case("elementwise_min", L.elementwise_min, (A, B), np.minimum(A, B)),
    Case("elementwise_pow", L.elementwise_pow, (np.abs(A), B), np.abs(A) ** B),
    Case("elementwise_mod", L.elementwise_mod, (IDS * 7, IDS * 0 + 4), IDS * 7 % 4),
    Case("elementwise_floordiv", L.elementwise_floordiv, (IDS * 7, IDS * 0 + 4), IDS * 7 // 4),
    Case("reduce_sum", L.reduce_sum, (A,), [A.sum()]),
    Case("reduce_mean dim", lambda x: L.reduce_mean(x, dim=[1], keep_dim=True), (A,), A.mean(1, keepdims=True)),
    Case("reduce_max", lambda x: L.reduce_max(x, dim=0), (A,), A.max(0)),
    Case("reduce_prod", lambda x: L.reduce_prod(x, dim=-1), (A,), A.prod(-1)),
    Case("reduce_all", lambda x: L.reduce_all(L.greater_than(x, L.zeros_like(x)), dim=1), (A,), (A > 0).all(1)),
    Case("sums", lambda x, y: L.sums([x, y]), (A, B), A + B),
    Case("scale", lambda x: L.scale(x, 2.0, 1.0, bias_after_scale=False, act="tanh"), (A,), np.tanh(2 * (A + 1))),
    Case("pow", lambda x: L.pow(x, 3.0), (A,), A**3),
    Case("clip_by_norm", lambda x: L.clip_by_norm(x, 1.0), (A,), A / np.linalg.norm(A)),
    Case("clip_by_norm below", lambda x: L.clip_by_norm(x, 100.0), (A,), A),
    Case("l2_normalize", lambda x: L.l2_normalize(x, 1), (A,), A / np.sqrt((A * A).sum(1, keepdims=True) + 1e-12)),
    Case("lrn", lambda x: L.lrn(x, n=3, k=2.0, alpha=0.1, beta=0.5), (C,), C / np.sqrt(2 + 0.1 * neighbours(C, 3))),
    Case("cumsum", lambda x: L.cumsum(x, axis=1, exclusive=True), (A,), np.cumsum(A, 1) - A),
    Case("cumsum reverse", lambda x: L.cumsum(x, axis=0, reverse=True), (A,), np.cumsum(A[::-1], 0)[::-1]),
    Case("softmax", L.softmax, (A,), soft(A)),
    Case("hard_sigmoid", L.hard_sigmoid, (A,), np.clip(0.2 * A + 0.5, 0, 1)),
    Case("hard_swish", L.hard_swish, (A,), A * np.clip(A + 3, 0, 6) / 6),
    Case("swish", lambda x: L.swish(x, beta=2.0), (A,), A * sigmoid(2 * A)),
    Case("soft_relu", lambda x: L.soft_relu(x, 1.0), (A,), np.log1p(np.exp(np.clip(A, -1, 1)))),
    Case("leaky_relu", L.leaky_relu, (A,), np.where(A > 0, A, 0.02 * A)),
    Case("brelu", lambda x: L.brelu(x, 0.1, 0.5), (A,), np.clip(A, 0.1, 0.5)),
    Case("relu6", lambda x: L.relu6(x, 0.5), (A,), np.clip(A, 0, 0.5)),
    Case("stanh", L.stanh, (A,), 1.7159 * np.tanh(0.67 * A)),
    Case("thresholded_relu", L.thresholded_relu, (A,), np.where(A > 1, A, 0)),
    Case("maxout", lambda x: L.maxout(x, 3), (C,), C.max(1, keepdims=True)),
    Case("cross_entropy", L.cross_entropy, (P, IDS), -np.log(np.take_along_axis(P, IDS, 1))),
    Case("cross_entropy soft", lambda x, y: L.cross_entropy(x, y, soft_label=True), (P, P),
         -(P * np.log(P)).sum(1, keepdims=True)),
    Case("softmax_with_cross_entropy", L.softmax_with_cross_entropy, (A, IDS),
         -np.log(np.take_along_axis(soft(A), IDS, 1))),
    Case("square_error_cost", L.square_error_cost, (A, B), (A - B) ** 2),
    Case("sigmoid_cross_entropy_with_logits", lambda x, y: L.sigmoid_cross_entropy_with_logits(x, y, normalize=True),
         (A, BITS), np.where(BITS == -100, 0, bce(A, BITS)) / 11),
    Case("huber_loss", lambda x, y: L.huber_loss(x, y, 0.7), (A, B), huber(A - B, 0.7)),
    Case("smooth_l1", lambda x, y: L.smooth_l1(x, y, sigma=2.0), (A, B), smooth(A, B, 2.0)),
    Case("rank_loss", L.rank_loss, (np.abs(SIGNS), A[:, :1], B[:, :1]),
         np.log1p(np.exp(A - B)[:, :1]) - (A - B)[:, :1]),
    Case("margin_rank_loss", lambda y, a, b: L.margin_rank_loss(y, a, b, 0.3), (SIGNS, A[:, :1], B[:, :1]),
         np.maximum(0, 0.3 - SIGNS * (A - B)[:, :1])),
    Case("log_loss", L.log_loss, (P, np.round(P)),
         -np.round(P) * np.log(P + 1e-4) - (1 - np.round(P)) * np.log(1 - P + 1e-4)),
    Case("bpr_loss", L.bpr_loss, (A, IDS),
         [[-np.mean([np.log(sigmoid(A[i, y] - A[i, j])) for j in range(4) if j != y])] for i, (y,) in enumerate(IDS)]),
    Case("kldiv_loss", lambda x, y: L.kldiv_loss(x, y), (np.log(P), P[::-1]),
         [(P[::-1] * (np.log(P[::-1]) - np.log(P))).mean()]),
    Case("cos_sim", L.cos_sim, (A, B),
         ((A * B).sum(1) / np.linalg.norm(A, axis=1) / np.linalg.norm(B, axis=1))[:, None]),
    Case("label_smooth", lambda y: L.label_smooth(y, epsilon=0.2), (P,), 0.8 * P + 0.05),
    Case("fill_constant_batch_size_like", lambda x: L.fill_constant_batch_size_like(x, [-1, 2], "int64", 7), (A,),
         np.full((3, 2), 7)),
    Case("concat", lambda x, y: L.concat([x, y], axis=1), (A, B), np.concatenate([A, B], 1)),
    Case("argsort", lambda x: L.argsort(x, axis=0)[1], (A,), A.argsort(0)),
    Case("argmax", L.argmax, (A,), A.argmax(0)),
    Case("topk", lambda x: L.topk(x, 2)[0], (A,), np.sort(A, 1)[:, :-3:-1]),
    Case("has_nan", L.has_nan, (A,), [False]),
    Case("isfinite", L.isfinite, (np.full(3, np.inf, "f"),), [False]),
    Case("diag", L.diag, (V,), np.diag(V)),
    Case("reverse", lambda x: L.reverse(x, [0, 1]), (A,), A[::-1, ::-1]),
    Case("reshape", lambda x: L.reshape(x, [0, 2, -1], act="relu"), (A,), np.maximum(A, 0).reshape(3, 2, 2)),
    Case("squeeze", lambda x: L.squeeze(x, [1]), (IDS,), IDS[:, 0]),
    Case("flatten", lambda x: L.flatten(x, 2), (C,), C.reshape(6, 16)),
    Case("split", lambda x: L.split(x, [1, 3], dim=1)[1], (A,), A[:, 1:]),
    Case("expand", lambda x: L.expand(x, [2, 1]), (A,), np.tile(A, (2, 1))),
    Case("expand_as", L.expand_as, (A[:1], A), np.tile(A[:1], (3, 1))),
    Case("shape", L.shape, (A,), np.array([3, 4], "int32")),
    Case("size", L.size, (A,), [12]),
    Case("rank", L.rank, (A,), np.array(2, "int32")),
    Case("slice", lambda x: L.slice(x, [0, 1], [1, -2], [3, 4]), (A,), A[1:3, -2:4]),
    Case("crop_tensor", lambda x: L.crop_tensor(x, [2, 2], [1, 1]), (A,), A[1:3, 1:3]),
    Case("gather", L.gather, (A, np.array([2, 0])), A[[2, 0]]),
    Case("scatter", lambda x, i, u: L.scatter(x, i, u), (A, np.array([2, 0]), B[:2]), None),
    Case("one_hot", lambda x: L.one_hot(x, 4), (IDS,), np.eye(4, dtype="f")[IDS[:, 0]]),
    Case("one_hot beyond", lambda x: L.one_hot(x, 2, allow_out_of_range=True), (IDS,),
         np.array([[0, 1], [0, 0], [1, 0]], "f")),
    Case("fluid.one_hot", lambda x: fluid.one_hot(x, 4), (IDS,), np.eye(4, dtype="f")[IDS]),
    Case("pad", lambda x: L.pad(x, [0, 1, 2, 0], 5.0), (A,), np.pad(A, ((0, 1), (2, 0)), constant_values=5)),
    Case("pad2d", lambda x: L.pad2d(x, [1, 0, 0, 2], mode="edge"), (C,),
         np.pad(C, ((0, 0), (0, 0), (1, 0), (0, 2)), mode="edge")),
    Case("pad_constant_like", L.pad_constant_like, (np.zeros((4, 6), "f"), A), np.pad(A, ((0, 1), (0, 2)))),
    Case("multiplex", lambda x, y, i: L.multiplex([x, y], i), (A, B, np.array([[1], [0], [1]])),
         np.stack([B[0], A[1], B[2]])),
    Case("pool2d max", lambda x: L.pool2d(x, 2, "max", 2), (C,), windows(C, np.max)),
    Case("pool2d avg", lambda x: L.pool2d(x, 2, "avg", 2), (C,), windows(C, np.mean)),
    Case("pool2d global", lambda x: L.pool2d(x, global_pooling=True, pool_type="avg"), (C,),
         C.mean((2, 3), keepdims=True)),
    Case("adaptive_pool2d", lambda x: L.adaptive_pool2d(x, [2, 2], "avg"), (C,), windows(C, np.mean)),
    Case("resize_nearest", lambda x: L.resize_nearest(x, [7, 7]), (C,), nearest(C, 7)),
    Case("resize_bilinear", lambda x: L.resize_bilinear(x, [7, 7])[:, :, ::2, ::2], (C,), C),
    Case("dropout in evaluation", lambda x: L.dropout(x, 0.3, is_test=True), (A,), 0.7 * A),
    Case("glu", lambda x: fluid.nets.glu(x), (A,), A[:, :2] * sigmoid(A[:, 2:])),
    Case("attention", lambda q, k, v: fluid.nets.scaled_dot_product_attention(q, k, v), (C[0], C[1], C[0]),
         soft(C[0] @ C[1].transpose(0, 2, 1) / 2) @ C[0]),
    Case("cond", lambda x: L.cond(L.less_than(L.reduce_sum(x), L.reduce_max(x)), lambda: x * 2, lambda: x),
         (np.abs(A),), np.abs(A)),
    Case("is_empty", L.is_empty, (A,), [False]),
]  # fmt: skip
CASES[2].expected = C[0].reshape(3, 16) @ CASES[2].arrays[1]
SCATTERED = A.copy()
SCATTERED[[2, 0]] = B[:2]
next(c for c in CASES if c.name == "scatter").expected = SCATTERED


@pytest.fixture(scope="module")
def results():
    return run_cases(CASES)


@pytest.mark.slow_cases("mean")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layer_equals_numpy(results, case):
    check(case, results)


def test_every_activation_has_a_name(script):
    x = script.data("x", [3, 4])
    outs = [script.layers.fc(x, 4, act=act) for act in ("relu", "tanh", "softmax", "leaky_relu", "hard_sigmoid", None)]
    assert all(o.shape == [3, 4] for o in outs)
    with pytest.raises(paddle.errors.ConfigError, match="there is no activation 'rellu'; did you mean 'relu'"):
        script.layers.fc(x, 4, act="rellu")
