"""Max pooling over windows of uneven sizes that a random number places: output sizes need not divide the input's.

Source: arXiv:1412.6071.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core.annotations import Sizes
from polyreme.core.op import DRAWN, Key, op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.windows.geometry import per_dim, spatial
from polyreme.ops.windows.pooling import largest, output_sizes


def _pool(n: int, x: Array, output_size: Any, kernel_size: Any, random_u: Any, return_mask: bool, key: Any) -> Any:
    what = f"fractional_max_pool{n}d"
    if random_u is not None and not 0 < random_u < 1:
        raise ConfigError(f"{what}: random_u={random_u}; give a number between 0 and 1")
    sizes = spatial(x.shape, n, False, what)
    outs = output_sizes(sizes, output_size, what)
    kernels = (None,) * n if kernel_size is None else per_dim(kernel_size, n, f"{what}: kernel_size")
    for size, out, kernel in zip(sizes, outs, kernels, strict=True):
        if out + (kernel or 1) - 1 > size:
            raise ShapeError(f"{what}: {out} windows of {kernel or 1} or more do not fit in a dim of {size}")
    u = jax.random.uniform(key, (), jnp.float32) if random_u is None else jnp.float32(random_u)
    value, index = largest(x, [_positions(*dim, u) for dim in zip(sizes, outs, kernels, strict=True)])
    return (value, index) if return_mask else value


def _positions(size: int, out: int, kernel: int | None, u: Array) -> Array:
    """The entries of each window, [out, k]; -1 beyond a window's end."""
    index = jnp.arange(out + 1)
    if kernel is None:
        ratio = size / out
        # with a larger u the last window would be empty
        whole = size // out
        edges = _edges(index, ratio, u * min((whole + 2) / ratio - 1, (size + 1 - whole) / ratio - (out - 1)))
        starts, ends = edges[:-1], edges[1:].at[-1].set(size)
        longest = size if out == 1 else math.ceil(ratio) + 1
    else:
        starts = _edges(index[:-1], (size - kernel) / max(out - 1, 1), u)
        ends, longest = starts + kernel, kernel
    inside = starts[:, None] + jnp.arange(longest)
    return jnp.where(inside < ends[:, None], inside, -1)


def _edges(at: Array, ratio: float, u: Array) -> Array:
    """ceil(ratio * (at + u)), moved so that it begins at 0."""
    found = jnp.ceil(jnp.float32(ratio) * (at.astype(jnp.float32) + u)).astype(jnp.int32)
    return found - found[0]


@op(method=False)
def fractional_max_pool2d(
    x: Array,
    output_size: Sizes,
    kernel_size: Sizes | None = None,
    random_u: float | None = None,
    return_mask: bool = False,
    key: Key = DRAWN,
) -> Any:
    """Maxima of output_size windows by dim, [N, C, H, W] -> [N, C, *output_size], and their indices with return_mask.

    Window i is ceil(a (i + u)) up to ceil(a (i + 1 + u)), a the ratio of the sizes, all moved so that the first begins
    at 0; with kernel_size it has that size, and windows overlap. u is random_u, in (0, 1), or drawn. Indices are int32
    and count through the image. Raises ConfigError for another random_u and ShapeError where windows do not fit.
    """
    return _pool(2, x, output_size, kernel_size, random_u, return_mask, key)


@op(method=False)
def fractional_max_pool3d(
    x: Array,
    output_size: Sizes,
    kernel_size: Sizes | None = None,
    random_u: float | None = None,
    return_mask: bool = False,
    key: Key = DRAWN,
) -> Any:
    """fractional_max_pool2d over three dims: [N, C, D, H, W] -> [N, C, *output_size]."""
    return _pool(3, x, output_size, kernel_size, random_u, return_mask, key)
