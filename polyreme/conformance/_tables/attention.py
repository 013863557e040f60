"""Contract rows of ops/attention/dense.py."""

import jax
import numpy as np
import scipy.special as sp

from polyreme import kernels
from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

KEY = jax.random.PRNGKey(5)
RANDOM = "random numbers differ from call to call"


def floats(*shapes):
    return lambda rng: tuple(rng.standard_normal(s).astype("float32") for s in shapes)


def then(make, *args):
    return lambda rng: (*make(rng), *args)


def probs(q, k, causal=False, scale=None, mask=None, softcap=0):
    """[batch, heads, s, t]: query i sees keys 0 ... i if causal."""
    k = np.repeat(k, q.shape[-2] // k.shape[-2], -2).astype("float64")
    scores = np.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return sp.softmax(scores, -1)


def attend(q, k, v, mask=None, causal=False, scale=None, softcap=0):
    v = np.repeat(v, q.shape[-2] // v.shape[-2], -2)
    return np.einsum("bhst,bthd->bshd", probs(q, k, causal, scale, mask, softcap), v)


def turned(tensors, sin, cos, ids, adjacent, time_major, base):
    """One head, one position, one pair of entries at a time."""
    out = []
    for x in tensors:
        x = np.swapaxes(x, 0, 1) if time_major else x
        y, d = np.zeros(x.shape), x.shape[-1]
        for b, s, i in np.ndindex(x.shape[0], x.shape[1], d // 2):
            position = s if ids is None else ids[b, s]
            one, two = (2 * i, 2 * i + 1) if adjacent else (i, i + d // 2)
            if sin is None:
                angle = position / base ** (2 * i / d)
                sins, coss = (np.sin(angle),) * 2, (np.cos(angle),) * 2
            else:
                table = sin.reshape(-1, d), cos.reshape(-1, d)
                sins, coss = table[0][position, [one, two]], table[1][position, [one, two]]
            y[b, s, :, one] = x[b, s, :, one] * coss[0] - x[b, s, :, two] * sins[0]
            y[b, s, :, two] = x[b, s, :, two] * coss[1] + x[b, s, :, one] * sins[1]
        out.append(np.swapaxes(y, 0, 1) if time_major else y)
    return out


def rope(q, k=None, v=None, sin=None, cos=None, ids=None, adjacent=True, time_major=False, base=10000.0):
    return turned([t for t in (q, k, v) if t is not None], sin, cos, ids, adjacent, time_major, base)


def with_dropout(q, k, v, mask, causal, scale, rate, dropout_key):
    return np.asarray(
        kernels.attention_plain(q, k, v, causal=causal, scale=scale, dropout_key=dropout_key, dropout_rate=rate)
    )


def check_dropout(got):
    # value is the identity, so the output is the probabilities: 1 / 20 each, kept as 1 / 10 or dropped
    np.testing.assert_allclose(got[got != 0], 0.1, rtol=8 * np.finfo("float32").eps)
    assert abs((got != 0).mean() - 0.5) <= 6 * 0.5 / np.sqrt(got.size)


QKV = floats((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
Q, K, V = (np.ones((1, 3, n, 4), "float32") for n in (4, 2, 2))
UNIFORM = (
    np.zeros((1, 20, 1, 20), "float32"),
    np.zeros((1, 20, 1, 20), "float32"),
    np.eye(20, dtype="float32").reshape(1, 20, 1, 20),
)
MASK = (np.arange(50).reshape(2, 1, 5, 5) % 3 > 0) | np.eye(5, dtype=bool)
SMALL = ((Q, K, V[:, :2]), ShapeError, "v .*1, 2, 2, 4")
HEADS = ((Q, np.ones((1, 3, 3, 4), "float32"), np.ones((1, 3, 3, 4), "float32")), ShapeError, "4 query heads over 3")
ANGLES = floats((1, 6, 1, 4), (1, 6, 1, 4))
POSITIONS = np.array([[3, 0, 5], [1, 1, 2]])

CASES = [
    Case("attention", QKV, attend, terms=40, bad=SMALL),
    Case("attention", lambda rng: (*QKV(rng), *floats((2, 4, 5, 5))(rng), True, 0.3), attend, terms=40, tag="mask-causal", bad=HEADS),
    Case("attention_with_dropout", then(QKV, None, True, 0.4, 0.25), with_dropout, kwargs={"dropout_key": KEY}, terms=40),
    Case("scaled_dot_product_attention", QKV, attend, terms=40, bad=SMALL),
    Case("scaled_dot_product_attention", then(QKV, MASK), attend, terms=40, tag="bool-mask", bad=HEADS),
    Case("scaled_dot_product_attention", then(QKV, MASK), lambda q, k, v, m, **_: attend(q, k, v, m, True), kwargs={"is_causal": True}, terms=40, tag="bool-mask-causal"),
    Case("scaled_dot_product_attention", lambda rng: (*QKV(rng), *floats((5, 5))(rng)), attend, terms=40, tag="float-mask"),
    Case("scaled_dot_product_attention", floats((2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4)), lambda q, k, v, **_: attend(q, k, v, causal=True), kwargs={"is_causal": True}, terms=40, tag="causal-short"),
    Case("scaled_dot_product_attention", floats((2, 5, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4), (5, 3)), lambda q, k, v, m, **_: attend(q, k, v, m, True), kwargs={"is_causal": True}, terms=40, tag="causal-long"),
    Case("scaled_dot_product_attention", floats((5, 2, 4), (3, 2, 4), (3, 2, 4)), lambda q, k, v: attend(q[None], k[None], v[None])[0], terms=40, tag="unbatched"),
    Case("scaled_dot_product_attention", then(floats((1, 2, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4)), np.array([[True, False, True], [False] * 3])), lambda q, k, v, m: np.concatenate([attend(q[:, :1], k, v, m[:1]), np.zeros((1, 1, 1, 4))], 1), terms=40, tag="nothing-seen"),
    Case("scaled_dot_product_attention", floats((2, 0, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)), lambda q, k, v: q, no_grad="no elements", tag="no-queries"),
    Case("scaled_dot_product_attention", floats((2, 3, 2, 0), (2, 3, 2, 0), (2, 3, 2, 0)), lambda q, k, v: v, no_grad="no elements", tag="no-dims"),
    Case("scaled_dot_product_attention", lambda rng: (*UNIFORM, None, 0.5), check=check_dropout, no_grad=RANDOM, tag="dropout", bad=((Q, K, V, None, 1.5), ConfigError, "1.5")),
    Case("scaled_dot_product_attention", then(QKV, None, 0.5, False, False), lambda q, k, v, *_: attend(q, k, v), terms=40, tag="eval", bad=((Q, K, V, None, 0.0, False, True, "math"), ConfigError, "backend='math'")),
    Case("scaled_dot_product_attention", then(QKV, None, 0.0, False, True, None, 0.7), lambda q, k, v, *_: attend(q, k, v, scale=0.7), terms=40, tag="scale", bad=((Q, K, V, None, 0.0, False, True, None, None, False), ShapeError, "enable_gqa")),
    Case("scaled_dot_product_attention", then(QKV, MASK), lambda q, k, v, m, **_: attend(q, k, v, m, True, softcap=0.7), kwargs={"is_causal": True, "softcap": 0.7}, terms=40, tag="softcap"),
    Case("attention_probs", lambda rng: (*QKV(rng)[:2], True, 0.4), probs, terms=24, bad=((Q, V[..., :2]), ShapeError, "attention_probs")),
    Case("flash_attention", then(QKV, 0.0, True), lambda q, k, v, *_: attend(q, k, v, causal=True), terms=40, bad=SMALL),
    Case("flash_attention", then(QKV, 0.0, True, True), lambda q, k, v, *_: (attend(q, k, v, causal=True), probs(q, k, True)), terms=40, tag="probs", bad=((Q, K, V, 0.5, False, True), ConfigError, "return_softmax=True")),
    Case("flash_attention", QKV, lambda q, k, v, **_: attend(q, k, v, scale=0.6), kwargs={"softmax_scale": 0.6, "training": False}, terms=40, tag="scale"),
    Case("rotated", lambda rng: (list(floats((2, 3, 2, 4), (2, 3, 1, 4))(rng)), *ANGLES(rng), POSITIONS, False, False, 10000.0), turned, bad=(([Q[..., :3]],), ShapeError, "head_dim even")),
    Case("turned_by", floats((2, 3, 4), (3, 4), (3, 4)), lambda x, cos, sin: x * cos + np.stack([-x[..., 1], x[..., 0], -x[..., 3], x[..., 2]], -1) * sin),
    Case("turned_by", then(floats((2, 3, 4), (3, 4), (3, 4)), False), lambda x, cos, sin, _: x * cos + np.concatenate([-x[..., 2:], x[..., :2]], -1) * sin, tag="halves"),
    Case("fused_rotary_position_embedding", floats((2, 3, 2, 4), (2, 3, 1, 4)), rope, bad=((Q, None, None, Q), ConfigError, "one of sin and cos")),
    Case("fused_rotary_position_embedding", then(floats((2, 3, 2, 8)), None, None, None, None, None, False, False, 100.0), rope, tag="halves", bad=((Q, None, None, np.ones((2, 4), "float32"), np.ones((2, 4), "float32")), ShapeError, "hold 2 positions")),
    Case("fused_rotary_position_embedding", lambda rng: (*floats((3, 2, 2, 4))(rng), None, *floats((3, 2, 1, 4))(rng), *ANGLES(rng), None, True, True), rope, tag="time-major", bad=((Q, None, None, np.ones((2, 2), "float32"), np.ones((2, 2), "float32")), ShapeError, r"sin or cos \[2, 2\]")),
    Case("fused_rotary_position_embedding", lambda rng: (*floats((2, 3, 2, 4))(rng), None, None, None, None, POSITIONS, False), rope, tag="positions"),
]  # fmt: skip
