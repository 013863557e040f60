"""Pooling: max, average and power means over windows, adaptive forms, and the inverse of max pooling.

padding: an int, one int or one (before, after) pair a spatial dim, "SAME" or "VALID". Indices of maxima
are int32 and count through the spatial dims of their own image and channel. In shapes, o is an output size and k the
size of a window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor, Padding, Sizes
from polyreme.core.dtype import floating
from polyreme.core.op import composite, op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels import select
from polyreme.ops.activation import wide
from polyreme.ops.by_index import bounded
from polyreme.ops.ids import check_range
from polyreme.ops.sharding import by_image
from polyreme.ops.windows.geometry import (
    MAX_SIZE,
    check_sizes,
    is_channels_last,
    is_negative,
    per_dim,
    resolve_pads,
    spatial,
)

_MOST_TAPS = 16  # along a dim of a window whose entries are compared one by one


class _Grid:
    """The positions of the windows of one call. ends: how many entries past the end a ceil_mode window may reach, per
    dim."""

    def __init__(
        self, n: int, x: Array, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, fmt: str, what: str
    ) -> None:
        self.n, self.what = n, what
        self.last = is_channels_last(fmt, n, what)
        self.sizes = spatial(x.shape, n, self.last, what)
        self.kernel = per_dim(kernel_size, n, f"{what}: kernel_size")
        self.stride = self.kernel if stride is None else per_dim(stride, n, f"{what}: stride")
        named = padding.upper() if isinstance(padding, str) else ""
        if ceil_mode and named == "VALID":
            raise ConfigError(f"{what}: ceil_mode=True with padding='VALID', which has no windows past the end")
        ceil_mode = ceil_mode and not named  # windows of "SAME" cover everything already
        self.pads = resolve_pads(padding, self.sizes, self.kernel, self.stride, (1,) * n, self.last, what)
        room = [z + sum(p) - k for z, p, k in zip(self.sizes, self.pads, self.kernel, strict=True)]
        if not ceil_mode and any(is_negative(r) for r in room):
            raise ShapeError(f"{what}: kernel_size={kernel_size!r} does not fit in {list(self.sizes)} with {padding=}")
        self.more = [2 * s - 1 if ceil_mode else s for s in self.stride]
        # with ceil_mode a window larger than all there is takes all
        self.counts = [
            1 if is_negative(r) else _windows(r, m, s) for r, m, s in zip(room, self.more, self.stride, strict=True)
        ]
        self.ends = [
            max((c - 1) * s - r, 0) if ceil_mode else 0 for c, s, r in zip(self.counts, self.stride, room, strict=True)
        ]

    def reduce(self, x: Array, zero: Any, fn: Any) -> Array:
        """fn over each window, padding and ends counting as zero."""
        return lax.reduce_window(
            x,
            np.asarray(zero, x.dtype),
            fn,
            self._full(self.kernel, 1),
            self._full(self.stride, 1),
            self._around(),
        )

    def largest(self, x: Array) -> Array:
        """The largest entry of each window, NaN if one is; the first of equal ones gets the gradient.

        On processors dim by dim, by comparing the entries of each window one after the other, which fuses into a loop:
        XLA's reduce_window takes 3 to 8 times as long there, and its gradient, select_and_scatter, 6 to 50 times.
        """
        lowest = _lowest(x.dtype)
        is_open = not all(isinstance(size, int) for size in self.sizes)
        if not is_open and (max(self.kernel) > _MOST_TAPS or select.backend() != "cpu"):
            return self.reduce(x, lowest, lax.max)
        if is_open:
            # in an exported program no width of padding can be open, nor can one in reduce_window's gradient. So every
            # window's last stride is padded to be there: what is not negative is then seen not to be
            around = [(p[0], p[1] + (m - 1)) for p, m in zip(self.pads, self.more, strict=True)]
        else:
            around = [(p[0], p[1] + e) for p, e in zip(self.pads, self.ends, strict=True)]
        v = jnp.pad(x, self._full(around, (0, 0)), constant_values=lowest)
        # the last dim first: the first of the first row with an equal one is the first in order
        for dim in reversed(range(self.n)):
            count, stride = self.counts[dim], self.stride[dim]
            length = count * stride if is_open else (count - 1) * stride + 1
            v = _largest_along(v, dim + (1 if self.last else 2), self.kernel[dim], stride, length)
        return v

    def _around(self) -> list:
        """Padding of each dim of x, ends counted."""
        return self._full([(a, b + e) for (a, b), e in zip(self.pads, self.ends, strict=True)], (0, 0))

    def entries(self, padded: bool) -> Any:
        """The number of entries in each window, [*o] or [1, ..]; padding counts if padded, ends never do.

        Counted along each dim and multiplied by the program, which may be traced for larger sizes than memory has.
        """
        if not (np.any(self.pads) or np.any(self.ends)):
            return np.full([1] * self.n, math.prod(self.kernel))
        return functools.reduce(jnp.multiply.outer, [self._entries_along(dim, padded) for dim in range(self.n)])

    def _entries_along(self, dim: int, padded: bool) -> Any:
        """The same along one dim, [o]: an ndarray, or an Array where its size is left open in an exported program."""
        (before, after), end, size = self.pads[dim], self.ends[dim], self.sizes[dim]
        if isinstance(size, int):
            low, high = (-before, size + after) if padded else (0, size)
            starts = np.arange(self.counts[dim]) * self.stride[dim] - before
            return np.maximum(np.minimum(starts + self.kernel[dim], high) - np.maximum(starts, low), 0)
        ones = jnp.ones(size + (before + after if padded else 0), jnp.int32)
        around = (0, end) if padded else (before, after + end)
        return lax.reduce_window(ones, np.int32(0), lax.add, [self.kernel[dim]], [self.stride[dim]], [around])

    def _full(self, values: Any, fill: Any) -> list:
        return [fill, *values, fill] if self.last else [fill, fill, *values]

    def positions(self) -> list[np.ndarray]:
        """Index of each entry of each window by dim, [o, k]; outside [0, size) for padding."""
        return [
            np.arange(c)[:, None] * s - p[0] + np.arange(k)
            for c, s, p, k in zip(self.counts, self.stride, self.pads, self.kernel, strict=True)
        ]


def _windows(room: Any, more: int, stride: int) -> Any:
    """The number of windows that fit into a room. Of an open size in the form that jax.lax's convolutions have, so that
    results of both are seen to be of one size; but where it is open whether there is room, in one that is seen not to
    be negative."""
    try:
        if more == stride and room >= 0:
            return room // stride + 1
    except InconclusiveDimensionOperation:
        pass
    return (room + more) // stride


def _largest_along(x: Array, dim: int, kernel: int, stride: int, length: int) -> Array:
    """The largest entry of each window along one dim. length: how far their starts reach."""
    best: Any = None
    for start in range(kernel):
        entry = lax.slice_in_dim(x, start, start + length, stride, dim)
        best = entry if best is None else jnp.where((entry > best) | (entry != entry), entry, best)
    return best


def _lowest(dtype: Any) -> Any:
    if dtypes.is_floating(dtype):
        return -np.inf
    if dtype == np.dtype(bool) or dtypes.is_complex(dtype):
        raise DTypeError(f"max pooling: x is {dtype.name}, which has no order; needs a floating or integer dtype")
    return np.iinfo(dtype).min


def largest(x: Array, positions: Sequence[Any], last: bool = False) -> tuple[Array, Array]:
    """(the maximum of each window, its flat index as int32); of equal ones the first.

    positions: for each dim the entries of its windows, [o, k], an entry outside the dim standing for none. Dim by dim,
    the last one first, which is the order of the flat index and needs no array of all the entries of all windows.
    """
    x = jnp.moveaxis(x, -1, 1) if last else x
    value, places = x, []
    for number in reversed(range(len(positions))):
        value, places = _largest_in(value, places, jnp.asarray(positions[number]), 2 + number)
    index = places[0]
    for size, place in zip(x.shape[3:], places[1:], strict=True):
        index = index * size + place
    index = index.astype(jnp.int32)
    return (jnp.moveaxis(value, 1, -1), jnp.moveaxis(index, 1, -1)) if last else (value, index)


def _largest_in(x: Array, places: list[Array], at: Array, dim: int) -> tuple[Array, list[Array]]:
    """(the maximum of each window along dim, its place in dim and those of `places`, in the dims behind it)."""
    size, shape = x.shape[dim], [*at.shape, *[1] * (x.ndim - dim - 1)]
    inside, at = ((at >= 0) & (at < size)).reshape(shape), at.clip(0, size - 1)
    entries = jnp.where(inside, jnp.take(x, at, dim), jnp.asarray(_lowest(x.dtype), x.dtype))
    pick = jnp.argmax(entries, dim + 1, keepdims=True)

    def picked(windows: Array) -> Array:
        return jnp.take_along_axis(windows, pick, dim + 1).squeeze(dim + 1)

    own = picked(jnp.broadcast_to(at.reshape(shape), entries.shape))
    return picked(entries), [own, *(picked(jnp.take(place, at, dim)) for place in places)]


def _max_pool(
    n: int, x: Array, kernel_size: Any, stride: Any, padding: Any, return_mask: bool, ceil_mode: bool, fmt: str
) -> Any:
    grid = _Grid(n, x, kernel_size, stride, padding, ceil_mode, fmt, f"max_pool{n}d")
    if return_mask:
        return largest(x, grid.positions(), grid.last)
    return grid.largest(x)


@op(method=False, rule=by_image)
def max_pool1d(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    return_mask: bool = False,
    ceil_mode: bool = False,
) -> Any:
    """Largest entry of each window, [N, C, L] -> [N, C, L']; with return_mask also its index.

    stride is kernel_size unless given; ceil_mode keeps a last window that reaches past the end. One of equal maxima
    gets the gradient. Raises ShapeError when no window fits.
    """
    return _max_pool(1, x, kernel_size, stride, padding, return_mask, ceil_mode, "NCL")


@op(method=False, rule=by_image)
def max_pool2d(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    return_mask: bool = False,
    ceil_mode: bool = False,
    data_format: str = "NCHW",
) -> Any:
    """Largest entry of each window, [N, C, H, W] -> [N, C, H', W']; the rest as for max_pool1d."""
    return _max_pool(2, x, kernel_size, stride, padding, return_mask, ceil_mode, data_format)


@op(method=False, rule=by_image)
def max_pool3d(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    return_mask: bool = False,
    ceil_mode: bool = False,
    data_format: str = "NCDHW",
) -> Any:
    """Largest entry of each window, [N, C, D, H, W] -> [N, C, D', H', W']; the rest as for max_pool1d."""
    return _max_pool(3, x, kernel_size, stride, padding, return_mask, ceil_mode, data_format)


def _avg_pool(
    n: int,
    x: Array,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    exclusive: bool,
    divisor: Any,
    fmt: str,
) -> Array:
    x = floating(x)
    grid = _Grid(n, x, kernel_size, stride, padding, ceil_mode, fmt, f"avg_pool{n}d")
    total = grid.reduce(wide(x), 0, lax.add)
    if divisor is not None:
        if divisor <= 0:
            raise ConfigError(f"avg_pool{n}d: divisor_override={divisor}; it must be positive")
        return (total / divisor).astype(x.dtype)
    # a window with no entry at all sums to 0; dividing by 1 keeps it 0
    counts = jnp.asarray(grid.entries(padded=not exclusive), total.dtype).clip(1)
    counts = counts[..., None] if grid.last else counts
    return (total / counts).astype(x.dtype)


@op(method=False, rule=by_image)
def avg_pool1d(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    exclusive: bool = True,
    ceil_mode: bool = False,
) -> Array:
    """Mean of each window, [N, C, L] -> [N, C, L'].

    exclusive: padding does not count as entries. stride is kernel_size unless given; ceil_mode keeps a last window that
    reaches past the end, where there are no entries. Raises ShapeError when no window fits.
    """
    return _avg_pool(1, x, kernel_size, stride, padding, ceil_mode, exclusive, None, "NCL")


@op(method=False, rule=by_image)
def avg_pool2d(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    exclusive: bool = True,
    divisor_override: Any = None,
    data_format: str = "NCHW",
) -> Array:
    """Mean of each window, [N, C, H, W] -> [N, C, H', W'], or its sum / divisor_override; else as avg_pool1d."""
    return _avg_pool(2, x, kernel_size, stride, padding, ceil_mode, exclusive, divisor_override, data_format)


@op(method=False, rule=by_image)
def avg_pool3d(
    x: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    exclusive: bool = True,
    divisor_override: Any = None,
    data_format: str = "NCDHW",
) -> Array:
    """Mean of each window, [N, C, D, H, W] -> [N, C, D', H', W'], or its sum / divisor_override; else as avg_pool1d."""
    return _avg_pool(3, x, kernel_size, stride, padding, ceil_mode, exclusive, divisor_override, data_format)


def output_sizes(sizes: Sequence[int], output_size: Any, what: str) -> tuple[int, ...]:
    """The output size of each dim: one for all, or one each; None keeps the dim's own."""
    n = len(sizes)
    asked = (output_size,) * n if output_size is None or isinstance(output_size, int) else tuple(output_size)
    if len(asked) == 1:
        asked = asked * n
    wanted = tuple(z if o is None else o for z, o in zip(sizes, asked, strict=False))
    numbers = [o for o in wanted if not is_symbolic_dim(o)]  # a size that an export leaves open may be kept
    if len(asked) != n or any(not isinstance(o, int) or not 1 <= o <= MAX_SIZE for o in numbers):
        raise ShapeError(
            f"{what}: output_size={output_size!r}; needs an int or {n} of them, each at least 1 and less than 2**31, "
            "or None"
        )
    return wanted


def _adaptive(n: int, shape: tuple, output_size: Any, last: bool, what: str) -> list[Any]:
    """Positions by dim, [o, k]: window i of o covers floor(i size / o) up to ceil((i + 1) size / o); -1 beyond it."""
    sizes = spatial(shape, n, last, what)
    return [even_bins(z, o) for z, o in zip(sizes, output_sizes(sizes, output_size, what), strict=True)]


def even_bins(size: int, count: int) -> Any:
    """Positions of the `count` windows that cover a dim evenly, [o, k]; -1 beyond a window's end.

    Of a size that an export leaves open every window has a place for each position, as the longest depends on the size;
    one window has them all, and as many windows as positions have one each.
    """
    if is_symbolic_dim(size):
        places = jnp.arange(size)
        if count is size or count == 1:
            return places[None] if count is not size else places[:, None]
        number, length = jnp.arange(count)[:, None], jnp.asarray(size)
        inside = (places >= number * length // count) & (places < -(-(number + 1) * length // count))
        return jnp.where(inside, places, -1)
    at = np.arange(count)
    starts, stops = at * size // count, -(-(at + 1) * size // count)
    inside = starts[:, None] + np.arange(int((stops - starts).max()))
    return np.where(inside < stops[:, None], inside, -1)


def adaptive_average(x: Array, positions: list[Any]) -> Array:
    """Means over windows, [N, C, *sizes] -> [N, C, *o], dim by dim: a mean over a box is a mean of means."""
    v = wide(x)
    for dim, windows in enumerate(positions):
        if windows.shape[0] == 1:
            v = jnp.mean(v, 2 + dim, keepdims=True)
            continue
        if windows.shape[1] == 1 and windows.shape[0] == v.shape[2 + dim]:
            continue
        inside = (windows >= 0).reshape([*windows.shape] + [1] * (v.ndim - 3 - dim))
        taken = jnp.take(v, jnp.asarray(windows.clip(0)), 2 + dim)
        total = jnp.sum(jnp.where(inside, taken, 0), 3 + dim)
        v = total / jnp.asarray(inside.sum(1), v.dtype)
    return v.astype(x.dtype)


def _adaptive_avg(n: int, x: Array, output_size: Any, fmt: str) -> Array:
    what = f"adaptive_avg_pool{n}d"
    x, last = floating(x), is_channels_last(fmt, n, what)
    positions = _adaptive(n, x.shape, output_size, last, what)
    if not last:
        return adaptive_average(x, positions)
    return jnp.moveaxis(adaptive_average(jnp.moveaxis(x, -1, 1), positions), 1, -1)


@op(method=False, rule=by_image)
def adaptive_avg_pool1d(x: Array, output_size: Sizes) -> Array:
    """Means over output_size windows that cover the dim evenly, [N, C, L] -> [N, C, output_size].

    Window i is floor(i L / n) up to ceil((i + 1) L / n). Raises ShapeError for an output_size below 1.
    """
    return _adaptive_avg(1, x, output_size, "NCL")


@op(method=False, rule=by_image)
def adaptive_avg_pool2d(x: Array, output_size: Sizes, data_format: str = "NCHW") -> Array:
    """Means over an even grid of windows, [N, C, H, W] -> [N, C, *output_size]; None keeps a size."""
    return _adaptive_avg(2, x, output_size, data_format)


@op(method=False, rule=by_image)
def adaptive_avg_pool3d(x: Array, output_size: Sizes, data_format: str = "NCDHW") -> Array:
    """Means over an even grid of windows, [N, C, D, H, W] -> [N, C, *output_size]; None keeps a size."""
    return _adaptive_avg(3, x, output_size, data_format)


def _adaptive_max(n: int, x: Array, output_size: Any, return_mask: bool) -> Any:
    value, index = largest(x, _adaptive(n, x.shape, output_size, False, f"adaptive_max_pool{n}d"), False)
    return (value, index) if return_mask else value


@op(method=False, rule=by_image)
def adaptive_max_pool1d(x: Array, output_size: Sizes, return_mask: bool = False) -> Any:
    """Maxima over the windows of adaptive_avg_pool1d; with return_mask also their indices."""
    return _adaptive_max(1, x, output_size, return_mask)


@op(method=False, rule=by_image)
def adaptive_max_pool2d(x: Array, output_size: Sizes, return_mask: bool = False) -> Any:
    """Maxima over the windows of adaptive_avg_pool2d; with return_mask also their indices."""
    return _adaptive_max(2, x, output_size, return_mask)


@op(method=False, rule=by_image)
def adaptive_max_pool3d(x: Array, output_size: Sizes, return_mask: bool = False) -> Any:
    """Maxima over the windows of adaptive_avg_pool3d; with return_mask also their indices."""
    return _adaptive_max(3, x, output_size, return_mask)


def _lp_pool(n: int, x: Array, norm_type: float, grid: _Grid) -> Array:
    p = float(norm_type)
    if math.isinf(p):
        return grid.largest(x)
    if p <= 0:
        raise ConfigError(f"lp_pool{n}d: norm_type={norm_type}; it must be positive")
    v = wide(x)
    total = grid.reduce(v ** int(p) if p.is_integer() else jnp.power(v, p), 0, lax.add)
    some = total != 0
    root = jnp.power(jnp.where(some, jnp.abs(total), 1), 1 / p)
    return jnp.where(some, jnp.sign(total) * root, 0).astype(x.dtype)


@op(method=False, rule=by_image)
def lp_pool1d(
    x: Array,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    data_format: str = "NCL",
) -> Array:
    """(sum of x^p over each window)^(1 / p), p = norm_type: [N, C, L] -> [N, C, L'].

    A negative sum (odd p) keeps its sign; p = inf is max pooling. Raises ShapeError when no window fits,
    ConfigError unless norm_type > 0.
    """
    x = floating(x)
    return _lp_pool(1, x, norm_type, _Grid(1, x, kernel_size, stride, padding, ceil_mode, data_format, "lp_pool1d"))


@op(method=False, rule=by_image)
def lp_pool2d(
    x: Array,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    data_format: str = "NCHW",
) -> Array:
    """lp_pool1d over two dims, [N, C, H, W] -> [N, C, H', W']."""
    x = floating(x)
    return _lp_pool(2, x, norm_type, _Grid(2, x, kernel_size, stride, padding, ceil_mode, data_format, "lp_pool2d"))


@op(method=False)
def scatter_to_image(x: Array, indices: Array, sizes: tuple[Any, ...], data_format: str) -> Array:
    """Zeros of spatial sizes with x's entries at flat indices, [N, C, ...] -> [N, C, *sizes]: max_unpool's op."""
    last = data_format.endswith("C")
    if x.shape != indices.shape:
        raise ShapeError(f"max_unpool: x {list(x.shape)} and indices {list(indices.shape)} need the same shape")
    x, indices = (jnp.moveaxis(v, -1, 1) if last else v for v in (x, indices))
    flat = jnp.zeros((*x.shape[:2], math.prod(sizes)), x.dtype)
    batch, channel = np.ogrid[: x.shape[0], : x.shape[1]]
    place = bounded(indices.reshape(*x.shape[:2], -1), flat.shape[2], negative=False)
    y = flat.at[batch[..., None], channel[..., None], place].set(x.reshape(*x.shape[:2], -1))
    y = y.reshape(*x.shape[:2], *sizes)
    return jnp.moveaxis(y, 1, -1) if last else y


def _max_unpool(
    n: int, x: Any, indices: Any, kernel_size: Any, stride: Any, padding: Any, fmt: str, output_size: Any
) -> Any:
    what = f"max_unpool{n}d"
    last = is_channels_last(fmt, n, what)
    sizes = spatial(tuple(x.shape), n, last, what)
    kernel = per_dim(kernel_size, n, f"{what}: kernel_size")
    step = kernel if stride is None else per_dim(stride, n, f"{what}: stride")
    pads = per_dim(padding, n, f"{what}: padding", low=0)
    natural = tuple((z - 1) * s + k - 2 * p for z, s, k, p in zip(sizes, step, kernel, pads, strict=True))
    check_sizes(natural, f"{what}: the result")
    wanted = natural
    if output_size is not None:
        size = tuple(output_size)
        # the size of the whole Tensor is taken too
        size = (size[1:-1] if last else size[2:]) if len(size) == n + 2 else size
        wanted = per_dim(size, n, f"{what}: output_size")
        if any(abs(w - have) >= s for w, have, s in zip(wanted, natural, step, strict=True)):
            raise ShapeError(f"{what}: output_size={list(size)}; needs {list(natural)}, each less than {step} away")
    check_range(indices, math.prod(wanted), f"{what}: index")
    return scatter_to_image(x, indices, wanted, fmt)


@composite(method=False)
def max_unpool1d(
    x: AnyTensor,
    indices: AnyTensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    data_format: str = "NCL",
    output_size: Sizes | None = None,
    name: str | None = None,
) -> AnyTensor:
    """Put maxima back where max_pool1d(return_mask=True) found them, zeros elsewhere: [N, C, L] -> [N, C, L'].

    Raises IndexError for an index outside the result, ShapeError for an output_size out of reach.
    """
    return _max_unpool(1, x, indices, kernel_size, stride, padding, data_format, output_size)


@composite(method=False)
def max_unpool2d(
    x: AnyTensor,
    indices: AnyTensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    data_format: str = "NCHW",
    output_size: Sizes | None = None,
    name: str | None = None,
) -> AnyTensor:
    """max_unpool1d over two dims: [N, C, H, W] -> [N, C, H', W']."""
    return _max_unpool(2, x, indices, kernel_size, stride, padding, data_format, output_size)


@composite(method=False)
def max_unpool3d(
    x: AnyTensor,
    indices: AnyTensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    data_format: str = "NCDHW",
    output_size: Sizes | None = None,
    name: str | None = None,
) -> AnyTensor:
    """max_unpool1d over three dims: [N, C, D, H, W] -> [N, C, D', H', W']."""
    return _max_unpool(3, x, indices, kernel_size, stride, padding, data_format, output_size)


ALIASES: dict[str, str] = {}
