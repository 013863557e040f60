"""Contract rows of ops/windows/pooling.py: the oracles walk the windows one by one."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError


def floats(*shape):
    # distinct by much more than the step of finite differences, so that no maximum changes hands
    return lambda rng: (rng.permutation(np.linspace(-2, 2, int(np.prod(shape)))).reshape(shape).astype("float32"),)


def tup(v, n):
    return (v,) * n if isinstance(v, int) else tuple(v)


def windows(x, kernel, stride, pads, ceil=False):
    """Per output position: (position, the slices of its window inside x, entries of it inside the padded x)."""
    n = x.ndim - 2
    kernel, stride = tup(kernel, n), tup(stride, n)
    pads = [(pads, pads)] * n if isinstance(pads, int) else pads
    room = [z + sum(p) - k for z, p, k in zip(x.shape[2:], pads, kernel, strict=True)]
    counts = [(-(-r // s) if ceil else r // s) + 1 for r, s in zip(room, stride, strict=True)]
    for at in np.ndindex(*counts):
        starts = [a * s - p[0] for a, s, p in zip(at, stride, pads, strict=True)]
        stops = [min(b + k, z + p[1]) for b, k, z, p in zip(starts, kernel, x.shape[2:], pads, strict=True)]
        inside = tuple(slice(max(b, 0), min(e, z)) for b, e, z in zip(starts, stops, x.shape[2:], strict=True))
        yield at, inside, int(np.prod([e - b for b, e in zip(starts, stops, strict=True)]))


def pooled(x, found):
    """Values [*o] of each batch and channel from found(window [N, C, ...], entries) at each position."""
    places = list(found)
    sizes = np.max([at for at, _ in places], 0) + 1
    y = np.zeros((*x.shape[:2], *sizes))
    for at, value in places:
        y[(..., *at)] = value
    return y


def swap(fn):
    """fn on channels-last data."""
    return lambda x, *a, **k: np.moveaxis(fn(np.moveaxis(x, -1, 1), *a, **k), 1, -1)


def max_pool(x, kernel, stride, pads=0, ceil=False):
    return pooled(
        x, ((at, x[(..., *w)].max(tuple(range(2, x.ndim)))) for at, w, _ in windows(x, kernel, stride, pads, ceil))
    )


def max_index(x, kernel, stride, pads=0, ceil=False):
    flat = np.broadcast_to(np.arange(np.prod(x.shape[2:])).reshape(x.shape[2:]), x.shape)

    def found(w):
        best = x[(..., *w)].reshape(*x.shape[:2], -1).argmax(-1)[..., None]
        return np.take_along_axis(flat[(..., *w)].reshape(*x.shape[:2], -1), best, -1)[..., 0]

    return pooled(x, ((at, found(w)) for at, w, _ in windows(x, kernel, stride, pads, ceil))).astype("int32")


def both(x, *settings):
    return max_pool(x, *settings), max_index(x, *settings)


def avg_pool(x, kernel, stride, pads=0, ceil=False, exclusive=True, divisor=None):
    dims = tuple(range(2, x.ndim))

    def found(w, entries):
        part = x[(..., *w)].astype("float64")
        return part.sum(dims) / (divisor or (np.prod(part.shape[2:]) if exclusive else entries))

    return pooled(x, ((at, found(w, entries)) for at, w, entries in windows(x, kernel, stride, pads, ceil)))


def adaptive(x, sizes, reduce):
    places = []
    for at in np.ndindex(*sizes):
        w = tuple(slice(a * z // o, -(-(a + 1) * z // o)) for a, z, o in zip(at, x.shape[2:], sizes, strict=True))
        places.append((at, reduce(x[(..., *w)].reshape(*x.shape[:2], -1))))
    return pooled(x, places)


def mean(v):
    return v.astype("float64").mean(-1)


def largest(v):
    return v.max(-1)


def adaptive_index(x, sizes):
    flat = np.broadcast_to(np.arange(np.prod(x.shape[2:])).reshape(x.shape[2:]), x.shape).astype("float64")
    return adaptive(np.stack([x, flat], 0).reshape(-1, *x.shape[1:]), sizes, pick).astype("int32")[: len(x)]


def pick(v):
    """Of rows stacked as (values, indices): each index where the value is largest, twice."""
    values, index = np.split(v, 2)
    best = values.argmax(-1)[..., None]
    found = np.take_along_axis(index, best, -1)[..., 0]
    return np.concatenate([found, found])


def lp(x, p, kernel, stride, pads=0):
    total = avg_pool(x**p, kernel, stride, pads, divisor=1)
    return np.sign(total) * np.abs(total) ** (1 / p)


def put_back(x, index, sizes):
    y = np.zeros((*x.shape[:2], int(np.prod(sizes))))
    np.put_along_axis(y, index.reshape(*x.shape[:2], -1).astype("int64"), x.reshape(*x.shape[:2], -1), -1)
    return y.reshape(*x.shape[:2], *sizes)


def maxima(shape, sizes):
    """Values and, for each channel, distinct flat indices."""

    def make(rng):
        count = int(np.prod(shape[2:]))
        index = [rng.permutation(int(np.prod(sizes)))[:count] for _ in range(shape[0] * shape[1])]
        return floats(*shape)(rng)[0], np.array(index, "int32").reshape(shape)

    return make


def row(name, shape, tag, want, terms=16, bad=None, **kwargs):
    oracle, *settings = want
    return Case(name, floats(*shape), lambda x, **k: oracle(x, *settings), kwargs=kwargs, terms=terms, tag=tag, bad=bad)


ONE, TWO, THREE = (np.ones((1, 2, *[4] * n), "float32") for n in (1, 2, 3))
I1, I2, I3 = (np.zeros((1, 2, *[4] * n), "int32") for n in (1, 2, 3))
TOO_BIG_1, TOO_BIG_2, TOO_BIG_3 = (((v, 9), ShapeError, "does not fit") for v in (ONE, TWO, THREE))

CASES = [
    row("max_pool1d", (2, 3, 8), "", (max_pool, 3, 2, 1), kernel_size=3, stride=2, padding=1),
    Case("max_pool1d", lambda rng: (*floats(2, 3, 8)(rng), 3), lambda x, k: max_pool(x, 3, 3), tag="stride", bad=TOO_BIG_1),
    Case("max_pool1d", floats(2, 3, 4), lambda x, **_: x.max(2, keepdims=True), kwargs={"kernel_size": 9, "ceil_mode": True}, tag="ceil-all"),
    Case("avg_pool1d", floats(2, 3, 4), lambda x, **_: x.mean(2, keepdims=True), kwargs={"kernel_size": 9, "stride": 2, "ceil_mode": True, "exclusive": False}, tag="ceil-all"),
    Case("max_pool1d", lambda rng: (rng.permutation(24).reshape(2, 3, 4), 2), lambda x, k: max_pool(x, 2, 2), no_grad="integers", tag="int", bad=((np.ones((1, 1, 4), "complex64"), 2), DTypeError, "x is complex64, which has no order")),
    row("max_pool1d", (2, 3, 8), "mask", (both, 3, 2, 1), kernel_size=3, stride=2, padding=1, return_mask=True),
    row("max_pool2d", (2, 3, 7, 6), "", (max_pool, (2, 3), (2, 1), [(1, 1), (0, 0)]), kernel_size=[2, 3], stride=[2, 1], padding=[1, 0]),
    row("max_pool2d", (2, 3, 7, 6), "ceil", (max_pool, 3, 2, 0, True), kernel_size=3, stride=2, ceil_mode=True),
    row("max_pool2d", (2, 3, 6, 7), "mask-ceil", (both, 3, 2, 0, True), kernel_size=3, stride=2, ceil_mode=True, return_mask=True),
    row("max_pool2d", (1, 2, 6, 7), "same", (max_pool, 3, 2, [(0, 1), (1, 1)]), kernel_size=3, stride=2, padding="SAME"),
    row("max_pool1d", (1, 2, 6), "same-ceil", (max_pool, 1, 2), kernel_size=1, stride=2, padding="SAME", ceil_mode=True),
    row("avg_pool2d", (1, 2, 5, 5), "same-ceil", (avg_pool, 2, 2, [(0, 1), (0, 1)]), kernel_size=2, stride=2, padding="SAME", ceil_mode=True),
    row("max_pool2d", (2, 7, 6, 3), "last", (swap(max_pool), 2, 2), kernel_size=2, data_format="NHWC"),
    row("max_pool2d", (2, 7, 6, 3), "mask-last", (lambda x: (swap(max_pool)(x, 2, 2), swap(max_index)(x, 2, 2)),), kernel_size=2, data_format="NHWC", return_mask=True),
    Case("max_pool2d", lambda rng: (*floats(1, 2, 4, 4)(rng), 2), lambda x, k: max_pool(x, 2, 2), tag="stride", bad=TOO_BIG_2),
    Case("max_pool2d", lambda rng: (*floats(1, 2, 4, 4)(rng), 2, 2, "VALID"), lambda x, *_: max_pool(x, 2, 2), tag="valid", bad=((TWO, 2, 2, "VALID", False, True), ConfigError, "ceil_mode=True")),
    Case("max_pool3d", lambda rng: (*floats(1, 2, 5, 4, 6)(rng), 2, 2, 1), lambda x, *_: max_pool(x, 2, 2, 1), bad=TOO_BIG_3),
    row("max_pool3d", (1, 2, 5, 4, 6), "mask", (both, 2, 2, 1), kernel_size=2, stride=2, padding=1, return_mask=True),
    Case("avg_pool1d", lambda rng: (*floats(2, 3, 8)(rng), 3, 2, 1), lambda x, *_: avg_pool(x, 3, 2, 1), bad=TOO_BIG_1),
    row("avg_pool1d", (2, 3, 6), "ceil", (avg_pool, 3, 2, 0, True), kernel_size=3, stride=2, ceil_mode=True),
    row("avg_pool1d", (2, 3, 6), "inclusive-ceil", (avg_pool, 3, 2, 1, True, False), kernel_size=3, stride=2, padding=1, ceil_mode=True, exclusive=False),
    Case("avg_pool1d", lambda rng: (rng.integers(0, 9, (1, 2, 6)), 2), lambda x, k: avg_pool(x, 2, 2).astype("float32"), no_grad="integers", tag="int"),
    Case("avg_pool2d", lambda rng: (*floats(2, 3, 7, 6)(rng), [2, 3], [2, 1], [1, 0]), lambda x, *_: avg_pool(x, (2, 3), (2, 1), [(1, 1), (0, 0)]), bad=TOO_BIG_2),
    row("avg_pool2d", (2, 7, 6, 3), "last", (swap(avg_pool), 3, 2, 1, False, False), kernel_size=3, stride=2, padding=1, exclusive=False, data_format="NHWC"),
    row("avg_pool2d", (1, 2, 6, 7), "divisor", (avg_pool, 3, 2, 1, False, True, 5), kernel_size=3, stride=2, padding=1, divisor_override=5),
    Case("avg_pool2d", lambda rng: (*floats(1, 2, 4, 4)(rng), 2), lambda x, k: avg_pool(x, 2, 2), tag="stride", bad=((TWO, 2, 2, 0, False, True, 0), ConfigError, "divisor_override=0")),
    Case("avg_pool3d", lambda rng: (*floats(1, 2, 5, 4, 6)(rng), 2, 2, 1), lambda x, *_: avg_pool(x, 2, 2, 1), bad=TOO_BIG_3),
    Case("adaptive_avg_pool1d", lambda rng: (*floats(2, 3, 7)(rng), 4), lambda x, o: adaptive(x, (4,), mean), bad=((ONE, 0), ShapeError, "output_size=0")),
    Case("adaptive_avg_pool2d", lambda rng: (*floats(2, 3, 7, 6)(rng), [None, 4]), lambda x, o: adaptive(x, (7, 4), mean), bad=((TWO, [1, 2, 3]), ShapeError, "output_size")),
    Case("adaptive_avg_pool2d", lambda rng: (*floats(2, 3, 7, 6)(rng), 1), lambda x, o: adaptive(x, (1, 1), mean), terms=42, tag="one"),
    row("adaptive_avg_pool2d", (2, 7, 6, 3), "last", (swap(lambda x: adaptive(x, (2, 4), mean)),), output_size=[2, 4], data_format="NHWC"),
    Case("adaptive_avg_pool3d", lambda rng: (*floats(1, 2, 5, 4, 6)(rng), [2, 3, 8]), lambda x, o: adaptive(x, o, mean), terms=24, bad=((TWO, 2), ShapeError, "needs 5")),
    Case("adaptive_max_pool1d", lambda rng: (*floats(2, 3, 7)(rng), 4), lambda x, o: adaptive(x, (4,), largest), bad=((ONE, 0), ShapeError, "output_size=0")),
    Case("adaptive_max_pool2d", lambda rng: (*floats(2, 3, 7, 6)(rng), [3, 4], True), lambda x, o, m: (adaptive(x, o, largest), adaptive_index(x, o)), bad=((TWO, "2"), ShapeError, "output_size")),
    Case("adaptive_max_pool3d", lambda rng: (*floats(1, 2, 5, 4, 6)(rng), [2, 3, 4]), lambda x, o: adaptive(x, o, largest), bad=((TWO, 2), ShapeError, "needs 5")),
    Case("lp_pool1d", lambda rng: (*floats(2, 3, 8)(rng), 3, 3, 2), lambda x, p, *_: lp(x, 3, 3, 2), bad=((ONE, 0, 2), ConfigError, "norm_type=0")),
    Case("lp_pool1d", lambda rng: (np.abs(floats(2, 3, 8)(rng)[0]) + 0.1, 1.5, 3, 2), lambda x, p, *_: lp(x, 1.5, 3, 2), tag="fraction", bad=((ONE, 2, 9), ShapeError, "does not fit")),
    Case("lp_pool2d", lambda rng: (*floats(2, 3, 5, 6)(rng), 2, 3, 2, 1), lambda x, *_: lp(x, 2, 3, 2, 1), bad=((TWO, 2, 9), ShapeError, "does not fit")),
    Case("lp_pool2d", lambda rng: (*floats(2, 3, 5, 6)(rng), float("inf"), 2), lambda x, *_: max_pool(x, 2, 2), tag="inf"),
    Case("scatter_to_image", lambda rng: (*maxima((2, 3, 2, 2), (4, 5))(rng), (4, 5), "NCHW"), lambda x, i, z, d: put_back(x, i, z), bad=((TWO, I1, (4, 4), "NCHW"), ShapeError, "same shape")),
    Case("max_unpool1d", lambda rng: (*maxima((2, 3, 2), (4,))(rng), 2), lambda x, i, k: put_back(x, i, (4,)), bad=((ONE, I1 + 8, 2), IndexError, "8 at .* out of range")),
    Case("max_unpool2d", lambda rng: (*maxima((2, 3, 2, 2), (4, 4))(rng), 2), lambda x, i, k: put_back(x, i, (4, 4)), bad=((TWO, I2 - 1, 2), IndexError, "-1 at .* out of range")),
    Case("max_unpool2d", lambda rng: (*maxima((2, 3, 2, 2), (5, 5))(rng), 2, 2, 0, "NCHW", [2, 3, 5, 5]), lambda x, i, *_: put_back(x, i, (5, 5)), tag="size", bad=((TWO, I2, 2, 2, 0, "NCHW", [4, 4]), ShapeError, r"output_size=\[4, 4\]")),
    Case("max_unpool2d", lambda rng: tuple(np.moveaxis(v, 1, -1) for v in maxima((2, 3, 2, 2), (4, 4))(rng)), lambda x, i, **k: np.moveaxis(put_back(np.moveaxis(x, -1, 1), np.moveaxis(i, -1, 1), (4, 4)), 1, -1), kwargs={"kernel_size": 2, "data_format": "NHWC"}, tag="last"),
    Case("max_unpool3d", lambda rng: (*maxima((1, 2, 2, 2, 2), (4, 4, 4))(rng), 2), lambda x, i, k: put_back(x, i, (4, 4, 4)), bad=((THREE, I3 + 999, 2), IndexError, "999 at")),
]  # fmt: skip
