"""Masks of ones and zeros with at most n ones in every m places in a row, or in every m x m square's rows and columns.

Names and results are PaddlePaddle's: `m` counts along the last dim, what does not fill a group is taken as 0.
"""

from __future__ import annotations

import enum
import itertools
import math
from functools import cache

import numpy as np

from polyreme.errors import ConfigError, ShapeError

_MOST_PATTERNS = 10_000_000


def calculate_density(x: np.ndarray) -> float:
    """The share of numbers that are not 0."""
    x = np.asarray(x)
    return float(np.count_nonzero(x) / x.size)


def get_mask_1d(mat: np.ndarray, n: int, m: int) -> np.ndarray:
    """A mask that keeps the n largest |x| of every m in a row of a matrix.

    >>> get_mask_1d(np.array([[4.0, 1.0, -3.0, 2.0]]), 2, 4)
    array([[1., 0., 1., 0.]])
    """
    _check(n, m)
    rows, columns = np.shape(mat)
    groups = np.abs(_pad(mat, m, 1)).reshape(-1, m)
    mask = np.ones_like(groups, float)
    np.put_along_axis(mask, np.argsort(groups, 1, kind="stable")[:, : m - n], 0.0, 1)
    return mask.reshape(rows, -1)[:, :columns]


def get_mask_2d_greedy(mat: np.ndarray, n: int, m: int) -> np.ndarray:
    """A mask of at most n ones in every row and column of every m x m square, the largest |x| taken first."""
    _check(n, m)
    return _by_square(mat, m, lambda square: _greedy(square, n))


def get_mask_2d_best(mat: np.ndarray, n: int, m: int) -> np.ndarray:
    """Of all masks with n ones in every row and column of every m x m square the one that keeps the largest sum of |x|.

    PaddlePaddle 3.3.1 sums x, so that large negative weights are dropped there. Raises ConfigError for sizes of which
    there are too many masks, as 4 of 8.
    """
    _check(n, m)
    if math.comb(m, n) ** m > _MOST_PATTERNS:
        raise ConfigError(f"mask_2d_best of {n} of {m}: there are too many masks to try; take mask_2d_greedy")
    patterns = _patterns(n, m)
    flat = patterns.reshape(len(patterns), -1)
    return _by_square(mat, m, lambda square: patterns[int((flat @ square.ravel()).argmax())])


def check_mask_1d(mat: np.ndarray, n: int, m: int) -> bool:
    """Whether at most n of every m in a row are not 0."""
    _check(n, m)
    groups = _pad(mat, m, 1).reshape(-1, m)
    return bool((np.count_nonzero(groups, 1) <= n).all())


def check_mask_2d(mat: np.ndarray, n: int, m: int) -> bool:
    """Whether at most n numbers of every row and column of every m x m square are not 0."""
    _check(n, m)
    squares = _squares(np.asarray(mat), m) != 0
    return bool((squares.sum(-1) <= n).all() and (squares.sum(-2) <= n).all())


ALGORITHMS = {"mask_1d": get_mask_1d, "mask_2d_greedy": get_mask_2d_greedy, "mask_2d_best": get_mask_2d_best}
"""What prune_model calls an algorithm."""


class MaskAlgo(enum.StrEnum):
    """The algorithms by PaddlePaddle's names."""

    MASK_1D = "mask_1d"
    MASK_2D_GREEDY = "mask_2d_greedy"
    MASK_2D_BEST = "mask_2d_best"


class CheckMethod(enum.StrEnum):
    """The checks by PaddlePaddle's names."""

    CHECK_1D = "check_mask_1d"
    CHECK_2D = "check_mask_2d"


def create_mask(tensor: np.ndarray, func_name: str = "mask_1d", n: int = 2, m: int = 4) -> np.ndarray:
    """A mask of an array of any rank, its last dim being the row; func_name: one of ALGORITHMS.

    Raises ConfigError for another one, and for an n that is not below m.
    """
    if func_name not in ALGORITHMS:
        raise ConfigError(f"create_mask: unknown algorithm {func_name!r}; give one of {', '.join(ALGORITHMS)}")
    tensor = np.asarray(tensor)
    rows = tensor.reshape(-1, tensor.shape[-1])
    return ALGORITHMS[func_name](rows, n, m).reshape(tensor.shape).astype(tensor.dtype)


def check_sparsity(tensor: np.ndarray, func_name: str = "check_mask_1d", n: int = 2, m: int = 4) -> bool:
    """check_mask_1d or check_mask_2d of an array of any rank, its last dim being the row."""
    checks = {"check_mask_1d": check_mask_1d, "check_mask_2d": check_mask_2d}
    if func_name not in checks:
        raise ConfigError(f"check_sparsity: unknown check {func_name!r}; give one of {', '.join(checks)}")
    tensor = np.asarray(tensor)
    return checks[func_name](tensor.reshape(-1, tensor.shape[-1]), n, m)


def _check(n: int, m: int) -> None:
    if not 0 < n < m:
        raise ConfigError(f"n={n} of m={m}: n is at least 1 and below m, as 2 of 4")


def _pad(mat: np.ndarray, m: int, dims: int) -> np.ndarray:
    """A matrix with zeros until m divides its last dims."""
    mat = np.asarray(mat)
    if mat.ndim != 2:
        raise ShapeError(f"a mask of an array of {mat.ndim} dims; give a matrix")
    pads = [(0, 0)] * (2 - dims) + [(0, -size % m) for size in mat.shape[2 - dims :]]
    return np.pad(mat, pads)


def _squares(mat: np.ndarray, m: int) -> np.ndarray:
    """[rows / m, columns / m, m, m]."""
    padded = _pad(mat, m, 2)
    return padded.reshape(padded.shape[0] // m, m, -1, m).swapaxes(1, 2)


def _by_square(mat: np.ndarray, m: int, choose) -> np.ndarray:
    squares = np.abs(_squares(mat, m))
    masks = np.array([[choose(square) for square in row] for row in squares], float)
    whole = masks.swapaxes(1, 2).reshape(squares.shape[0] * m, -1)
    return whole[: mat.shape[0], : mat.shape[1]]


def _greedy(square: np.ndarray, n: int) -> np.ndarray:
    mask = np.zeros_like(square)
    for place in np.argsort(-square, None, kind="stable"):
        row, column = np.unravel_index(place, square.shape)
        if mask[row].sum() < n and mask[:, column].sum() < n:
            mask[row, column] = 1
    return mask


@cache
def _patterns(n: int, m: int) -> np.ndarray:
    """Every m x m mask with n ones in each row and column: 90 for 2 of 4."""
    rows = [np.isin(np.arange(m), chosen).astype(float) for chosen in itertools.combinations(range(m), n)]
    partial = [np.zeros((0, m))]
    for _ in range(m):
        longer = [np.vstack([mask, row]) for mask in partial for row in rows]
        partial = [mask for mask in longer if mask.sum(0).max() <= n]
    return np.array(partial)
