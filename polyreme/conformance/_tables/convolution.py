"""Contract rows of ops/windows/convolution.py: the oracles are sums written out entry by entry."""

import itertools

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def floats(*shapes):
    return lambda rng: tuple(rng.standard_normal(s).astype("float32") for s in shapes)


def tup(v, n):
    return (v,) * n if isinstance(v, int) else tuple(v)


def conv(x, w, b=None, stride=1, pads=0, dilation=1, groups=1, last=False):
    """Cross-correlation of x [N, C, ...]; pads are (before, after) pairs or one int."""
    x = np.moveaxis(x, -1, 1) if last else x
    n = x.ndim - 2
    stride, dilation = tup(stride, n), tup(dilation, n)
    pads = [(pads, pads)] * n if isinstance(pads, int) else pads
    x = np.pad(x.astype("float64"), [(0, 0), (0, 0), *pads])
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
    sizes = [(z - r) // s + 1 for z, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    y = np.zeros((len(x), w.shape[0], *sizes))
    per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
    for o, at in itertools.product(range(w.shape[0]), np.ndindex(*sizes)):
        first = o // per_out * per_in
        window = tuple(slice(a * s, a * s + r, d) for a, s, r, d in zip(at, stride, reach, dilation, strict=True))
        y[(slice(None), o, *at)] = (
            (x[(slice(None), slice(first, first + per_in), *window)] * w[o]).reshape(len(x), -1).sum(1)
        )
    y = y if b is None else y + b.reshape(-1, *[1] * n)
    return np.moveaxis(y, 1, -1) if last else y


def conv_transpose(x, w, b=None, stride=1, pads=0, extra=0, groups=1, dilation=1, last=False):
    """Each entry of x adds its value times the kernel; `pads` is cut off both ends and `extra` zeros stay at the end."""
    x = np.moveaxis(x, -1, 1) if last else x
    n = x.ndim - 2
    stride, dilation, extra = tup(stride, n), tup(dilation, n), tup(extra, n)
    pads = [(pads, pads)] * n if isinstance(pads, int) else pads
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
    full = [(z - 1) * s + r + e for z, s, r, e in zip(x.shape[2:], stride, reach, extra, strict=True)]
    per_in, per_out = x.shape[1] // groups, w.shape[1]
    y = np.zeros((len(x), per_out * groups, *full))
    for c, at in itertools.product(range(x.shape[1]), np.ndindex(*x.shape[2:])):
        first = c // per_in * per_out
        window = tuple(slice(a * s, a * s + r, d) for a, s, r, d in zip(at, stride, reach, dilation, strict=True))
        value = x[(slice(None), c, *at)].reshape(-1, *[1] * (n + 1))
        y[(slice(None), slice(first, first + per_out), *window)] += value * w[c]
    y = y[(..., *(slice(a, z - b) for (a, b), z in zip(pads, full, strict=True)))]
    y = y if b is None else y + b.reshape(-1, *[1] * n)
    return np.moveaxis(y, 1, -1) if last else y


def columns(x, kernel, stride, pads, dilation):
    """[N, C * kh * kw, windows]; pads (top, left, bottom, right)."""
    top, left, bottom, right = pads
    x = np.pad(x, [(0, 0), (0, 0), (top, bottom), (left, right)])
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = [(z - r) // s + 1 for z, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    parts = []
    for i, j in np.ndindex(*sizes):
        i, j = i * stride[0], j * stride[1]
        parts.append(x[:, :, i : i + reach[0] : dilation[0], j : j + reach[1] : dilation[1]].reshape(len(x), -1))
    return np.stack(parts, -1)


def folded(x, sizes, kernel, stride, pad, dilation):
    """Each column added where its window lies."""
    c = x.shape[1] // (kernel[0] * kernel[1])
    y = np.zeros((len(x), c, sizes[0] + 2 * pad, sizes[1] + 2 * pad))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    counts = [(z - r) // s + 1 for z, r, s in zip(y.shape[2:], reach, stride, strict=True)]
    for at, (i, j) in enumerate(np.ndindex(*counts)):
        i, j = i * stride[0], j * stride[1]
        y[:, :, i : i + reach[0] : dilation[0], j : j + reach[1] : dilation[1]] += x[..., at].reshape(
            len(x), c, *kernel
        )
    return y[:, :, pad : pad + sizes[0], pad : pad + sizes[1]]


def row(name, shapes, tag, want, terms=24, bad=None, **kwargs):
    """A row whose oracle takes its own settings: want = (oracle, its settings)."""
    oracle, settings = want
    return Case(
        name, floats(*shapes), lambda *a, **k: oracle(*a, **settings), kwargs=kwargs, terms=terms, tag=tag, bad=bad
    )


def bad(*args, match):
    return (args, ShapeError, match)


ONE = np.ones((1, 2, 7), "float32")
TWO = np.ones((1, 2, 5, 5), "float32")
THREE = np.ones((1, 2, 3, 3, 3), "float32")
W1, W2, W3 = (np.ones((3, 2, *[2] * n), "float32") for n in (1, 2, 3))
T1, T2, T3 = (np.ones((2, 3, *[2] * n), "float32") for n in (1, 2, 3))
IMAGE = ((2, 4, 5, 6), (6, 2, 3, 2), (6,))

CASES = [
    row("conv1d", ((2, 3, 9), (4, 3, 3), (4,)), "", (conv, {"stride": 2, "pads": 1, "dilation": 2}), stride=2, padding=1, dilation=2, bad=bad(ONE, np.ones((3, 3, 2), "float32"), match="2 channels.*needs 3")),
    row("conv1d", ((2, 9, 3), (4, 3, 3), (4,)), "last", (conv, {"last": True}), data_format="NLC", bad=bad(np.ones((1, 9, 3), "float32"), np.ones((4, 3, 3), "float32"), np.ones(3, "float32"), match=r"bias \[3\]")),
    row("conv1d", ((2, 3, 7), (4, 3, 4)), "same", (conv, {"stride": 2, "pads": [(1, 2)]}), stride=2, padding="SAME", bad=bad(ONE, W2, match="3 dims|4 dims")),
    row("conv1d", ((2, 3, 7), (4, 3, 3)), "same-dilated", (conv, {"dilation": 2, "pads": [(2, 2)]}), padding="same", dilation=2),
    row("conv1d", ((2, 3, 7), (4, 3, 3)), "two-pads", (conv, {"pads": [(1, 2)]}), padding=[1, 2], bad=bad(ONE, np.ones((3, 2, 11), "float32"), match="a window of 11 does not fit")),
    row("conv2d", IMAGE, "", (conv, {"stride": (2, 1), "pads": [(1, 1), (0, 0)], "groups": 2}), stride=[2, 1], padding=[1, 0], groups=2, bad=bad(np.ones((1, 4, 5, 5), "float32"), np.ones((5, 2, 1, 1), "float32"), match="groups must divide")),
    row("conv2d", IMAGE[:2], "corners", (conv, {"pads": [(1, 0), (2, 1)], "groups": 2}), padding=[1, 0, 2, 1], groups=2),
    row("conv2d", ((2, 5, 6, 4), (6, 2, 3, 2), (6,)), "last", (conv, {"pads": [(1, 0), (2, 1)], "groups": 2, "last": True}), padding=[[0, 0], [1, 0], [2, 1], [0, 0]], groups=2, data_format="NHWC"),
    row("conv2d", ((1, 2, 5, 6), (3, 2, 3, 2)), "valid", (conv, {"stride": 2}), stride=2, padding="VALID"),
    row("conv2d", ((1, 4, 5, 6), (4, 1, 3, 3)), "depthwise", (conv, {"groups": 4}), groups=4),
    row("conv2d", ((2, 6, 7, 3), (3, 1, 3, 2), (3,)), "depthwise-last", (conv, {"stride": (2, 1), "pads": [(1, 0), (2, 1)], "dilation": (1, 2), "groups": 3, "last": True}), stride=[2, 1], padding=[[0, 0], [1, 0], [2, 1], [0, 0]], dilation=[1, 2], groups=3, data_format="NHWC"),
    row("conv1d", ((2, 3, 7), (3, 1, 3), (3,)), "depthwise", (conv, {"stride": 2, "pads": 1, "groups": 3}), stride=2, padding=1, groups=3),
    row("conv3d", ((1, 2, 4, 3, 4), (2, 1, 2, 1, 3)), "depthwise", (conv, {"groups": 2, "dilation": (1, 1, 1)}), groups=2),
    row("conv3d", ((1, 2, 3, 4, 3), (3, 2, 2, 3, 2), (3,)), "", (conv, {"pads": 1}), padding=1, terms=40, bad=bad(TWO, W3, match="4 dims, needs 5")),
    row("conv1d_transpose", ((2, 4, 5), (4, 3, 3), (6,)), "", (conv_transpose, {"stride": 3, "pads": 1, "extra": 2, "groups": 2, "dilation": 2}), stride=3, padding=1, output_padding=2, groups=2, dilation=2, bad=bad(ONE, np.ones((3, 2, 2), "float32"), match="2 channels.*takes 3")),
    row("conv1d_transpose", ((2, 5, 4), (4, 3, 3), (3,)), "last", (conv_transpose, {"stride": 2, "extra": 1, "last": True}), stride=2, output_size=[12], data_format="NLC"),
    row("conv1d_transpose", ((1, 2, 3), (2, 1, 4)), "same", (conv_transpose, {"stride": 2, "pads": [(1, 2)]}), stride=2, padding="SAME"),
    row("conv2d_transpose", ((2, 4, 3, 2), (4, 3, 3, 2), (6,)), "", (conv_transpose, {"stride": 2, "pads": [(1, 0), (0, 1)], "groups": 2}), stride=2, padding=[1, 0, 0, 1], groups=2, bad=bad(TWO, T3, match="5 dims, needs 4")),
    row("conv1d_transpose", ((1, 2, 3), (2, 3, 2), (1,)), "one-bias", (lambda x, w, b: conv_transpose(x, w, np.repeat(b, 3)), {})),
    row("conv2d_transpose", ((1, 2, 3, 2), (2, 3, 2, 2)), "output-padding", (conv_transpose, {"stride": (2, 3), "extra": (1, 2)}), stride=[2, 3], output_padding=[1, 2]),
    row("conv3d_transpose", ((1, 2, 2, 3, 2), (2, 3, 2, 2, 2), (3,)), "", (conv_transpose, {"stride": 2, "pads": 1}), stride=2, padding=1, bad=bad(THREE, T2, match="4 dims, needs 5")),
    Case("image_to_columns", lambda rng: (*floats((2, 3, 5, 6))(rng), [2, 3], [2, 1], [1, 0, 2, 1], [1, 2]), columns, bad=((TWO, 9), ShapeError, "does not fit")),
    Case("image_to_columns", lambda rng: (*floats((1, 2, 4, 3))(rng), 2, 1, [1, 2]), lambda x, *_: columns(x, (2, 2), (1, 1), (1, 2, 1, 2), (1, 1)), tag="two-pads"),
    Case("fold", lambda rng: (*floats((2, 12, 9))(rng), (5, 6), (3, 2), (1, 2), 0, (1, 1)), folded, bad=((np.ones((1, 4, 8), "float32"), [4, 4], 2), ShapeError, r"needs \[1, 4, 9\]")),
    Case("fold", lambda rng: (*floats((1, 4, 16))(rng), (3, 3), (2, 2), (1, 1), 1, (1, 1)), folded, tag="padded", bad=((np.ones((1, 3, 9), "float32"), [4, 4], 2), ShapeError, "multiple of the 4")),
    Case("fold", lambda rng: (*floats((0, 12, 9))(rng), (5, 6), (3, 2), (1, 2)), lambda x, *_: np.zeros((0, 2, 5, 6), "float32"), no_grad="no elements", tag="no-images"),
]  # fmt: skip
