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
_PHASES = 512
"""Filters that are computed at most, one for each place between two samples; those between two of them are drawn as
lines, which differ from the sinc by less than the window does: (pi / 512)^2 / 8."""
_BLOCK = 1 << 21
"""Numbers that are multiplied at once: of memory, 16 MiB."""


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
    phases = min(up, _PHASES)
    # one filter for each place that a new sample has between two old ones, and that of the later of the two
    times = offsets[None] - np.arange(phases + 1)[:, None] / phases
    filters = cutoff * np.sinc(cutoff * times) * np.i0(_BETA * np.sqrt(np.maximum(0, 1 - (times / reach) ** 2)))
    filters /= filters.sum(1, keepdims=True)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, (reach - 1, reach + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    result = np.empty(count)
    step = max(1, _BLOCK // len(offsets))
    for first in range(0, count, step):
        places = np.arange(first, min(first + step, count)) * down
        phase, beyond = np.divmod(places % up * phases, up)
        chosen = filters[phase]
        if up > phases:
            chosen += (beyond / up)[:, None] * (filters[phase + 1] - chosen)
        result[first : first + step] = np.einsum("nk,nk->n", windows[places // up], chosen)
    return result
