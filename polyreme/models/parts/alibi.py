"""Positions as biases of attention: a score falls with the distance to the key, in each head by a slope of its own.

Source: arXiv:2108.12409. Only differences between the keys of a query count, so that the place of the key is enough.
"""

from __future__ import annotations

import math

import numpy as np


def slopes(num_heads: int) -> np.ndarray:
    """Of each head, float32 [heads]: a geometric sequence for a power of two; for others that of the power below, then
    every other one of the power above.

    >>> slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    power = 2 ** int(math.log2(num_heads))
    even = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * (num_heads - power), 2))
    return np.concatenate([even, between]).astype(np.float32)


def place_biases(num_heads: int, places: int) -> np.ndarray:
    """What is added to the scores of the key at each place, float32 [heads, places]."""
    return slopes(num_heads)[:, None] * np.arange(places, dtype=np.float32)
