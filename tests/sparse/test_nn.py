"""Layers over sparse Tensors against dense convolution by loops, dense softmax and statistics by hand."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import sparse
from polyreme.errors import ConfigError, HostValueError, ShapeError
from polyreme.sparse import nn
from polyreme.sparse.nn import functional as F
from tests.sparse.reference import RTOL, conv_dense, coo, csr, random_dense, value, weighted

rng = np.random.default_rng(2)


def image(*shape, density=0.3):
    """A dense image in which most pixels are 0 in every channel."""
    keep = rng.random(shape[:-1]) < density
    return (rng.standard_normal(shape) * keep[..., None]).astype("float32")


def reached(x, kernel, stride, pads, dilation):
    """Where a window holds a pixel: convolution of what is stored with ones."""
    stored = (x != 0).any(-1, keepdims=True).astype("float32")
    return conv_dense(stored, np.ones((*kernel, 1, 1), "float32"), stride, pads, dilation)[..., 0] > 0


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize(
    ("stride", "pads", "dilation"), [((1, 1), (0, 0), (1, 1)), ((2, 1), (1, 2), (1, 2))], ids=["plain", "strided"]
)
def test_conv2d(stride, pads, dilation):
    x = image(2, 5, 6, 3)
    weight, bias = rng.standard_normal((3, 2, 3, 4)).astype("float32"), rng.standard_normal(4).astype("float32")
    leaf = coo(x, 3)
    w, b = (paddle.to_tensor(v, stop_gradient=False) for v in (weight, bias))
    got = F.conv2d(leaf, w, b, list(stride), list(pads), list(dilation))
    where = reached(x, (3, 2), stride, pads, dilation)
    want = (conv_dense(x, weight, stride, pads, dilation) + bias) * where[..., None]
    assert (got.nnz(), got.is_coalesced(), got.shape) == (where.sum(), True, list(want.shape))
    np.testing.assert_allclose(value(got), want, rtol=RTOL, atol=RTOL * np.abs(want).max())
    # the gradients are those of a dense convolution kept where it is stored
    weighted(got).backward()
    dense = paddle.to_tensor(x.transpose(0, 3, 1, 2), stop_gradient=False)
    w2 = paddle.to_tensor(weight.transpose(3, 2, 0, 1), stop_gradient=False)
    full = paddle.nn.functional.conv2d(dense, w2, None, stride, pads, dilation).transpose([0, 2, 3, 1])
    weighted(full * paddle.to_tensor(where[..., None].astype("float32"))).backward()
    np.testing.assert_allclose(w.grad.numpy(), w2.grad.numpy().transpose(2, 3, 1, 0), rtol=RTOL, atol=1e-4)
    kept = np.where(x != 0, dense.grad.numpy().transpose(0, 2, 3, 1), 0)
    np.testing.assert_allclose(value(leaf.grad), kept, rtol=RTOL, atol=1e-4)
    assert b.grad is not None


@pytest.mark.slow_cases("kernel0")
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 2)])
def test_conv3d_and_its_submanifold_kind(kernel):
    x = image(1, 4, 4, 4, 2)
    conv, submanifold = (
        nn.Conv3D(2, 3, kernel, stride=2, padding="SAME"),
        nn.SubmConv3D(2, 3, kernel, key="a", backend="igemm"),
    )
    got = conv(coo(x, 4))
    assert got.shape == [1, 2, 2, 2, 3]
    pads = [max(2 + k - 4, 0) // 2 if k > 2 else 0 for k in kernel]
    padded = np.pad(x, [(0, 0), *((p, k) for p, k in zip(pads, kernel, strict=True)), (0, 0)])
    want = conv_dense(padded, conv.weight.numpy(), (2, 2, 2), (0, 0, 0), (1, 1, 1))[:, :2, :2, :2]
    np.testing.assert_allclose(value(got), want, rtol=RTOL, atol=1e-5)
    # submanifold: centred windows, stored where the image is, whatever the order of its pixels
    shuffled = coo(x, 4)
    order = rng.permutation(shuffled.nnz())
    shuffled = sparse.sparse_coo_tensor(shuffled.indices()[:, order], shuffled.values()[order], x.shape)
    got = submanifold(shuffled)
    assert got.indices() is shuffled.indices()
    padded = np.pad(x, [(0, 0), *(((k - 1) // 2, k // 2) for k in kernel), (0, 0)])
    want = conv_dense(padded, submanifold.weight.numpy(), (1, 1, 1), (0, 0, 0), (1, 1, 1)) * (x != 0).any(
        -1, keepdims=True
    )
    np.testing.assert_allclose(value(got), want, rtol=RTOL, atol=1e-5)
    assert [F.subm_conv3d_igemm, F.subm_conv2d_igemm] == [F.subm_conv3d, F.subm_conv2d]


def test_groups_repeated_pixels_and_2d_layers():
    x = image(1, 4, 4, 4, density=0.6)
    layer, dense = (
        nn.SubmConv2D(4, 6, 3, groups=2, padding=1),
        paddle.nn.Conv2D(4, 6, 3, groups=2, padding=1, bias=False),
    )
    dense.weight.set_value(layer.weight.numpy().transpose(3, 2, 0, 1))
    pixels = coo(x, 3)
    indices = paddle.concat([pixels.indices(), pixels.indices()], 1)
    doubled = sparse.sparse_coo_tensor(indices, paddle.concat([pixels.values() * 0.5, pixels.values() * 0.5]), x.shape)
    want = dense(paddle.to_tensor(x.transpose(0, 3, 1, 2))).numpy().transpose(0, 2, 3, 1) * (x != 0)[..., :1]
    want = np.where((x != 0).any(-1, keepdims=True), want, 0)
    np.testing.assert_allclose(value(layer(doubled)), want, rtol=RTOL, atol=1e-5)
    assert nn.Conv2D(4, 6, 3, stride=2)(pixels).shape == [1, 1, 1, 6]
    empty = sparse.sparse_coo_tensor(np.zeros((3, 0), int), np.zeros((0, 4), "float32"), [1, 4, 4, 4])
    assert (nn.Conv2D(4, 6, 3)(empty).nnz(), layer(empty).nnz()) == (0, 0)


def test_max_pool3d():
    x = image(1, 4, 4, 5, 2, density=0.4)
    leaf = coo(x, 4)
    for ceil, size in ((False, 2), (True, 3)):
        got = nn.MaxPool3D(2, ceil_mode=ceil)(leaf)
        assert got.shape == [1, 2, 2, size, 2]
        stored = np.where((x != 0).any(-1, keepdims=True), x, -np.inf)
        stored = np.pad(stored, [(0, 0)] * 3 + [(0, 1), (0, 0)], constant_values=-np.inf)[:, :, :, : 2 * size]
        want = stored.reshape(1, 2, 2, 2, 2, size, 2, 2).max((2, 4, 6))
        np.testing.assert_array_equal(value(got), np.where(np.isfinite(want), want, 0))
    weighted(got).backward()
    assert np.count_nonzero(value(leaf.grad)) == np.isfinite(want).sum()


def test_softmax():
    dense = random_dense(rng, (3, 4, 2), 0.6)

    def expected(x, axis):
        e = np.where(x != 0, np.exp(x), 0)
        total = e.sum(axis, keepdims=True)
        return e / np.where(total == 0, 1, total)

    for make in (coo, csr):
        np.testing.assert_allclose(value(nn.Softmax()(make(dense))), expected(dense, -1), rtol=RTOL)
    for axis in (0, 1):
        np.testing.assert_allclose(value(F.softmax(coo(dense), axis)), expected(dense, axis), rtol=RTOL)
    pixels = image(3, 4, 2, density=0.9)
    np.testing.assert_allclose(value(F.softmax(coo(pixels, 2), 2)), expected(pixels, 2), rtol=RTOL)
    np.testing.assert_allclose(value(F.softmax(coo(pixels, 2), 1)), expected(pixels, 1), rtol=RTOL)
    leaf = csr(dense[0])
    weighted(F.softmax(leaf)).backward()
    full = paddle.to_tensor(np.where(dense[0] != 0, dense[0], -np.inf), stop_gradient=False)
    rows = (dense[0] != 0).any(1)
    weighted(paddle.where(full.isinf(), paddle.zeros([1]), paddle.nn.functional.softmax(full))).backward()
    np.testing.assert_allclose(value(leaf.grad)[rows], np.nan_to_num(full.grad.numpy())[rows], rtol=RTOL, atol=1e-6)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("masks", [False, True])
def test_attention_equals_dense(masks):
    q, k, v = (rng.standard_normal((2, 2, 4, 3)).astype("float32") for _ in range(3))
    pattern = np.tril(np.ones((4, 4, 4), "float32"))
    padding, allowed = np.ones((2, 4), "float32"), np.ones((4, 4), "float32")
    padding[1, 0] = allowed[2, 1] = 0
    given = [paddle.to_tensor(m) for m in (padding, allowed)] if masks else []
    leaves = [paddle.to_tensor(a, stop_gradient=False) for a in (q, k, v)]
    got = F.attention(*leaves, csr(pattern, False), *given)
    keep = pattern.reshape(2, 2, 4, 4) * (padding[:, None, None] * allowed if masks else 1)
    scores = np.where(keep, np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(3)), 0)
    total = scores.sum(-1, keepdims=True)
    np.testing.assert_allclose(got.numpy(), scores / np.where(total == 0, 1, total) @ v, rtol=RTOL, atol=1e-6)
    got.sum().backward()
    assert all(np.isfinite(leaf.grad.numpy()).all() for leaf in leaves)


def test_activations_and_normalization():
    x = image(1, 3, 3, 3, 2) * 9
    leaf = coo(x, 4)
    np.testing.assert_array_equal(value(nn.ReLU()(leaf)), np.maximum(x, 0))
    np.testing.assert_array_equal(value(nn.ReLU6()(leaf)), np.clip(x, 0, 6))
    np.testing.assert_allclose(value(nn.LeakyReLU(0.1)(leaf)), np.where(x > 0, x, 0.1 * x), rtol=RTOL)
    norm, stored = nn.BatchNorm(2), leaf.values().numpy()
    got = norm(leaf).values().numpy()
    np.testing.assert_allclose(got, (stored - stored.mean(0)) / np.sqrt(stored.var(0) + 1e-5), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(norm._mean.numpy(), 0.1 * stored.mean(0), rtol=1e-4)
    norm.eval()
    model = paddle.nn.Sequential(norm, nn.ReLU())
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(synced[0]) is nn.SyncBatchNorm
    np.testing.assert_array_equal(value(synced(leaf)), value(nn.ReLU()(norm(leaf))))
    assert type(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm(2))) is nn.SyncBatchNorm
    assert "negative_slope=0.1, " not in repr(nn.LeakyReLU(0.1))
    assert repr(nn.SubmConv3D(2, 3, 3)).endswith("data_format=NDHWC)")


@pytest.mark.slow
def test_a_submanifold_network_is_captured():
    x = image(1, 3, 3, 3, 2)
    model = paddle.nn.Sequential(nn.SubmConv3D(2, 3, 3), nn.BatchNorm(3), nn.ReLU(), nn.SubmConv3D(3, 1, 1))
    leaf = coo(x, 4).coalesce()
    model.eval()
    want = value(model(leaf))
    np.testing.assert_allclose(value(paddle.jit.to_static(lambda t: model(t))(leaf)), want, rtol=RTOL, atol=1e-5)
    with pytest.raises(HostValueError, match="coalesce"):
        paddle.jit.to_static(lambda t: model(t))(coo(x, 4))
    with pytest.raises(HostValueError, match="subm_conv keeps the indices"):
        paddle.jit.to_static(lambda t: nn.Conv3D(2, 1, 2)(t))(leaf)


X = np.ones((1, 3, 3, 2), "float32")


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: F.conv2d(coo(X), paddle.ones([2, 2, 2, 1])), ShapeError, "channels are dense"),
        (lambda: F.conv2d(csr(X[0]), paddle.ones([2, 2, 2, 1])), TypeError, "needs a SparseCooTensor"),
        (lambda: F.conv2d(coo(X, 3), paddle.ones([2, 2, 3, 1])), ShapeError, "channels / groups"),
        (lambda: F.conv2d(coo(X, 3), paddle.ones([4, 2, 2, 1])), ShapeError, "does not fit"),
        (lambda: F.conv2d(coo(X, 3), paddle.ones([2, 2, 2, 1]), data_format="NCHW"), ConfigError, "only choice"),
        (lambda: F.subm_conv2d(coo(X, 3), paddle.ones([3, 3, 2, 1]), stride=2), ConfigError, "so it is 1"),
        (lambda: F.subm_conv2d(coo(X, 3), paddle.ones([3, 3, 2, 1]), padding=2), ConfigError, "windows are centred"),
        (lambda: F.softmax(csr(X[0]), 0), ShapeError, "only the last"),
        (lambda: F.relu(paddle.ones([2])), TypeError, "sparse.relu"),
        (lambda: nn.Conv2D(3, 4, 3, groups=2), ConfigError, "multiples of groups=2"),
        (lambda: nn.Conv2D(3, 4, 3, padding_mode="reflect"), ConfigError, "padding_mode='reflect'"),
        (lambda: nn.SubmConv2D(3, 4, 3, backend="cudnn"), ConfigError, "backend='cudnn'"),
        (lambda: nn.MaxPool3D(2, return_mask=True), ConfigError, "return_mask=True"),
        (lambda: nn.BatchNorm(2, data_format="NCDHW"), ConfigError, "NDHWC or NHWC"),
        (lambda: F.attention(*[paddle.ones([1, 1, 3, 2])] * 3, paddle.ones([1, 3, 3])), TypeError, "SparseCsrTensor"),
        (lambda: F.attention(*[paddle.ones([1, 3, 2])] * 3, csr(X[0])), ShapeError, "needs three of"),
        (lambda: F.attention(*[paddle.ones([1, 1, 2, 2])] * 3, csr(X[0])), ShapeError, "sparse_mask"),
        (
            lambda: F.attention(*[paddle.ones([3, 1, 3, 2])] * 3, csr(np.ones((3, 3, 3))), paddle.ones([3])),
            ShapeError,
            "key_padding_mask",
        ),
    ],
)
def test_what_is_wrong_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
