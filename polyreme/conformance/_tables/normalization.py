"""Contract rows of ops/normalization.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

MOVED = "the moved statistics carry no gradient, by design; y's is tested through batch_norm and instance_norm"


def floats(*shapes, **more):
    """Normal data, one array a shape; variances are made positive by `positive` (places of them)."""
    positive = more.get("positive", ())

    def make(rng):
        arrays = [rng.standard_normal(s).astype("float32") for s in shapes]
        return tuple(np.abs(a) + np.float32(0.5) if i in positive else a for i, a in enumerate(arrays))

    return make


def then(make, *args):
    return lambda rng: (*make(rng), *args)


def unit(x, dims, eps):
    x = x.astype("float64")
    return (x - x.mean(dims, keepdims=True)) / np.sqrt(x.var(dims, keepdims=True) + eps)


def per_channel(v, ndim, dim):
    return v.reshape([-1 if d == dim else 1 for d in range(ndim)])


def affine(y, w, b, dim):
    return y * per_channel(w, y.ndim, dim) + per_channel(b, y.ndim, dim)


def layer_norm(x, shape, w, b, eps=1e-5):
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    return unit(x, dims, eps) * w.reshape(shape) + b.reshape(shape)


def rms_norm(x, shape, w, eps):
    return x / np.sqrt(np.square(x.astype("float64")).mean((-2, -1), keepdims=True) + eps) * w


def batch_eval(x, m, v, w, b, eps=1e-5, dim=1):
    return affine((x - per_channel(m, x.ndim, dim)) / np.sqrt(per_channel(v, x.ndim, dim) + eps), w, b, dim)


def batch_train(x, m, v, w, b, momentum=0.9, eps=1e-5, data_format="NCHW"):
    dim = 1 if data_format == "NCHW" else x.ndim - 1
    dims = tuple(d for d in range(x.ndim) if d != dim)
    moved = [momentum * old + (1 - momentum) * new for old, new in ((m, x.mean(dims)), (v, x.var(dims)))]
    return affine(unit(x, dims, eps), w, b, dim), *moved


def instance_train(x, m, v, w, b, momentum=0.9, eps=1e-5):
    moved = [momentum * old + (1 - momentum) * new.mean(0) for old, new in ((m, x.mean(2)), (v, x.var(2)))]
    return affine(unit(x, (2,), eps), w, b, 1), *moved


def groups(x, n, eps, w, b, data_format="NCHW"):
    first = np.moveaxis(x, -1, 1) if data_format == "NHWC" else x
    y = unit(first.reshape(len(x), n, -1), (2,), eps).reshape(first.shape)
    y = affine(y, w, b, 1)
    return np.moveaxis(y, 1, -1) if data_format == "NHWC" else y


def neighbours(x, size, alpha, beta, k, data_format="NCHW"):
    first = np.moveaxis(x, -1, 1) if data_format == "NHWC" else x
    total = np.zeros(first.shape)
    for c in range(first.shape[1]):
        low, high = max(c - size // 2, 0), c + (size - 1) // 2 + 1
        total[:, c] = np.square(first[:, low:high]).sum(1)
    y = first / (k + alpha * total / size) ** beta
    return np.moveaxis(y, 1, -1) if data_format == "NHWC" else y


def normalized(x, p=2, axis=1, epsilon=1e-12):
    return x / np.maximum(np.linalg.norm(x, p, axis, keepdims=True), epsilon)


CHANNELS = floats((4, 3, 2), (3,), (3,), (3,), (3,), positive=(2,))
LAST = floats((2, 4, 2, 3), (3,), (3,), (3,), (3,), positive=(2,))
MEAN_OF_4 = (
    (np.ones((4, 3, 2), "float32"), np.ones(4, "float32"), np.ones(3, "float32")),
    ShapeError,
    r"running_mean \[4\]",
)
ONE_DIM, TWO_DIMS = (np.ones(3, "float32"),), (np.ones((2, 3), "float32"),)
IMAGE = np.ones((2, 3, 4), "float32")
V3 = np.ones(3, "float32")

CASES = [
    Case("layer_norm", lambda rng: (*floats((2, 3, 4))(rng), [3, 4], *floats((3, 4), (3, 4))(rng)), layer_norm, terms=12, bad=((np.ones((2, 3), "float32"), [2, 3, 4]), ShapeError, r"normalized_shape \[2, 3, 4\]")),
    Case("layer_norm", lambda rng: (*floats((2, 3, 4))(rng), [3, 4], *floats((12,), (12,))(rng), 0.1), layer_norm, terms=12, bad=((np.ones((2, 3), "float32"), 3, np.ones(2, "float32")), ShapeError, r"weight \[2\]"), tag="flat"),
    Case("layer_norm", lambda rng: (*floats((3, 4))(rng), 4), lambda x, n: unit(x, (1,), 1e-5), tag="bare", bad=((np.ones((2, 3), "float32"), 3, None, None, -1.0), ConfigError, "layer_norm: epsilon=-1.0; it must be at least 0")),
    Case("layer_norm", lambda rng: (rng.integers(0, 9, (3, 4)), 4), lambda x, n: unit(x, (1,), 1e-5).astype("float32"), no_grad="integers", tag="int"),
    Case("rms_norm", lambda rng: (*floats((2, 3, 4))(rng), [3, 4], *floats((3, 4))(rng), 0.1), rms_norm, terms=12, bad=((np.ones((2, 3), "float32"), [2]), ShapeError, r"normalized_shape \[2\]")),
    Case("rms_norm", lambda rng: (*floats((2, 4))(rng), 4), lambda x, n: x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-5), tag="bare"),
    Case("batch_norm_train", CHANNELS, batch_train, no_grad=MOVED, bad=MEAN_OF_4),
    Case("batch_norm_train", then(LAST, 0.6, 0.1, "NHWC"), batch_train, no_grad=MOVED, terms=16, bad=((IMAGE, V3, V3, None, None, 0.9, 1e-5, "CHW"), ConfigError, "data_format='CHW'"), tag="last"),
    Case("batch_norm_eval", CHANNELS, batch_eval, bad=MEAN_OF_4),
    Case("batch_norm", CHANNELS, batch_eval, bad=MEAN_OF_4),
    Case("batch_norm", then(LAST, False, 0.9, 1e-5, "NHWC"), lambda x, m, v, w, b, *_: batch_eval(x, m, v, w, b, dim=3), tag="last"),
    Case("sync_batch_norm", then(CHANNELS, True), lambda *a: batch_train(*a[:5])[0], bad=MEAN_OF_4),
    Case("batch_norm", then(CHANNELS, True), lambda *a: batch_train(*a[:5])[0], bad=((IMAGE, V3, V3, np.ones(2, "float32")), ShapeError, r"weight \[2\]"), tag="train"),
    Case("batch_norm", then(CHANNELS, True), lambda x, m, v, w, b, *_, **k: batch_eval(x, m, v, w, b), kwargs={"use_global_stats": True}, tag="global"),
    Case("batch_norm", CHANNELS, lambda *a, **k: batch_train(*a)[0], kwargs={"use_global_stats": False}, tag="not-global"),
    Case("instance_norm_train", CHANNELS, instance_train, no_grad=MOVED, bad=(ONE_DIM, ShapeError, "at least 2 dims")),
    Case("instance_norm", CHANNELS, lambda *a: instance_train(*a)[0], bad=((IMAGE, V3), ConfigError, "running_var missing")),
    Case("instance_norm", floats((2, 3)), lambda x: 0 * x, tag="2-D", no_grad="0 everywhere"),
    Case("instance_norm", floats((2, 3, 2, 2)), lambda x: unit(x, (2, 3), 1e-5), tag="bare", bad=((IMAGE, None, None, None, None, False), ConfigError, "use_input_stats=False")),
    Case("instance_norm", then(CHANNELS, False), lambda x, m, v, w, b, _: batch_eval(x, m, v, w, b), tag="running"),
    Case("group_norm", lambda rng: (*floats((2, 6, 3))(rng), 3, 1e-3, *floats((6,), (6,))(rng)), groups, terms=12, bad=((IMAGE, 2), ShapeError, "num_groups=2")),
    Case("group_norm", lambda rng: (*floats((2, 2, 2, 6))(rng), 2, 1e-3, *floats((6,), (6,))(rng), "NHWC"), groups, terms=16, tag="last"),
    Case("local_response_norm", then(floats((2, 5, 3)), 4, 0.5, 0.6, 2.0), neighbours, bad=((*TWO_DIMS, 2), ShapeError, "3 dims")),
    Case("local_response_norm", then(floats((2, 2, 3, 5)), 3, 0.5, 0.75, 1.0, "NHWC"), neighbours, tag="last"),
    Case("normalize", floats((3, 4)), normalized, bad=((V3,), ShapeError, "axis=1")),
    Case("normalize", then(floats((3, 4)), 3, 0), normalized, tag="p3"),
    Case("normalize", then(floats((3, 4)), float("inf"), -1), normalized, tag="inf"),
    Case("normalize", lambda rng: (np.float32([[3, 4], [0, 0]]),), normalized, no_grad="at 0 it is not differentiable; test_neural.py checks that it is finite", tag="zero"),
]  # fmt: skip
