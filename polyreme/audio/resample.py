"""Sound at another rate, as numpy does it on the host."""

from __future__ import annotations

from math import gcd

import numpy as np

from polyreme.errors import ConfigError, ShapeError

RATES = range(4_000, 384_001)
"""Samples a second that sounds may have."""
_ZEROS = 32
"""Zero crossings of the filter's sinc on each side."""
_BETA = 10.0
"""Of its Kaiser window: what passes below and above differs by some 100 dB."""
_BLOCK = 1 << 14


def resampled(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Samples [n], `rate` a second, as float64 [ceil(n * new_rate / rate)], `new_rate` a second.

    The sound is filtered by a windowed sinc below half of the lower rate; before and behind it is silence. Source:
    Smith, "Digital Audio Resampling". Raises ConfigError for rates outside of RATES, ShapeError for several channels.

    >>> resampled(np.ones(441), 44_100, 16_000).shape
    (160,)
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1:
        raise ShapeError(f"resampled: samples have shape {list(samples.shape)}; give [n], of one channel")
    for value in (rate, new_rate):
        if value not in RATES:
            raise ConfigError(f"resampled: {value} samples a second; give {RATES[0]} to {RATES[-1]}")
    if rate == new_rate:
        return samples
    divisor = gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    cutoff = min(1.0, new_rate / rate)
    reach = int(np.ceil(_ZEROS / cutoff))
    offsets = np.arange(-reach + 1, reach + 1)
    # one filter for each place that a new sample has between two old ones
    times = offsets[None] - np.arange(up)[:, None] / up
    filters = cutoff * np.sinc(cutoff * times) * np.i0(_BETA * np.sqrt(np.maximum(0, 1 - (times / reach) ** 2)))
    filters /= filters.sum(1, keepdims=True)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, (reach - 1, reach + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    result = np.empty(count)
    for first in range(0, count, _BLOCK):
        places = np.arange(first, min(first + _BLOCK, count)) * down
        result[first : first + _BLOCK] = np.einsum("nk,nk->n", windows[places // up], filters[places % up])
    return result
