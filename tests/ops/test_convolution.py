"""Eager convolutions, which XLA compiles with options of their own, equal NumPy's."""

import numpy as np
import pytest

from polyreme import to_tensor
from polyreme.nn import functional as F

TERMS = 16 * 16 * 2  # of the longest sum: a weight's gradient


def convolve(x, weight):
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weight)


@pytest.mark.parametrize(
    ("size", "kernel"),
    [(16, 1), (1, 1), (2, 1), (3, 3), (3, 2), (16, 3)],
    ids=["windows of one entry", "one entry", "few entries", "one window", "few windows", "many windows"],
)
def test_eager_convolutions_and_their_gradients(size, kernel):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    arrays = x, weight = draw(2, 16, size, size), draw(8, 16, kernel, kernel)
    tensors = [to_tensor(a, stop_gradient=False) for a in arrays]
    y = F.conv2d(*tensors)
    # every term is below 5 x 5, and each sum rounds once a term
    close = {"rtol": 0, "atol": 25 * TERMS * 2.0**-24}
    np.testing.assert_allclose(y.numpy(), convolve(x, weight), **close)
    cotangent = draw(*y.shape)
    y.backward(to_tensor(cotangent))
    # linear in each argument: the gradient along a direction is the convolution of that direction
    for tensor, along in zip(tensors, ("x", "weight"), strict=True):
        direction = draw(*tensor.shape)
        moved = convolve(direction, weight) if along == "x" else convolve(x, direction)
        slope = np.vdot(tensor.grad.numpy(), direction)
        assert slope == pytest.approx(np.vdot(moved, cotangent), abs=y.size * 25 * TERMS * 2.0**-24), along
