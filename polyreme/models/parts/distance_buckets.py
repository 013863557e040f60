"""Buckets of distances between tokens, each of which has a bias of attention.

Source: arXiv:1910.10683, section 2.1.
"""

import math

import numpy as np


def buckets(queries: int, keys: int, num_buckets: int, max_distance: int, is_causal: bool) -> np.ndarray:
    """The bucket of the distance from each query to each key, int64 [queries, keys].

    Half of the buckets are for one distance each, the others grow like powers. Not causal, each half of them is for one
    direction.

    >>> buckets(1, 5, 8, 16, False)
    array([[0, 5, 6, 6, 6]])
    """
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    first = np.zeros_like(distance)
    if is_causal:
        distance = np.maximum(-distance, 0)
    else:
        num_buckets //= 2
        first, distance = np.where(distance > 0, num_buckets, 0), np.abs(distance)
    exact = num_buckets // 2
    # in float32, as weights were trained with: a distance on the border of two buckets depends on it
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + ratio.astype(np.int64), num_buckets - 1)
    return first + np.where(distance < exact, distance, far)
