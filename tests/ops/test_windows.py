"""Sizes of windows that no processor counts to are refused, before XLA ends the process."""

import re

import numpy as np
import pytest

from polyreme import nn, to_tensor
from polyreme.errors import ShapeError
from polyreme.nn import functional as F

X = to_tensor(np.ones((1, 1, 8), "float32"))
W = to_tensor(np.ones((1, 1, 3), "float32"))
IMAGE = to_tensor(np.ones((1, 1, 4, 4), "float32"))
LARGE = 2**31
TOO_LARGE = {
    "max_pool padding": (lambda: F.max_pool1d(X, 2, 1, padding=LARGE), "padding=2147483648; each must be"),
    "max_pool stride": (lambda: F.max_pool1d(X, 2, LARGE), "stride=2147483648; needs an int or 1 of them"),
    "max_pool kernel": (lambda: F.max_pool1d(X, LARGE, 1), "kernel_size=2147483648; needs an int"),
    "max_pool padded": (lambda: F.max_pool1d(X, 2, 1, padding=LARGE // 2), "by 1073741824 has sizes [2147483656]"),
    "avg_pool": (lambda: F.avg_pool2d(IMAGE, 2, 1, padding=(1, LARGE)), "padding=(1, 2147483648); each must be"),
    "lp_pool": (lambda: F.lp_pool1d(X, 2.0, 2, 1, padding=LARGE), "padding=2147483648; each must be"),
    "adaptive": (lambda: F.adaptive_avg_pool1d(X, LARGE), "output_size=2147483648; needs an int"),
    "unpool": (
        lambda: F.max_unpool1d(X, to_tensor(np.zeros((1, 1, 8), "int32")), 2, stride=LARGE - 1),
        "the result has sizes [15032385531]",
    ),
    "conv padding": (lambda: F.conv1d(X, W, padding=LARGE), "padding=2147483648; each must be"),
    "conv padded": (lambda: nn.Conv1D(1, 1, 3, padding=LARGE - 1)(X), "has sizes [4294967302]; each must be less"),
    "conv stride": (lambda: F.conv1d(X, W, stride=2**63), "stride=9223372036854775808; needs an int"),
    "conv dilation": (lambda: F.conv1d(X, W, dilation=LARGE), "dilation=2147483648; needs an int"),
    "transposed": (lambda: F.conv1d_transpose(X, W, stride=LARGE - 1), "the result has sizes [15032385532]"),
    "unfold": (lambda: F.unfold(IMAGE, 2, paddings=LARGE - 1), "the image has sizes [4294967298, 4294967298]"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_from_two_to_the_31_on_are_refused(name):
    call, message = TOO_LARGE[name]
    with pytest.raises(ShapeError, match=re.escape(message)):
        call()
