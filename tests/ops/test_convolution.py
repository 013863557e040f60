"""Eager convolutions, which XLA compiles with options of their own, equal NumPy's; depthwise ones equal XLA's."""

import functools

import jax
import numpy as np
import pytest
from jax import lax

from polyreme import to_tensor
from polyreme.nn import functional as F
from polyreme.ops.windows.depthwise import Windows, depthwise

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


@pytest.mark.parametrize(
    ("windows", "layout"),
    [
        (Windows((7,), (3,), (2,), ((4, 0),), (1,), True), ("NWC", "OIW", "NWC")),
        (Windows((6, 7), (2, 3), (1, 3), ((0, 5), (1, 2)), (2, 1), False), ("NCHW", "OIHW", "NCHW")),
    ],
    ids=["channels last", "dilated, padded beyond a window"],
)
def test_depthwise_convolutions_have_the_derivatives_of_xlas(windows, layout):
    rng = np.random.default_rng(0)
    shape = (2, *windows.sizes, 3) if windows.last else (2, 3, *windows.sizes)
    arrays = rng.standard_normal(shape), rng.standard_normal((3, 1, *windows.kernel))
    by_xla = functools.partial(
        lax.conv_general_dilated,
        window_strides=windows.stride,
        padding=windows.pads,
        rhs_dilation=windows.dilation,
        dimension_numbers=layout,
        feature_group_count=3,
    )

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_derivatives(convolve, *arrays):
        first = jax.grad(lambda *a: jax.numpy.sin(convolve(*a)).sum(), (0, 1))
        second = jax.grad(lambda *a: sum(jax.numpy.sin(g).sum() for g in first(*a)), (0, 1))
        return convolve(*arrays), first(*arrays), second(*arrays)

    got, want = (value_and_derivatives(f, *arrays) for f in (functools.partial(depthwise, windows), by_xla))
    # sums of some hundred terms of a few units, each rounded once, and sums of those
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e4 * 2.0**-52), got, want)
