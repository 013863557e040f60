"""Softmax under masks and identity_loss against NumPy."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import incubate
from polyreme.errors import ConfigError, ShapeError


def test_softmax_under_masks():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 4)).astype("float32")
    mask = np.where(rng.random((2, 1, 4, 4)) < 0.3, -1e4, 0).astype("float32")

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    got = incubate.softmax_mask_fuse(paddle.to_tensor(x), paddle.to_tensor(mask))
    np.testing.assert_allclose(got.numpy(), softmax(x + mask), rtol=1e-5)
    leaf = paddle.to_tensor(x, stop_gradient=False)
    got = incubate.softmax_mask_fuse_upper_triangle(leaf)
    np.testing.assert_allclose(got.numpy(), softmax(np.where(np.tril(np.ones((4, 4))), x, -np.inf)), rtol=1e-5)
    (got * got).sum().backward()
    assert not leaf.grad.numpy()[..., 0, 1:].any()
    assert incubate.softmax_mask_fuse_upper_triangle(leaf.astype("float16")).dtype == "float16"
    with pytest.raises(ShapeError, match=r"needs \[\*, seq, seq\]"):
        incubate.softmax_mask_fuse_upper_triangle(leaf[..., :2])


def test_identity_loss():
    x = paddle.to_tensor([1.0, 2.0, 6.0])
    assert [float(incubate.identity_loss(x, r)) for r in ("sum", 0, "mean", 1)] == [9.0, 9.0, 3.0, 3.0]
    assert incubate.identity_loss(x) is x
    with pytest.raises(ConfigError, match="reduction='max'"):
        incubate.identity_loss(x, "max")
