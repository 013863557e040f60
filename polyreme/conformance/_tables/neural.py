"""Contract rows of ops/neural.py."""

import jax
import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

KEY = jax.random.PRNGKey(5)
RANDOM = "random numbers differ from call to call"
IDS = np.array([[0, 3], [1, 1]])
FLOOR = -1.7580993408473766  # selu at -inf


def floats(*shapes):
    return lambda rng: tuple(rng.standard_normal(s).astype("float32") for s in shapes)


def then(make, *args):
    return lambda rng: (*make(rng), *args)


def looked_up(*args):
    return lambda rng: (IDS, *floats((4, 3))(rng), *args)


def drawn(shape, p):
    """The elements that KEY keeps."""
    return np.asarray(jax.random.bernoulli(KEY, 1 - p, shape))


def dropped(x, p, axis=None, mode="upscale_in_train", key=None):
    shape = x.shape
    if axis is not None:
        kept = [a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
        shape = tuple(z if d in kept else 1 for d, z in enumerate(x.shape))
    return np.where(drawn(shape, p), x / (1 - p) if mode == "upscale_in_train" else x, 0)


def alpha_dropped(x, p, dims=None, key=None):
    shape = x.shape if dims is None else x.shape[:dims] + (1,) * (x.ndim - dims)
    a = (1 - p + p * (1 - p) * FLOOR**2) ** -0.5
    return a * np.where(drawn(shape, p), x, FLOOR) - a * FLOOR * p


def renormed(weight, ids, limit, p):
    norm = np.linalg.norm(weight, p, 1, keepdims=True)
    used = np.isin(np.arange(len(weight)), ids)[:, None]
    return np.where(used & (norm > limit), weight * limit / norm, weight)


def share_kept(p, per=1):
    """Check that ones were kept as 1 / (1 - p) with probability 1 - p, `per` elements together."""

    def check(got):
        kept = got.reshape(-1, per) != 0
        assert np.all(kept.all(1) | ~kept.any(1)), "elements of one draw differ"
        np.testing.assert_allclose(got[got != 0], 1 / (1 - p), rtol=4 * np.finfo("float32").eps)
        # a mean of n draws with deviation sqrt(p (1 - p)), six of them wide
        assert abs(kept[:, 0].mean() - (1 - p)) <= 6 * np.sqrt(p * (1 - p) / len(kept))

    return check


def check_moments(got):
    # mean 0 and variance 1 stay; the kept and the dropped are bounded by 4 deviations
    assert abs(got.mean()) <= 6 / np.sqrt(got.size)
    assert abs(got.var() - 1) <= 6 * np.sqrt(3 / got.size)
    assert len(np.unique(got)) > 2


def check_alpha_channels(got):
    flat = got.reshape(-1, got.shape[-1])
    assert np.all((flat == flat[:, :1]).all(1)), "a channel was dropped in part"
    assert len(np.unique(flat[:, 0])) == 2


def cosine(x, y, axis=1, eps=1e-8):
    return (x * y).sum(axis) / np.maximum(np.linalg.norm(x, axis=axis) * np.linalg.norm(y, axis=axis), eps)


def distance(x, y, p=2.0, eps=1e-6, keepdim=False):
    return np.linalg.norm(x - y + eps, p, -1, keepdims=keepdim)


def ones(*shape):
    return lambda rng: (np.ones(shape, "float32"),)


X = np.ones((3, 4), "float32")
BAD_P = ((X, 1.5), ConfigError, "p=1.5")
NORMAL = np.random.default_rng(8).standard_normal(4000).astype("float32")
LINEAR = floats((2, 3, 4), (4, 5), (5,))

CASES = [
    Case("linear", LINEAR, lambda x, w, b: x @ w + b, bad=((X, X), ShapeError, "do not fit")),
    Case("gathered_linears", lambda rng: (X, [*floats((4, 5), (4, 3))(rng)]), lambda x, weights: [x @ w for w in weights]),
    Case("scattered_linear", floats((2, 3, 4), (4, 5)), lambda x, w: x @ w),
    Case("ring_gradient_linear", floats((2, 3, 4), (4, 5)), lambda x, w: x @ w),
    Case("linear", floats((4,), (4, 5), (1, 5)), lambda x, w, b: x @ w + b, tag="row"),
    Case("linear", floats((2, 4), (4, 5), (2, 5)), lambda x, w, b: x @ w + b, tag="rows"),
    Case("linear", lambda rng: (rng.integers(-3, 3, (3, 4)), *floats((4, 5))(rng)), lambda x, w: (x @ w).astype("float32"), tag="int", bad=((X, X.T, np.ones(2, "float32")), ShapeError, r"bias \[2\]")),
    Case("bilinear", floats((3, 4), (3, 5), (2, 4, 5), (1, 2)), lambda x, y, w, b: np.einsum("ni,oij,nj->no", x, w, y) + b, terms=24, bad=((X, X, np.ones((2, 4, 3), "float32")), ShapeError, "bilinear")),
    Case("bilinear", floats((3, 4), (3, 5), (2, 4, 5)), lambda x, y, w: np.einsum("ni,oij,nj->no", x, w, y), terms=24, tag="bare", bad=((X, X, np.ones((2, 4, 4), "float32"), X), ShapeError, r"bias \[3, 4\]")),
    Case("embedding_rows", looked_up(), lambda i, w: w[i], bad=((X, X), DTypeError, "x is float32")),
    Case("embedding_rows", lambda rng: (np.array([-1, 4, 1]), X.T), lambda i, w: np.stack([w[0] * np.nan, w[0] * np.nan, w[1]]), no_grad="NaN is not differentiable", tag="range", bad=((IDS, X[0]), ShapeError, "2 dims")),
    Case("embedding", looked_up(), lambda i, w: w[i], bad=((IDS + 1, X.T), IndexError, r"id: 4 at \[0, 1\]")),
    Case("embedding", looked_up(-1), lambda i, w, p: w[i] * (i != 3)[..., None], tag="padding", bad=((IDS, X.T, 4), ShapeError, "padding_idx=4")),
    Case("embedding", looked_up(None, 0.5), lambda i, w, p, m: renormed(w, i, m, 2)[i], no_grad="the weight itself is changed first", tag="max-norm", bad=((IDS - 1, X.T), IndexError, "id: -1")),
    Case("embedding", looked_up(), lambda i, w, **_: w[i], kwargs={"scale_grad_by_freq": True, "sparse": True}, no_grad="scaled by design; test_neural.py checks it", tag="frequency"),
    Case("embedding_within", lambda rng: (*floats((4, 3))(rng), IDS, 0.5, 1.0), renormed, no_grad="the scaling of a weight in place"),
    Case("dropout_train", then(floats((3, 4)), 0.3), dropped, kwargs={"key": KEY}),
    Case("dropout_train", then(floats((3, 4)), 0.3, (0, -1), "downscale_in_infer"), dropped, kwargs={"key": KEY}, tag="mode"),
    Case("dropout_train", then(floats((3, 4)), 0.3, 1), dropped, kwargs={"key": KEY}, tag="axis"),
    Case("dropout_train", lambda rng: (np.ones(4000, "float32"), 0.3), check=share_kept(0.3), no_grad=RANDOM, tag="share", bad=((X, 0.5, 2), ShapeError, "axis=2")),
    Case("scaled_by_keep", then(floats((3, 4)), 0.3), lambda x, p: x * 0.7),
    Case("dropout", lambda rng: (np.ones((1000, 4), "float32"), 0.3), check=share_kept(0.3), no_grad=RANDOM, bad=BAD_P),
    Case("dropout", lambda rng: (np.ones((1000, 4), "float32"), 0.3, 0), check=share_kept(0.3, 4), no_grad=RANDOM, tag="axis", bad=((X, 0.5, None, True, False, "upscale"), ConfigError, "mode='upscale'")),
    Case("dropout", then(floats((3, 4)), 0.3, None, False), lambda x, *_: x, tag="eval"),
    Case("dropout", then(floats((3, 4)), 0.3, None, False, False, "downscale_in_infer"), lambda x, *_: x * 0.7, tag="eval-downscale"),
    Case("dropout", then(floats((3, 4)), 0.0), lambda x, p: x, tag="p0"),
    Case("dropout", then(floats((3, 4)), 1.0), lambda x, p: x * 0, tag="p1"),
    Case("dropout", then(floats((3, 4)), 1), lambda x, p: x * 0, tag="whole"),
    Case("dropout1d", then(ones(50, 40, 3), 0.4), check=share_kept(0.4, 3), no_grad=RANDOM, bad=((X[0],), ShapeError, "N, C, L")),
    Case("dropout2d", then(ones(50, 40, 3, 2), 0.4), check=share_kept(0.4, 6), no_grad=RANDOM, bad=((X,), ShapeError, "needs 4")),
    Case("dropout2d", then(ones(50, 3, 2, 40), 0.4, True, "NHWC"), check=lambda got: share_kept(0.4, 6)(np.moveaxis(got, -1, 1)), no_grad=RANDOM, tag="last", bad=((X[None, None], 0.5, True, "NCL"), ConfigError, "data_format")),
    Case("dropout3d", then(ones(50, 40, 3, 1, 2), 0.4), check=share_kept(0.4, 6), no_grad=RANDOM, bad=((X,), ShapeError, "needs 5")),
    Case("alpha_dropout_train", then(floats((3, 4)), 0.3), alpha_dropped, kwargs={"key": KEY}),
    Case("alpha_dropout_train", then(floats((3, 4, 2)), 0.3, 2), alpha_dropped, kwargs={"key": KEY}, tag="dims"),
    Case("alpha_dropout", lambda rng: (NORMAL, 0.3), check=check_moments, no_grad=RANDOM, bad=BAD_P),
    Case("alpha_dropout", then(floats((3, 4)), 0.3, False), lambda x, *_: x, tag="eval"),
    Case("feature_alpha_dropout", then(ones(6, 5, 3), 0.4), check=check_alpha_channels, no_grad=RANDOM, bad=((X[0],), ShapeError, "at least 2 dims")),
    Case("cosine_similarity", floats((3, 4), (3, 4)), cosine, bad=((X[0], X[0]), ShapeError, "axis=1")),
    Case("cosine_similarity", then(floats((3, 4), (3, 4)), 1, 3.0), cosine, tag="eps"),
    Case("cosine_similarity", then(floats((2, 3, 4), (3, 1)), -2), cosine, tag="broadcast", bad=((X, X.T), ShapeError, "cosine_similarity")),
    Case("pairwise_distance", floats((3, 4), (3, 4)), distance, bad=((X, X.T), ShapeError, "pairwise_distance")),
    Case("pairwise_distance", then(floats((3, 4), (4,)), 3, 1e-6, True), distance, tag="p3"),
    Case("pairwise_distance", then(floats((3, 4), (3, 4)), float("inf")), distance, tag="inf"),
    Case("mask_of_lengths", lambda rng: (np.array([[1], [3]]), 4, "bool"), lambda x, n, d: np.arange(n) < x[..., None], no_grad="bool"),
    Case("sequence_mask", lambda rng: (np.array([1, 3, 0]),), lambda x: (np.arange(3) < x[:, None]).astype("int64"), no_grad="integers", host="the longest length is the result's size", bad=((np.array([1]), -2), ShapeError, "maxlen=-2")),
    Case("sequence_mask", lambda rng: (np.array([1, 3]), 5, "float32"), lambda x, n, d: np.float32(np.arange(5) < x[:, None]), no_grad="of integers", tag="maxlen"),
]  # fmt: skip
