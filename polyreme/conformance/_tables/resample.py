"""Contract rows of ops/resample.py: interpolation against piecewise polynomials written out at each position."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError


def floats(*shapes):
    return lambda rng: tuple(rng.standard_normal(s).astype("float32") for s in shapes)


def then(make, *args):
    return lambda rng: (*make(rng), *args)


def place(i, size, out, ratio, align_corners, align_mode, mode):
    """The input position of output i."""
    if mode == "nearest" or (align_mode == 1 and mode != "bicubic" and not align_corners):
        return i * ratio
    if align_corners:
        return i * (size - 1) / (out - 1) if out > 1 else 0.0
    return (i + 0.5) * ratio - 0.5


def cubic(t, a):
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def entry(line, at, mode):
    """line [size, ...] at a real position."""
    top = len(line) - 1
    if mode == "nearest":
        return line[min(int(np.floor(at)), top)]
    if mode == "bicubic":
        base = int(np.floor(at))
        return sum(cubic(at - j, -0.75) * line[min(max(j, 0), top)] for j in range(base - 1, base + 3))
    at = min(max(at, 0.0), float(top))
    low = int(np.floor(at))
    return line[low] + (at - low) * (line[min(low + 1, top)] - line[low])


def resized(
    x,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=False,
    align_mode=0,
    data_format=None,
    recompute_scale_factor=None,
    antialias=False,
):
    last = data_format is not None and data_format.endswith("C")
    y = np.moveaxis(x, -1, 1) if last else x
    for dim in range(2, x.ndim):
        z = y.shape[dim]
        out = size[dim - 2] if size is not None else int(z * scale_factor)
        ratio = z / out if size is not None or recompute_scale_factor else 1 / scale_factor
        line = np.moveaxis(y.astype("float64"), dim, 0)
        if mode == "area":
            parts = [line[i * z // out : -(-(i + 1) * z // out)].mean(0) for i in range(out)]
        elif antialias:
            parts = [smooth(line, i, ratio, mode) for i in range(out)]
        else:
            parts = [entry(line, place(i, z, out, ratio, align_corners, align_mode, mode), mode) for i in range(out)]
        y = np.moveaxis(np.stack(parts), 0, dim)
    return np.moveaxis(y, 1, -1) if last else y


def smooth(line, i, ratio, mode):
    """Mean of all entries weighted by the kernel stretched to the shrinking ratio."""
    kernel = (lambda t: cubic(t, -0.5)) if mode == "bicubic" else (lambda t: max(1 - abs(t), 0))
    weight = np.array([kernel((j + 0.5 - (i + 0.5) * ratio) / max(ratio, 1)) for j in range(len(line))])
    return np.tensordot(weight / weight.sum(), line, 1)


def grid_of(theta, shape, align_corners=True):
    sizes = shape[2:]
    y = np.zeros((len(theta), *sizes, len(sizes)))
    for index in np.ndindex(*sizes):
        ends = [
            (2 * a / (z - 1) - 1 if z > 1 else 0.0) if align_corners else (2 * a + 1) / z - 1
            for a, z in zip(index, sizes, strict=True)
        ]
        y[(slice(None), *index)] = theta @ np.array([*ends[::-1], 1])
    return y


def bounced(at, size, align_corners):
    """at folded back between the mirrors, one bounce at a time."""
    low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
    while not low <= at <= high:
        at = 2 * low - at if at < low else 2 * high - at
    return at


def sampled(x, grid, mode="bilinear", padding_mode="zeros", align_corners=True):
    n, sizes = x.ndim - 2, x.shape[2:]
    y = np.zeros((*x.shape[:2], *grid.shape[1:-1]))
    for b, *index in np.ndindex(*grid.shape[:-1]):
        spot = []
        for g, z in zip(grid[(b, *index)][::-1].astype("float64"), sizes, strict=True):
            p = (g + 1) / 2 * (z - 1) if align_corners else ((g + 1) * z - 1) / 2
            p = bounced(p, z, align_corners) if padding_mode == "reflection" else p
            spot.append(p if padding_mode == "zeros" else min(max(p, 0), z - 1))
        total = np.zeros(x.shape[1])
        for corner in np.ndindex(*(2,) * n):
            near = [np.round(p) if mode == "nearest" else np.floor(p) + c for p, c in zip(spot, corner, strict=True)]
            weight = np.prod([1 - abs(p - q) for p, q in zip(spot, near, strict=True)])
            weight = float(not any(corner)) if mode == "nearest" else weight
            if all(0 <= q < z for q, z in zip(near, sizes, strict=True)):
                total += weight * x[(b, slice(None), *map(int, near))]
        y[(b, slice(None), *index)] = total
    return y


def shuffled(x, r):
    y = np.zeros((x.shape[0], x.shape[1] // r**2, x.shape[2] * r, x.shape[3] * r))
    for i, j in np.ndindex(r, r):
        y[:, :, i::r, j::r] = x[:, i * r + j :: r * r]
    return y


def unshuffled(x, r):
    y = np.zeros((x.shape[0], x.shape[1] * r**2, x.shape[2] // r, x.shape[3] // r))
    for i, j in np.ndindex(r, r):
        y[:, i * r + j :: r * r] = x[:, :, i::r, j::r]
    return y


def dealt(x, groups):
    per = x.shape[1] // groups
    return x[:, [g * per + i for i in range(per) for g in range(groups)]]


def swap(fn):
    return lambda x, *a: np.moveaxis(fn(np.moveaxis(x, -1, 1), a[0]), 1, -1)


SHAPES = {"linear": (2, 3, 7), "bilinear": (2, 2, 7, 5), "bicubic": (2, 2, 7, 5), "trilinear": (1, 2, 5, 4, 3), "nearest": (2, 2, 7, 5), "area": (2, 2, 7, 5)}  # fmt: skip
SIZES = {1: ((4,), (9,)), 2: ((4, 9), (10, 3)), 3: ((3, 6, 2), (8, 2, 5))}


def settings(mode):
    """Every setting a mode has: size down and up, scale up and down, and how positions are counted."""
    n = len(SHAPES[mode]) - 2
    corners = (False, True) if mode not in ("nearest", "area") else (False,)
    for corner in corners:
        for align_mode in (0, 1) if "linear" in mode and not corner else (0,):
            for at, size in enumerate(SIZES[n]):
                yield (
                    f"size{at}-{corner}-{align_mode}",
                    {"size": size, "align_corners": corner, "align_mode": align_mode},
                )
            yield (
                f"scale-{corner}-{align_mode}",
                {"scale_factor": 1.7, "align_corners": corner, "align_mode": align_mode},
            )
    yield "shrink", {"scale_factor": 0.6}
    yield "recompute", {"scale_factor": 0.6, "recompute_scale_factor": True}


IMAGE = np.ones((1, 2, 4, 6), "float32")
GRIDS = {"": ((2, 3, 5, 4), (2, 3, 3, 2)), "3d": ((2, 2, 4, 3, 3), (2, 2, 2, 3, 3))}


def moved_in_time(x, seg_num, shift_ratio=0.25, data_format="NCHW"):
    clips = x.reshape(-1, seg_num, *x.shape[1:])
    c, d = int(x.shape[1] * shift_ratio), int(x.shape[1] * 2 * shift_ratio)
    out = clips.copy()
    out[:, 1:, :c], out[:, 0, :c] = clips[:, :-1, :c], 0
    out[:, :-1, c:d], out[:, -1, c:d] = clips[:, 1:, c:d], 0
    return out.reshape(x.shape)


CASES = [
    *(Case("interpolate", floats(SHAPES[mode]), resized, kwargs={"mode": mode, **kw}, terms=32, tag=f"{mode}-{tag}") for mode in SHAPES for tag, kw in settings(mode)),
    Case("interpolate", then(floats((2, 5, 6, 3)), (3, 8), None, "bilinear", False, 0, "NHWC"), resized, tag="last", bad=((IMAGE, None, None), ConfigError, "exactly one")),
    Case("interpolate", then(floats((1, 2, 9, 8)), (4, 3), None, "bilinear", False, 0, None, None, True), resized, tag="antialias", bad=((IMAGE, [2, 2], None, "linear"), ConfigError, "mode='linear'")),
    Case("interpolate", then(floats((1, 2, 9, 8)), (4, 12), None, "bicubic", False, 0, None, None, True), resized, terms=24, tag="antialias-cubic", bad=((IMAGE, [2, 2], None, "nearest", False, 0, None, None, True), ConfigError, "antialias=True")),
    Case("interpolate", lambda rng: (rng.integers(0, 9, (1, 1, 2, 2)), [4, 4]), lambda x, s: x.repeat(2, 2).repeat(2, 3), no_grad="integers", tag="int", bad=((IMAGE, [2, 2], None, "nearest", True), ConfigError, "align_corners=True")),
    Case("interpolate", then(floats((1, 1, 2, 2)), 4), lambda x, s: x.repeat(2, 2).repeat(2, 3), tag="one-size", bad=((IMAGE, None, 0.1), ShapeError, "scale by more")),
    Case("interpolate", then(floats((1, 1, 2, 2)), None, [1, 2]), lambda x, *_: x.repeat(2, 3), tag="factors", bad=((IMAGE, [1, 2, 3]), ShapeError, "size=")),
    Case("interpolate", then(floats((1, 1, 2)), 4), lambda x, *_: x.repeat(2, 2), tag="line", bad=((IMAGE, 4, None, "nearest", False, 0, "NCL"), ConfigError, "data_format='NCL'")),
    Case("interpolate", then(floats((1, 1, 3)), 1, None, "linear", True), lambda x, *_: x[..., :1], tag="one", bad=((IMAGE, 4, None, "bilinear", False, 2), ConfigError, "align_mode=2")),
    *(Case("affine_grid", then(floats((2, n, n + 1)), shape, corner), grid_of, tag=f"{n}d-{corner}", bad=((np.ones((2, 3, 3), "float32"), shape), ShapeError, r"theta \[2, 3, 3\]")) for n, shape in ((2, (2, 1, 3, 4)), (3, (2, 1, 2, 1, 3))) for corner in (True, False)),
    *(Case("grid_sample", then(floats(*shapes), mode, pad, corner), sampled, terms=32, tag="-".join(filter(None, [dims, mode, pad, str(corner)]))) for dims, shapes in GRIDS.items() for mode in ("bilinear", "nearest") for pad in ("zeros", "border", "reflection") for corner in (True, False)),
    Case("grid_sample", floats((1, 2, 3, 4), (1, 2, 2, 2)), sampled, terms=32, bad=((IMAGE, IMAGE), ShapeError, r"grid \[1, 2, 4, 6\]")),
    Case("grid_sample", floats((1, 2, 3, 4), (1, 2, 2, 2)), sampled, terms=32, tag="defaults", bad=((IMAGE, IMAGE[..., :2], "bicubic"), ConfigError, "mode='bicubic'")),
    Case("pixel_shuffle", then(floats((2, 8, 3, 2)), 2), shuffled, bad=((IMAGE, 2), ShapeError, "2 channels")),
    Case("pixel_shuffle", then(floats((2, 3, 2, 18)), 3, "NHWC"), swap(shuffled), tag="last", bad=((IMAGE[0], 2), ShapeError, "needs 4 dims")),
    Case("pixel_unshuffle", then(floats((2, 3, 4, 6)), 2), unshuffled, bad=((IMAGE, 4), ShapeError, "downscale_factor=4")),
    Case("pixel_unshuffle", then(floats((2, 6, 9, 2)), 3, "NHWC"), swap(unshuffled), tag="last"),
    Case("channel_shuffle", then(floats((2, 6, 3, 2)), 3), dealt, bad=((IMAGE, 3), ShapeError, "groups=3")),
    Case("channel_shuffle", then(floats((2, 3, 2, 6)), 2, "NHWC"), swap(dealt), tag="last"),
    Case("temporal_shift", floats((4, 4, 2, 1)), moved_in_time, kwargs={"seg_num": 2}, bad=((np.ones((3, 4, 2, 2)),), ShapeError, "seg_num=2 does not divide")),
    Case("temporal_shift", floats((4, 2, 1, 8)), lambda x, **kw: np.moveaxis(moved_in_time(np.moveaxis(x, -1, 1), **kw), 1, -1), kwargs={"seg_num": 2, "shift_ratio": 0.5, "data_format": "NHWC"}, tag="last"),
    Case("temporal_shift", floats((4, 4, 2, 2)), moved_in_time, kwargs={"seg_num": 4, "shift_ratio": 0.2}, tag="one-way"),
]  # fmt: skip
