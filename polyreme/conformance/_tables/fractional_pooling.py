"""Contract rows of ops/windows/fractional_pooling.py: loops over windows, edges as the formula in the paper has them."""

import itertools

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError


def floats(*shape):
    return lambda rng: (rng.standard_normal(shape).astype("float32"),)


def edges(size, out, kernel, u):
    """(start, end) of each window."""
    if kernel is not None:
        ratio = np.float32((size - kernel) / (out - 1)) if out > 1 else np.float32(0)
        starts = [int(np.ceil(ratio * (np.float32(i) + np.float32(u)))) for i in range(out)]
        return [(s - starts[0], s - starts[0] + kernel) for s in starts]
    ratio, whole = size / out, size // out
    u = np.float32(u) * np.float32(min((whole + 2) / ratio - 1, (size + 1 - whole) / ratio - (out - 1)))
    ends = [int(np.ceil(np.float32(ratio) * (np.float32(i) + u))) for i in range(out + 1)]
    ends = [e - ends[0] for e in ends[:-1]] + [size]
    return list(itertools.pairwise(ends))


def pooled(x, output_size, kernel_size=None, random_u=None, return_mask=False):
    sizes = x.shape[2:]
    outs = [output_size] * len(sizes) if isinstance(output_size, int) else output_size
    windows = [edges(z, o or z, kernel_size, random_u) for z, o in zip(sizes, outs, strict=True)]
    flat = np.arange(np.prod(sizes)).reshape(sizes)
    value = np.empty((*x.shape[:2], *(len(w) for w in windows)), x.dtype)
    index = np.empty(value.shape, "int32")
    for at in itertools.product(*(range(len(w)) for w in windows)):
        box = tuple(slice(*w[i]) for w, i in zip(windows, at, strict=True))
        found = x[(slice(None), slice(None), *box)].reshape(*x.shape[:2], -1)
        value[(slice(None), slice(None), *at)] = found.max(-1)
        index[(slice(None), slice(None), *at)] = flat[box].ravel()[found.argmax(-1)]
    return (value, index) if return_mask else value


def then(make, *args):
    return lambda rng: (*make(rng), *args)


def check_drawn(got):
    assert got.shape == (1, 1, 3, 3)
    assert got[0, 0, -1, -1] == 48
    assert np.all(np.diff(got[0, 0].ravel()) > 0)


X = np.ones((1, 1, 5, 5), "float32")
BAD = {
    0.1: ((X, 3, None, 1.5), ConfigError, "random_u=1.5"),
    0.6: ((X, 6), ShapeError, "6 windows of 1 or more do not fit in a dim of 5"),
    0.9: ((X, 3, 4), ShapeError, "3 windows of 4 or more"),
}
CASES = [
    *(Case("fractional_max_pool2d", then(floats(2, 2, 7, 9), [3, 4], None, u, True), pooled, tag=f"u{u}", bad=bad) for u, bad in BAD.items()),
    Case("fractional_max_pool2d", then(floats(1, 2, 8, 7), 3, 2, 0.35, True), pooled, tag="kernel"),
    Case("fractional_max_pool2d", lambda rng: (np.arange(49.0, dtype="float32").reshape(1, 1, 7, 7), 3), check=check_drawn, no_grad="windows are drawn", tag="drawn"),
    Case("fractional_max_pool3d", then(floats(1, 1, 5, 4, 6), [2, None, 3], None, 0.4, True), pooled),
    Case("fractional_max_pool3d", then(floats(1, 1, 5, 4, 6), 2, 2, 0.7), pooled, tag="kernel"),
]  # fmt: skip
