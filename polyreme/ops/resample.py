"""Images at other sizes and places: interpolation, sampling along a grid, pixels and channels rearranged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.export import is_symbolic_dim

from polyreme.core.annotations import ShapeLike, Sizes
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.creation import as_shape
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import reshape, transpose
from polyreme.ops.sharding import by_batch, by_image
from polyreme.ops.windows.geometry import per_dim
from polyreme.ops.windows.pooling import adaptive_average, even_bins

_DIMS = {"linear": (1,), "bilinear": (2,), "bicubic": (2,), "trilinear": (3,), "nearest": (1, 2, 3), "area": (1, 2, 3)}
_FORMATS = {1: ("NCL", "NCW", "NLC", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
# an output entry is sum over taps of weight * input[index]: (index [out, taps], weight [out, taps]). Arrays of NumPy,
# or of jax where an export leaves a size open, which then are part of the program
Taps = tuple[Any, Any]


def _module_of(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else jnp


def _cubic(t: Any, a: float) -> Any:
    """Keys' cubic convolution kernel, 1981, equation 4, with its free parameter a."""
    t, where = abs(t), _module_of(t).where
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = a * (((t - 5) * t + 8) * t - 4)
    return where(t <= 1, near, where(t < 2, far, 0))


def _taps_around(source: Any, size: Any, reach: int, kernel: Callable[[Any], Any]) -> Taps:
    """2 * reach taps around each real source position; those outside repeat the edge."""
    xp = _module_of(source)
    index = xp.floor(source).astype(np.int64)[:, None] + np.arange(1 - reach, reach + 1)
    return xp.clip(index, 0, size - 1), kernel(source[:, None] - index)


def _smooth_taps(size: int, out: int, ratio: float, kernel: Callable, support: float) -> Taps:
    """Taps of the kernel stretched by the shrinking ratio, so that nothing in between is skipped."""
    stretch = max(ratio, 1.0)
    centre = (np.arange(out) + 0.5) * ratio
    first = np.floor(centre - support * stretch).astype(np.int64)
    index = first[:, None] + np.arange(2 * math.ceil(support * stretch) + 1)
    weight = kernel((index + 0.5 - centre[:, None]) / stretch) * ((index >= 0) & (index < size))
    return np.clip(index, 0, size - 1), weight / weight.sum(1, keepdims=True)


def _triangle(t: Any) -> Any:
    return _module_of(t).maximum(1 - abs(t), 0)


def _dim_taps(
    size: Any, out: Any, mode: str, ratio: Any, align_corners: bool, align_mode: int, antialias: bool
) -> Taps:
    """Taps of one dim; ratio is input entries per output entry."""
    is_open = any(map(is_symbolic_dim, (size, out)))
    xp = jnp if is_open else np
    index = xp.arange(out)
    if is_open:
        size, out = (jnp.asarray(d, jnp.int64) for d in (size, out))
    if mode == "nearest":
        return xp.minimum(xp.floor(index * ratio).astype(np.int64), size - 1)[:, None], xp.ones_like(index)[:, None]
    cubic = mode == "bicubic"
    if antialias:
        # the smooth form of the cubic kernel has another parameter by custom
        return _smooth_taps(size, out, ratio, (lambda t: _cubic(t, -0.5)) if cubic else _triangle, 2 if cubic else 1)
    if align_corners:
        source = index * ((size - 1) / xp.maximum(out - 1, 1))  # of one entry, index is 0
    elif align_mode == 1 and not cubic:
        source = index * ratio
    else:
        source = (index + 0.5) * ratio - 0.5
    if cubic:
        return _taps_around(source, size, 2, lambda t: _cubic(t, -0.75))
    return _taps_around(xp.clip(source, 0, size - 1), size, 1, _triangle)


def _ratio(size: Any, out: Any) -> Any:
    if any(map(is_symbolic_dim, (size, out))):
        return jnp.asarray(size, jnp.float64) / jnp.asarray(out, jnp.float64)
    return size / out


def _scaled(size: Any, factor: float) -> Any:
    """int(size * factor), of an open size too."""
    if not is_symbolic_dim(size):
        return int(size * factor)
    part = Fraction(repr(float(factor)))
    return size * part.numerator // part.denominator


def _new_sizes(x: Array, n: int, sizes: tuple, size: Any, scale_factor: Any, recompute: Any) -> tuple[tuple, list]:
    """(output sizes, input entries per output entry of each dim)."""
    if (size is None) == (scale_factor is None):
        raise ConfigError(f"interpolate: size={size!r} and scale_factor={scale_factor!r}; give exactly one of them")
    if size is not None:
        if isinstance(size, (list, tuple)) and len(size) != n:
            raise ShapeError(f"interpolate: size={list(size)} for {n} spatial dims; give one number, or {n} of them")
        is_open = isinstance(size, (list, tuple)) and len(size) == n and any(map(is_symbolic_dim, size))
        out = tuple(size) if is_open else per_dim(size, n, "interpolate: size")
        return out, [_ratio(z, o) for z, o in zip(sizes, out, strict=True)]
    factors = (scale_factor,) * n if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
    factors = factors * n if len(factors) == 1 else factors
    if len(factors) != n or min(factors) <= 0:
        raise ShapeError(f"interpolate: scale_factor={scale_factor!r}; needs a positive number or {n} of them")
    out = tuple(_scaled(z, f) for z, f in zip(sizes, factors, strict=True))
    if any(o < 1 for o in out if not is_symbolic_dim(o)):
        raise ShapeError(
            f"interpolate: scale_factor={scale_factor!r} makes {list(sizes)} into {list(out)}; scale by more"
        )
    return out, [_ratio(z, o) for z, o in zip(sizes, out, strict=True)] if recompute else [1 / f for f in factors]


@op(method=False, rule=by_image)
def interpolate(
    x: Array,
    size: Sizes | None = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool = False,
    align_mode: int = 0,
    data_format: str | None = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Array:
    """x at other spatial sizes: [N, C, *sizes] -> [N, C, *size], or int(sizes * scale_factor).

    mode: nearest, linear (1 dim), bilinear and bicubic (2), trilinear (3), area (means over even windows). Output i is
    taken at (i + 1/2) * ratio - 1/2; at i * (in - 1) / (out - 1) with align_corners; at i * ratio with align_mode=1
    (linear modes) and for nearest. ratio is 1 / scale_factor, or in / out when size is given or
    recompute_scale_factor is true. antialias (bilinear, bicubic) stretches the kernel when shrinking. Bicubic uses
    Keys' kernel with a = -0.75. Raises ConfigError and ShapeError for settings that do not go together.
    """
    n = x.ndim - 2
    mode = mode.lower()
    if mode not in _DIMS or n not in _DIMS[mode]:
        raise ConfigError(
            f"interpolate: mode={mode!r} for x {list(x.shape)}; the modes are {', '.join(_DIMS)}, for 3, 4 (bi-) or "
            "5 (tri-) dims"
        )
    data_format = data_format or _FORMATS[n][0]
    if data_format not in _FORMATS[n]:
        raise ConfigError(f"interpolate: data_format={data_format!r} of x {list(x.shape)}; choose {_FORMATS[n]}")
    if align_corners and mode in ("nearest", "area"):
        raise ConfigError(f"interpolate: align_corners=True has no meaning for mode={mode!r}; leave it out")
    if antialias and (mode not in ("bilinear", "bicubic") or align_corners):
        raise ConfigError(f"interpolate: antialias=True with {mode=}, {align_corners=}; for bilinear and bicubic only")
    if align_mode not in (0, 1):
        raise ConfigError(f"interpolate: align_mode={align_mode!r}; choose 0 or 1")
    last = data_format.endswith("C")
    x = x if mode == "nearest" else floating(x)
    y = jnp.moveaxis(x, -1, 1) if last else x
    y = y if mode == "nearest" else wide(y)
    sizes = y.shape[2:]
    out, ratios = _new_sizes(y, n, sizes, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        y = adaptive_average(y, [even_bins(z, o) for z, o in zip(sizes, out, strict=True)])
    else:
        for dim, (z, o, ratio) in enumerate(zip(sizes, out, ratios, strict=True)):
            y = _apply(y, 2 + dim, _dim_taps(z, o, mode, ratio, align_corners, align_mode, antialias))
    y = y.astype(x.dtype)
    return jnp.moveaxis(y, 1, -1) if last else y


def _apply(x: Array, dim: int, taps: Taps) -> Array:
    """x with one dim replaced by the sums over taps; the transpose gathers too: scattering is ten times slower."""
    size = x.shape[dim]
    if not isinstance(taps[0], np.ndarray):  # nothing is sorted while an export is traced
        return _gather(x, dim, taps)

    @jax.custom_vjp
    def resampled(x: Array) -> Array:
        return _gather(x, dim, taps)

    def pull(_: None, cotangent: Array) -> tuple[Array]:
        return (_apply(cotangent, dim, _transpose(taps, size)),)

    resampled.defvjp(lambda x: (resampled(x), None), pull)
    return resampled(x)


def _gather(x: Array, dim: int, taps: Taps) -> Array:
    index, weight = taps
    if index.shape[1] == 1 and (not isinstance(weight, np.ndarray) or np.all(weight == 1)):
        return jnp.take(x, jnp.asarray(index[:, 0]), dim)
    v = wide(x)
    # a gather for each tap fuses with the sum; one gather of all taps does not
    shape = [-1 if d == dim else 1 for d in range(v.ndim)]
    terms = (
        jnp.take(v, jnp.asarray(index[:, tap]), dim) * jnp.asarray(weight[:, tap], v.dtype).reshape(shape)
        for tap in range(index.shape[1])
    )
    return functools.reduce(jnp.add, terms).astype(x.dtype)


def _transpose(taps: Taps, size: int) -> Taps:
    """Taps of the transposed map, to `size` entries; entries read less often than others repeat a tap with weight 0."""
    index, weight = taps
    order = np.argsort(index, axis=None, kind="stable")
    to = index.ravel()[order]
    place = np.arange(to.size) - np.searchsorted(to, to)  # which reader of its entry each is
    first = np.append(order // index.shape[1], 0)[np.searchsorted(to, np.arange(size))]
    readers = np.repeat(first[:, None], int(place.max(initial=0)) + 1, 1)
    weights = np.zeros(readers.shape)
    readers[to, place] = order // index.shape[1]
    weights[to, place] = weight.ravel()[order]
    return readers, weights


@op(method=False, real=True)
def affine_grid(theta: Array, out_shape: ShapeLike, align_corners: bool = True) -> Array:
    """The input position of each output entry of an affine map, in [-1, 1] coordinates with x first, for grid_sample.

    theta [N, 2, 3], out_shape [N, C, H, W] -> [N, H, W, 2]; theta [N, 3, 4], out_shape [N, C, D, H, W] -> [N, D, H,
    W, 3]. Raises ShapeError when the two do not fit.
    """
    sizes = as_shape(out_shape, "affine_grid")
    n = len(sizes) - 2
    if n not in (2, 3) or theta.shape != (sizes[0], n, n + 1):
        fitting = f"needs {[sizes[0], n, n + 1]}" if n in (2, 3) else "needs 4 or 5 sizes"
        raise ShapeError(f"affine_grid: theta {list(theta.shape)} for out_shape {list(sizes)}; {fitting}")
    theta = floating(theta)
    lines = []
    for size in sizes[2:]:
        shrink = 1.0 if align_corners else (size - 1) / size
        lines.append(np.linspace(-shrink, shrink, size) if size > 1 else np.zeros(1))
    places = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes[2:])], -1)
    v = wide(theta)
    # a sum of n + 1 products, spelled out: an accelerator's matmul may round its operands
    grid = jnp.sum(jnp.asarray(places, v.dtype)[None, ..., None, :] * v.reshape(-1, *[1] * n, n, n + 1), -1)
    return grid.astype(theta.dtype)


def _unnormalized(at: Array, size: int, align_corners: bool) -> Array:
    return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2


def _reflect(at: Array, size: int, align_corners: bool) -> Array:
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return jnp.zeros_like(at)
    away = jnp.abs(at - low)
    fold = jnp.mod(away, 2 * span)
    return jnp.minimum(fold, 2 * span - fold) + low


@op(method=False)
def grid_sample(
    x: Array, grid: Array, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = True
) -> Array:
    """x read at real positions: [N, C, H, W], [N, *o, 2] -> [N, C, *o] (5 dims: [N, C, D, H, W], [N, *o, 3]).

    grid holds (x, y) or (x, y, z) in [-1, 1], the centres of the corner entries with align_corners, else their outer
    edges. mode: bilinear or nearest (ties to even). padding_mode outside: zeros, border (nearest edge) or reflection.
    Source: arXiv:1506.02025. Raises ShapeError and ConfigError for what does not fit.
    """
    if mode not in ("bilinear", "nearest") or padding_mode not in ("zeros", "border", "reflection"):
        raise ConfigError(
            f"grid_sample: {mode=}, {padding_mode=}; choose 'bilinear' or 'nearest', and 'zeros', 'border' or "
            "'reflection'"
        )
    n = x.ndim - 2
    if n not in (2, 3) or grid.ndim != x.ndim or grid.shape[-1] != n or grid.shape[0] != x.shape[0]:
        raise ShapeError(
            f"grid_sample: grid {list(grid.shape)} for x {list(x.shape)}; needs [N, H, W, 2] for 4 dims, "
            "[N, D, H, W, 3] for 5"
        )
    x, grid = promote_floating(x, grid)
    sizes = x.shape[2:]
    v, places = wide(x), []
    for dim, size in enumerate(sizes):
        place = _unnormalized(wide(grid)[..., n - 1 - dim], size, align_corners)
        if padding_mode == "reflection":
            place = _reflect(place, size, align_corners)
        places.append(place if padding_mode == "zeros" else jnp.clip(place, 0, size - 1))
    flat = v.reshape(*v.shape[:2], -1)
    if mode == "nearest":
        return _read_entries(flat, [jnp.round(place) for place in places], sizes).astype(x.dtype)
    total = jnp.zeros((), v.dtype)
    for corner in np.ndindex(*(2,) * n):
        near = [jnp.floor(place) + c for place, c in zip(places, corner, strict=True)]
        weight = jnp.ones((), v.dtype)
        for place, lower in zip(places, near, strict=True):
            weight = weight * (1 - jnp.abs(place - lower))
        total = total + weight[:, None] * _read_entries(flat, near, sizes)
    return total.astype(x.dtype)


def _read_entries(flat: Array, places: list[Array], sizes: tuple) -> Array:
    """[N, C, entries] at whole positions, 0 outside -> [N, C, *o]."""
    index, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for at, size in zip(places, sizes, strict=True):
        inside = inside & (at >= 0) & (at < size)
        index = index * size + jnp.clip(at, 0, size - 1).astype(jnp.int32)
    values = jnp.take_along_axis(flat, index.reshape(index.shape[0], 1, -1), 2)
    return jnp.where(inside[:, None], values.reshape(*flat.shape[:2], *index.shape[1:]), 0)


def _image(x: Array, data_format: str, what: str) -> bool:
    """Whether channels stand last."""
    if x.ndim != 4 or data_format not in ("NCHW", "NHWC"):
        raise ShapeError(f"{what}: x {list(x.shape)} as {data_format!r}; needs 4 dims, NCHW or NHWC")
    return data_format == "NHWC"


@op(method=False, rule=by_image)
def pixel_shuffle(x: Array, upscale_factor: int, data_format: str = "NCHW") -> Array:
    """Channels spread over r x r blocks of pixels: [N, C r^2, H, W] -> [N, C, H r, W r]. Source: arXiv:1609.05158.

    Raises ShapeError unless r^2 divides the channels.
    """
    last, r = _image(x, data_format, "pixel_shuffle"), upscale_factor
    y = jnp.moveaxis(x, -1, 1) if last else x
    b, c, h, w = y.shape
    if r < 1 or c % (r * r):
        raise ShapeError(
            f"pixel_shuffle: {c} channels of x {list(x.shape)} are no multiple of upscale_factor {r} squared"
        )
    y = y.reshape(b, c // (r * r), r, r, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(b, c // (r * r), h * r, w * r)
    return jnp.moveaxis(y, 1, -1) if last else y


@op(method=False, rule=by_image)
def pixel_unshuffle(x: Array, downscale_factor: int, data_format: str = "NCHW") -> Array:
    """The inverse of pixel_shuffle: [N, C, H r, W r] -> [N, C r^2, H, W]; ShapeError unless r divides H and W."""
    last, r = _image(x, data_format, "pixel_unshuffle"), downscale_factor
    y = jnp.moveaxis(x, -1, 1) if last else x
    b, c, h, w = y.shape
    if r < 1 or h % r or w % r:
        raise ShapeError(f"pixel_unshuffle: downscale_factor={r} does not divide the image of x {list(x.shape)}")
    y = y.reshape(b, c, h // r, r, w // r, r).transpose(0, 1, 3, 5, 2, 4).reshape(b, c * r * r, h // r, w // r)
    return jnp.moveaxis(y, 1, -1) if last else y


@op(method=False, rule=by_batch)
def channel_shuffle(x: Array, groups: int, data_format: str = "NCHW") -> Array:
    """Channels of `groups` groups dealt out in turn. Source: arXiv:1707.01083, section 3.1.

    Raises ShapeError unless groups divides the channels.
    """
    dim = 3 if _image(x, data_format, "channel_shuffle") else 1
    if groups < 1 or x.shape[dim] % groups:
        raise ShapeError(f"channel_shuffle: groups={groups} does not divide the channels of x {list(x.shape)}")
    split = x.reshape(*x.shape[:dim], groups, -1, *x.shape[dim + 1 :])
    return jnp.swapaxes(split, dim, dim + 1).reshape(x.shape)


@op(method=False)
def temporal_shift(x: Array, seg_num: int, shift_ratio: float = 0.25, data_format: str = "NCHW") -> Array:
    """Channels of video frames moved in time: x [N * seg_num, C, H, W], the frames of a clip one after the other.

    The first C * shift_ratio channels come from the frame before, those up to 2 C * shift_ratio from the frame after, 0
    past the ends.
    Source: arXiv:1811.08383. Raises ShapeError unless seg_num divides the frames, ConfigError for a ratio over 0.5.
    """
    if not 0 <= shift_ratio <= 0.5:
        raise ConfigError(f"temporal_shift: shift_ratio={shift_ratio}; give a share from 0 to 0.5")
    last = _image(x, data_format, "temporal_shift")
    if seg_num < 1 or x.shape[0] % seg_num:
        raise ShapeError(f"temporal_shift: seg_num={seg_num} does not divide the frames of x {list(x.shape)}")
    y = jnp.moveaxis(x, -1, 1) if last else x
    clips = y.reshape(-1, seg_num, *y.shape[1:])
    first, second = int(y.shape[1] * shift_ratio), int(y.shape[1] * 2 * shift_ratio)
    padded = jnp.pad(clips, [(0, 0), (1, 1), *[(0, 0)] * 3])
    parts = [padded[:, :-2, :first], padded[:, 2:, first:second], clips[:, :, second:]]
    y = jnp.concatenate(parts, 2).reshape(y.shape)
    return jnp.moveaxis(y, 1, -1) if last else y


ALIASES = {"upsample": "interpolate"}


def space_to_depth(x: Any, b: int) -> Any:
    """[n, c, h, w] -> [n, c b^2, h / b, w / b], in the order of PaddlePaddle 1.x.

    Channels are taken as b^2 groups, whose pixels are laid in turn into images b times as large, which are then cut as
    they lie in memory: the reorg layer of Redmon and Farhadi, 2016, arXiv:1612.08242.
    """
    c, h, w = x.shape[1:]
    groups = transpose(reshape(x, [-1, b, b, c // b**2, h, w]), [0, 3, 4, 1, 5, 2])
    return reshape(groups, [-1, c * b**2, h // b, w // b])


def nearest_corners(x: Any, sizes: Sequence[int], first: int) -> Any:
    """The pixels nearest to i * (size - 1) / (new - 1), rounded half up, in dims of new sizes from `first` on.

    So PaddlePaddle 1.x reads "nearest" with align_corners.
    """
    for dim, new in enumerate(sizes, first):
        ratio = (x.shape[dim] - 1) / (new - 1) if new > 1 else 0.0
        x = gather(x, np.floor(np.arange(new) * ratio + 0.5).astype(np.int64), axis=dim)
    return x
