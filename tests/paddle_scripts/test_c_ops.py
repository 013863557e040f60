"""paddle._C_ops: kernels take their arguments in PaddlePaddle's order, which is not always the public function's."""

import numpy as np
import pytest
from scipy import special

import polyreme
from polyreme.errors import AbsentError, ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.paddle_scripts import as_paddle

RNG = np.random.default_rng(0)
A = RNG.normal(size=(3, 4))
P, Q = RNG.uniform(0.1, 0.9, (2, 3, 4))
IMAGE, VOLUME = RNG.normal(size=(1, 4, 5, 6)), RNG.normal(size=(1, 2, 3, 4, 5))
KERNEL, KERNEL_3D = RNG.normal(size=(4, 3, 2, 3)), RNG.normal(size=(4, 1, 2, 2, 2))
EDGES = np.array([0, 1, 2, 0]), np.array([1, 2, 1, 0])


@pytest.fixture(scope="module", autouse=True)
def _as_paddle():
    with as_paddle():
        yield


def tensors(args):
    return [polyreme.to_tensor(value) if isinstance(value, np.ndarray) else value for value in args]


def c_op(name, *args):
    from paddle import _C_ops

    return getattr(_C_ops, name)(*tensors(args))


def call(function, *args, **kwargs):
    return function(*tensors(args), **kwargs)


def huber(x, y, delta):
    d = np.abs(x - y)
    return np.where(d <= delta, d * d / 2, delta * (d - delta / 2))


def cross_entropy(p, q):
    return -(q * np.log(p) + (1 - q) * np.log(1 - p))


def before(a, axis, start):
    """a one place on along axis, start in the first."""
    return np.insert(np.delete(a, -1, axis), 0, start, axis)


# kernel, its arguments, what it gives; of several results the first
CASES = [
    ("huber_loss", (A, P, 0.7), huber(A, P, 0.7)),
    ("bce_loss", (P, Q), cross_entropy(P, Q)),
    ("kldiv_loss", (P, Q, "none", True), np.exp(Q) * (Q - P)),
    ("kldiv_loss", (P, Q, "mean", False), (Q * (np.log(Q) - P)).mean()),
    ("sigmoid_cross_entropy_with_logits", (A, np.where(P < 0.5, -100, Q), None, True, -100),
     np.where(P < 0.5, 0, cross_entropy(special.expit(A), Q)) / (P >= 0.5).sum()),
    ("nll_loss", (np.log(P), np.array([1, 0, 3]), None, -100, "none"), -np.log(P[[0, 1, 2], [1, 0, 3]])),
    ("std", (A, [1], True, False, 1.0), A.std(1, ddof=1, keepdims=True)),
    ("var", (A, [], False, True, 0.0), A.var()),
    ("norm", (A, 1, 0.5, False), A / np.sqrt((A * A).sum(1, keepdims=True) + 0.5)),
    ("frobenius_norm", (A, [1], True, False), np.sqrt((A * A).sum(1, keepdims=True))),
    ("clip_by_norm", (A, 0.5), A * 0.5 / np.linalg.norm(A)),
    ("cumsum", (A, 1, False, True, True), before(A[:, ::-1], 1, 0).cumsum(1)[:, ::-1]),
    ("cumprod", (A, 0, True, False), before(A, 0, 1).cumprod(0)),
    ("logcumsumexp", (A, -1, True, True, False), [-np.inf, *np.log(np.exp(A).cumsum()[:-1])]),
    ("histogram", (P, Q, 3, 0.2, 0.8, True), np.histogram(P, 3, (0.2, 0.8), density=True, weights=Q)[0]),
    ("index_add", (A, np.array([0, 2]), P[:2], 0), A + [[1], [0], [0]] * P[0] + [[0], [0], [1]] * P[1]),
    ("pad", (A, [1, 0, 2, 1], 7.0), np.pad(A, [(1, 0), (2, 1)], constant_values=7)),
    ("einsum", ([polyreme.to_tensor(A), polyreme.to_tensor(P)], "ij,kj->ik"), A @ P.T),
    ("matrix_rank", (A @ np.diag([1, 0.1, 0, 0]), 0.5, False, False), 1),
    ("eigvalsh", (A @ A.T, "L", False), np.linalg.eigvalsh(A @ A.T)),
    ("fft_r2c", (A, [0, 1], "ortho", False, True), np.conj(np.fft.rfft2(A, norm="ortho"))),
    ("fft_c2r", (A + 0j, [0, 1], "backward", False, 5), np.fft.irfft2(A, (3, 5))),
    ("unique", (np.array([3, 1, 3]), False, False, True, [], "int64"), [1, 3]),
    ("mish", (A, 20.0), A * np.tanh(np.log1p(np.exp(A)))),
    ("rrelu", (A, 0.1, 0.3, True), np.where(A > 0, A, 0.2 * A)),
    ("prelu", (A, np.array([0.5]), "NCHW", "all"), np.where(A > 0, A, A / 2)),
    ("prelu", (IMAGE, P[0, :3].repeat(2).reshape(1, 1, 1, 6), "NHWC", "channel"),
     np.where(IMAGE > 0, IMAGE, IMAGE * P[0, :3].repeat(2))),
    ("prelu", (A, P[:1], "NCHW", "element"), np.where(A > 0, A, A * P[0])),
    ("send_u_recv", (A, *EDGES, "MEAN", [0]), [A[0], (A[0] + A[2]) / 2, A[1]]),
    ("segment_pool", (A, np.array([0, 0, 1]), "SUM"), [A[0] + A[1], A[2]]),
    ("repeat_interleave", (A, 2, 1, 8), A.repeat(2, 1)),
    ("expand_as", (A[:1], None, [2, 4]), A[[0, 0]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "want"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_kernels_compute_what_their_arguments_say(name, args, want):
    got = c_op(name, *args)
    got = got[0] if isinstance(got, (tuple, list)) else got
    # at most 64 rounded terms of float64
    np.testing.assert_allclose(np.asarray(got), want, rtol=64 * 2.0**-52, atol=64 * 2.0**-52)


# kernel, its arguments, the public function and how it is called for the same
WINDOWS = [
    ("conv2d_transpose", (IMAGE, KERNEL, [2, 1], [1, 0], [], [9, 8], "EXPLICIT", 1, [1, 1], "NCHW"),
     F.conv2d_transpose, (IMAGE, KERNEL), {"stride": [2, 1], "padding": [1, 0], "output_size": [9, 8]}),
    ("depthwise_conv2d_transpose", (IMAGE, KERNEL[:, :1], [2, 2], [0, 0], [1, 1], [], "EXPLICIT", 4, [1, 1], "NCHW"),
     F.conv2d_transpose, (IMAGE, KERNEL[:, :1]), {"stride": 2, "output_padding": 1, "groups": 4}),
    ("conv3d", (VOLUME, KERNEL_3D, [1, 2, 1], [1, 0, 1], "EXPLICIT", 2, [1, 1, 2], "NCDHW"),
     F.conv3d, (VOLUME, KERNEL_3D), {"stride": [1, 2, 1], "padding": [1, 0, 1], "groups": 2, "dilation": [1, 1, 2]}),
    ("conv3d_transpose", (VOLUME, KERNEL_3D[:2], [2, 2, 2], [1, 1, 1], [], [], "EXPLICIT", 1, [1, 1, 1], "NCHW"),
     F.conv3d_transpose, (VOLUME, KERNEL_3D[:2]), {"stride": 2, "padding": 1}),
    ("pool3d", (VOLUME, [2, 2, 2], [1, 2, 2], [1, 1, 1], True, False, "NCDHW", "avg", False, False, "EXPLICIT"),
     F.avg_pool3d, (VOLUME, 2, [1, 2, 2], 1, True, False), {}),
    ("pool2d", (IMAGE, [2, 3], [1, 1], [0, 0], False, True, "NHWC", "max", False, True, "EXPLICIT"),
     lambda x: F.adaptive_max_pool2d(x.transpose([0, 3, 1, 2]), [2, 3]).transpose([0, 2, 3, 1]), (IMAGE,), {}),
    ("unfold", (IMAGE, [2, 3], [1, 2], [1, 0, 1, 0], [1, 1]),
     F.unfold, (IMAGE, [2, 3], [1, 2], [1, 0, 1, 0]), {}),
    ("bilinear_interp", (IMAGE, None, None, None, "NCHW", -1, 9, 7, [], "bilinear", False, 1),
     F.interpolate, (IMAGE, [9, 7]), {"mode": "bilinear", "align_mode": 1}),
    ("nearest_interp", (IMAGE, None, None, None, "NHWC", -1, -1, -1, [2.0, 1.5], "nearest", False, 0),
     F.interpolate, (IMAGE, None, [2.0, 1.5]), {"data_format": "NHWC"}),
    ("bicubic_interp", (IMAGE, np.array([9, 7]), None, None, "NCHW", -1, -1, -1, [], "bicubic", True, 0),
     F.interpolate, (IMAGE, [9, 7]), {"mode": "bicubic", "align_corners": True}),
    ("trilinear_interp", (VOLUME, None, None, None, "NCHW", 4, 3, 9, [], "trilinear", False, 0),
     F.interpolate, (VOLUME, [4, 3, 9]), {"mode": "trilinear"}),
    ("linear_interp", (IMAGE[0], None, None, None, "NHWC", -1, -1, 8, [], "linear", False, 0),
     F.interpolate, (IMAGE[0], [8]), {"mode": "linear", "data_format": "NWC"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "public", "public_args", "settings"), WINDOWS, ids=[w[0] for w in WINDOWS])
def test_kernels_of_windows_are_the_public_functions(name, args, public, public_args, settings):
    np.testing.assert_array_equal(c_op(name, *args).numpy(), call(public, *public_args, **settings).numpy())


def test_kernels_return_as_many_values_as_paddles():
    qkv, ends = RNG.normal(size=(2, 4, 3, 2, 8)), np.array([0, 4, 8])
    numbers = {
        "layer_norm": ((A, None, None, 1e-5, 1), 1), "group_norm": ((IMAGE, None, None, 1e-5, 2, "NCHW"), 1),
        "dropout": ((A, None, 0.5, True, "upscale_in_train", 0, False), 1), "rms_norm": ((A, None, [4], 1e-5), 2),
        "median": ((A, [1], False, "avg"), 2), "lu": ((A[:, :3], True), 3),
        "accuracy": ((P, np.array([[0], [1], [2]]), np.array([[0], [2], [2]])), 3),
        "max_pool2d_with_index": ((IMAGE, [2, 2], [2, 2], [0, 0], False, False, True), 2),
        "fused_dropout_add": ((A, P, None, 0.5, True, "upscale_in_train", 0, False), 2),
        "flash_attn_qkvpacked": ((qkv, None, None, 0.0, True, False, True, ""), 4),
        "flash_attn_varlen_qkvpacked": (
            (qkv.reshape(8, 3, 2, 8), ends, ends, None, None, 4, 4, 1.0, 0.0, True, False, True, "", False), 2),
        "flashmask_attention": ((*qkv.transpose(2, 0, 1, 3, 4), None, None, 0.0, True, False, True, ""), 4),
    }  # fmt: skip
    for name, (args, number) in numbers.items():
        got = c_op(name, *args)
        assert (len(got) if isinstance(got, tuple) else 1) == number, name
    packed = c_op("flash_attn_qkvpacked", *numbers["flash_attn_qkvpacked"][0])[0].numpy()
    mask = c_op("flashmask_attention", *numbers["flashmask_attention"][0])[0].numpy()
    np.testing.assert_allclose(packed, mask, rtol=64 * 2.0**-52, atol=64 * 2.0**-52)


def test_kernels_in_place_change_their_first_tensor():
    x = polyreme.to_tensor(A)
    assert c_op("cumsum_", x, 0, False, False, False) is x
    np.testing.assert_array_equal(x.numpy(), A.cumsum(0))
    np.testing.assert_array_equal(c_op("index_add_", x, np.array([1]), P[:1], 0).numpy()[1], A[:2].sum(0) + P[0])
    np.testing.assert_array_equal(c_op("fill_", x, 3.0).numpy(), np.full((3, 4), 3.0))


@pytest.mark.parametrize(("name", "args", "error", "words"), [
    ("prelu", (A, P[0], "NCHW", "all"), ShapeError, r"alpha \[4\] for x \[3, 4\]; mode='all' needs \[1\]"),
    ("prelu", (A, P[0], "NCHW", "row"), ConfigError, "mode='row'; it is 'all', 'channel' or 'element'"),
    ("bilinear_interp", (IMAGE, None, None, None, "NCHW", -1, 9, 7, [], "nearest", False, 1), ConfigError,
     "interp_method='nearest'; this kernel is 'bilinear'"),
    ("nearest_interp", (IMAGE, np.array([2, 2]), None, None, "NCHW", -1, 9, 7, [2.0], "nearest", False, 1), ConfigError,
     "sizes and scales; give one of them"),
    ("pool2d", (IMAGE, [2, 3], [1, 1], [0, 0], False, True, "NCHW", "sum", False, True, "EXPLICIT"), ConfigError,
     "pooling_type='sum'; it is 'avg' or 'max'"),
    ("lp_pool2d", (IMAGE, [2, 2], [2, 2], [0, 0], False, True, "NCHW", "", True, False, "EXPLICIT", 2.0), ConfigError,
     "global_pooling=True has no meaning"),
    ("psroi_pool", (IMAGE, P[:1], np.array([1]), 2, 2, 3, 1.0), ShapeError, "x has 4 channels; .* need 12"),
    ("class_center_sample", (np.array([1]), 8, 4, 0, 0, 1, True, 3), ConfigError, "fix_seed=True has no meaning"),
    ("uniform_inplace", (A, 0.0, 1.0, 0, 2, 0, 1.0), ConfigError, "diag_num=2 has no meaning"),
    ("adam_", (A,), AbsentError, "no public function here is called after"),
])  # fmt: skip
def test_kernels_refuse_what_they_do_not_do(name, args, error, words):
    with pytest.raises(error, match=words):
        c_op(name, *args)
