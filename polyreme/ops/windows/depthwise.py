"""Depthwise convolutions on CPU: their result and both gradients as fused loops over slices.

XLA's convolution of one channel a group takes 50 times as long there. What jax derives from the result's sum adds a
padded array for each entry of the window, and sums each entry's products in a loop of its own, which for 5 x 5 takes
five times as long to compile (benchmarks/depthwise_convolution.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme.kernels.custom_vjp import custom_vjp
from polyreme.ops.activation import wide
from polyreme.ops.windows.geometry import Pads, entries, padded


class Windows(NamedTuple):
    """How windows lie in x: its spatial sizes, and of each spatial dim the window's entries, their step and padding.

    last: whether the channels of x stand last.
    """

    sizes: tuple
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    last: bool

    @property
    def first(self) -> int:
        """The first spatial dim."""
        return 1 if self.last else 2

    @property
    def reach(self) -> tuple[int, ...]:
        """Places from a window's first entry to its last."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))


# each of the three is linear in both arrays, and its gradients are the other two
@custom_vjp(0)
def depthwise(windows: Windows, x: Array, weight: Array) -> Array:
    """The convolution of each channel of x, [N, C, ...] or [N, ..., C], with its own weights [C, 1, *kernel]."""
    return _sum_of_entries(x, weight, windows.stride, windows.pads, windows)


@custom_vjp(0)
def spread(windows: Windows, dy: Array, weight: Array) -> Array:
    """The gradient of depthwise by x: each entry of dy times the weights, added where they came from."""
    config = [(0, 0, 0)] * dy.ndim
    geometry = zip(windows.sizes, windows.reach, windows.stride, windows.pads, strict=True)
    for dim, (size, reach, stride, (before, _)) in enumerate(geometry, windows.first):
        low = reach - before
        config[dim] = (low, size + reach - low - (dy.shape[dim] - 1) * stride - 1, stride - 1)
    apart = lax.pad(dy, np.zeros((), dy.dtype), config)
    n = len(windows.kernel)
    return _sum_of_entries(apart, jnp.flip(weight, range(2, 2 + n)), (1,) * n, ((0, 0),) * n, windows)


@custom_vjp(0)
def products(windows: Windows, x: Array, dy: Array) -> Array:
    """The gradient of depthwise by its weights: of each entry of the window the sum of its products with dy."""
    first, n = windows.first, len(windows.kernel)
    v, dy = padded(wide(x), windows.pads, first), wide(dy)
    extent, steps = list(v.shape), [1] * v.ndim
    extent[first : first + n] = [(o - 1) * s + 1 for o, s in zip(dy.shape[first:], windows.stride, strict=False)]
    steps[first : first + n] = windows.stride

    def entry(place: Array) -> Array:
        starts = [np.int32(0)] * v.ndim
        starts[first : first + n] = place
        return lax.slice(lax.dynamic_slice(v, starts, extent), [0] * v.ndim, extent, steps)

    places = np.moveaxis(np.indices(windows.kernel), 0, -1).reshape(-1, n) * np.array(windows.dilation)
    # a gather and not a slice for each place: one loop over all of them
    taken = jax.vmap(entry)(jnp.asarray(places, np.int32))
    channel = 1 + (dy.ndim - 1 if windows.last else 1)
    sums = jnp.sum(taken * dy, [d for d in range(taken.ndim) if d not in (0, channel)])
    return sums.T.reshape(sums.shape[1], 1, *windows.kernel).astype(x.dtype)


def _sum_of_entries(x: Array, weight: Array, stride: tuple, pads: Pads, windows: Windows) -> Array:
    columns = wide(weight).reshape(weight.shape[0], -1)
    channel, terms = x.ndim - 1 if windows.last else 1, []
    # lax's functions are traced in a fraction of the time that operators and indexing take: four here an entry
    for i, (_, entry) in enumerate(entries(wide(x), windows.kernel, stride, pads, windows.dilation, windows.first)):
        taken = lax.squeeze(lax.slice_in_dim(columns, i, i + 1, axis=1), (1,))
        terms.append(lax.mul(entry, lax.broadcast_in_dim(taken, entry.shape, (channel,))))
    return functools.reduce(lax.add, terms).astype(x.dtype)


depthwise.defvjp(
    lambda windows, x, weight: (depthwise(windows, x, weight), (x, weight)),
    lambda windows, both, dy: (spread(windows, dy, both[1]), products(windows, both[0], dy)),
)
spread.defvjp(
    lambda windows, dy, weight: (spread(windows, dy, weight), (dy, weight)),
    lambda windows, both, x: (depthwise(windows, x, both[1]), products(windows, x, both[0])),
)
products.defvjp(
    lambda windows, x, dy: (products(windows, x, dy), (x, dy)),
    lambda windows, both, weight: (spread(windows, both[1], weight), depthwise(windows, both[0], weight)),
)
