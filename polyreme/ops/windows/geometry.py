"""Sliding windows: how stride, dilation and padding are given, and what sizes they make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import max_dim

from polyreme.errors import ConfigError, ShapeError

Pads = Sequence[tuple[int, int]]
# XLA's convolutions on processors count in 32 bits, and end the process beyond
MAX_SIZE = 2**31 - 1


def per_dim(value: Any, n: int, what: str, low: int = 1) -> tuple[int, ...]:
    """An int, or n of them, as n ints from low to MAX_SIZE. Raises ShapeError for anything else."""
    values = (value,) * n if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values = values * n
    if len(values) != n or any(not isinstance(v, int) or not low <= v <= MAX_SIZE for v in values):
        raise ShapeError(f"{what}={value!r}; needs an int or {n} of them, each at least {low} and less than 2**31")
    return values


def is_negative(size: Any) -> bool:
    """Whether a size is; one that is left open in an exported program is taken to be large enough."""
    try:
        return bool(size < 0)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def check_sizes(sizes: Sequence[Any], what: str) -> None:
    """Raise ShapeError for a size beyond MAX_SIZE; one that is left open is taken to be small enough."""
    if any(isinstance(size, int) and size > MAX_SIZE for size in sizes):
        raise ShapeError(f"{what} has sizes {list(sizes)}; each must be less than 2**31")


def is_channels_last(data_format: str, n: int, what: str) -> bool:
    """Whether channels stand last. Raises ConfigError for a format that is not one of n spatial dims."""
    first = {1: "NCL", 2: "NCHW", 3: "NCDHW"}[n]
    last = "N" + first[2:] + "C"
    if data_format not in (first, last):
        raise ConfigError(f"{what}: data_format={data_format!r}; choose {first} or {last}")
    return data_format == last


def spatial(shape: tuple[int, ...], n: int, last: bool, what: str) -> tuple[int, ...]:
    """The n spatial sizes of a batch. Raises ShapeError for another number of dims."""
    if len(shape) != n + 2:
        raise ShapeError(f"{what}: x {list(shape)} has {len(shape)} dims, needs {n + 2}: batch, channels and {n} more")
    return tuple(shape[1:-1] if last else shape[2:])


def explicit_pads(padding: Any, n: int, last: bool, what: str) -> Pads:
    """(before, after) of each spatial dim from an int, n or 2n ints, n pairs, or n + 2 with batch and channels.

    Raises ShapeError for another form, a negative number, or padding of the batch or the channels.
    """
    if isinstance(padding, int):
        pads = [(padding, padding)] * n
    elif all(isinstance(p, int) for p in padding) and len(padding) in (1, n):
        pads = [(p, p) for p in (padding * n if len(padding) == 1 else padding)]
    elif all(isinstance(p, int) for p in padding) and len(padding) == 2 * n:
        pads = list(zip(padding[::2], padding[1::2], strict=True))
    elif all(isinstance(p, tuple) and len(p) == 2 for p in padding) and len(padding) in (n, n + 2):
        pads = [tuple(p) for p in padding]
        if len(pads) == n + 2:
            outer = (pads[0], pads[-1 if last else 1])
            pads = pads[1:-1] if last else pads[2:]
            if outer != ((0, 0), (0, 0)):
                raise ShapeError(
                    f"{what}: padding={padding!r} pads the batch or the channels; only spatial dims can be"
                )
    else:
        raise ShapeError(
            f"{what}: padding={padding!r}; needs 'SAME', 'VALID', an int, {n} or {2 * n} ints, or {n} pairs"
        )
    if any(not 0 <= p <= MAX_SIZE for pair in pads for p in pair):
        raise ShapeError(f"{what}: padding={padding!r}; each must be at least 0 and less than 2**31")
    return pads


def resolve_pads(
    padding: Any,
    sizes: tuple[int, ...],
    kernel: tuple[Any, ...],
    stride: tuple[Any, ...],
    dilation: tuple[Any, ...],
    last: bool,
    what: str,
) -> Pads:
    """Padding as (before, after) pairs; "SAME" makes ceil(size / stride) windows, the odd one out goes after.

    Raises ShapeError where a padded size is beyond MAX_SIZE.
    """
    if not isinstance(padding, str):
        pads = explicit_pads(padding, len(sizes), last, what)
        check_sizes([z + sum(p) for z, p in zip(sizes, pads, strict=True)], f"{what}: x padded by {padding!r}")
        return pads
    if padding.upper() == "VALID":
        return [(0, 0)] * len(sizes)
    if padding.upper() != "SAME":
        raise ShapeError(f"{what}: padding={padding!r}; the words are 'SAME' and 'VALID'")
    pads = []
    for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        # an open size too, in the form that windows of other padding give: jax does not see that ceilings are alike
        windows = (size - 1) // s + 1
        total = max_dim((windows - 1) * s + d * (k - 1) + 1 - size, 0)
        pads.append((total // 2, total - total // 2))
    return pads


def entries(
    x: Array, kernel: tuple, stride: tuple, pads: Pads, dilation: tuple, first: int
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """(place in the window, that entry of every window) for each entry; the spatial dims of x begin at `first`."""
    v = padded(x, pads, first)
    steps = [1] * x.ndim
    steps[first : first + len(kernel)] = stride
    for tap in itertools.product(*map(range, kernel)):
        low, high = [0] * x.ndim, list(v.shape)
        for dim, (i, k, s, d) in enumerate(zip(tap, kernel, stride, dilation, strict=True), first):
            low[dim] = i * d
            high[dim] = i * d + (v.shape[dim] - d * (k - 1) - 1) // s * s + 1
        yield tap, lax.slice(v, low, high, steps)


def padded(x: Array, pads: Pads, first: int) -> Array:
    """x with zeros around its spatial dims, which begin at `first`."""
    around = [(0, 0)] * x.ndim
    around[first : first + len(pads)] = pads
    return jnp.pad(x, around)
