"""Weights rounded to codes: to the nearest, by GPTQ, and under scales that are searched for.

Weights are float32 [in, out], codes int8 [in, out], scales float32 [groups, out]: value = code * scale of its group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polyreme.compression.calibration import InputStatistics
from polyreme.errors import ConfigError

_COLUMNS = 64
"""Inputs whose errors GPTQ hands on one by one before it does so to all others at once."""


class Rounded(NamedTuple):
    """Codes [in, out] and scales [groups, out]."""

    codes: np.ndarray
    scales: np.ndarray

    def values(self) -> np.ndarray:
        """The weight that they say."""
        return self.codes * np.repeat(self.scales, len(self.codes) // len(self.scales), 0)


def largest(bits: int) -> int:
    """The largest code: as many above 0 as below."""
    return 2 ** (bits - 1) - 1


def absmax_scales(weight: np.ndarray, bits: int, group_size: int = -1) -> np.ndarray:
    """Scales under which the largest number of each group is the largest code. Raises ConfigError for groups that do
    not divide the inputs."""
    groups = np.abs(_grouped(weight, group_size)).max(1)
    return np.asarray(groups / largest(bits), np.float32)


def round_nearest(weight: np.ndarray, scales: np.ndarray, bits: int) -> Rounded:
    """Each number to its nearest code."""
    spread = np.repeat(scales, len(weight) // len(scales), 0)
    codes = np.round(weight / np.where(spread == 0, 1, spread))
    return Rounded(np.clip(codes, -largest(bits), largest(bits)).astype(np.int8), scales)


def clipped_scales(
    weight: np.ndarray, statistics: InputStatistics, bits: int, group_size: int = -1, least: float = 0.5
) -> np.ndarray:
    """Scales, of least to 1 times absmax_scales, under which the outputs of each group err least, its own inputs taken
    alone. Source: arXiv:2306.00978, section 5 (clipping)."""
    grouped = _grouped(weight, group_size)
    count, size, outputs = grouped.shape
    grams = np.stack([statistics.gram[at * size : (at + 1) * size, at * size : (at + 1) * size] for at in range(count)])
    full = absmax_scales(weight, bits, group_size)
    best, scales = np.full((count, outputs), np.inf), full
    for ratio in np.linspace(1, least, 11):
        tried = (full * ratio).astype(np.float32)
        change = (round_nearest(weight, tried, bits).values() - weight).reshape(count, size, outputs)
        error = np.einsum("gio,gio->go", change, grams @ change)
        scales = np.where(error < best, tried, scales)
        best = np.minimum(error, best)
    return scales


def gptq(
    weight: np.ndarray,
    statistics: InputStatistics,
    bits: int,
    group_size: int = -1,
    act_order: bool = False,
    damping: float = 0.01,
    half_scales: bool = False,
) -> Rounded:
    """Codes whose outputs err less: the error of each input is made up for by those that are not rounded yet.

    act_order: inputs with the largest activations first, under scales of the weight as it was, so that groups stay in
    a row. damping: share of the mean diagonal that is added to it. half_scales: scales are numbers of float16. Source:
    arXiv:2210.17323, algorithm 1.
    """
    weight = weight.astype(np.float64)
    inputs = len(weight)
    size = inputs if group_size == -1 else group_size
    order = np.argsort(-np.diag(statistics.gram), kind="stable") if act_order else np.arange(inputs)
    inverse = inverse_factor(statistics.gram[np.ix_(order, order)], damping)
    scales = _in_half(absmax_scales(weight, bits, group_size), half_scales)
    left = weight[order]
    codes = np.zeros(weight.shape, np.int8)
    for begin in range(0, inputs, _COLUMNS):
        end = min(begin + _COLUMNS, inputs)
        errors = np.zeros((end - begin, weight.shape[1]))
        for row in range(begin, end):
            group = order[row] // size
            if not act_order and row % size == 0:
                # the numbers that are left, with what earlier errors made of them; those of later blocks too
                current = left[row : row + size].copy()
                beyond = max(0, row + size - end)
                if beyond and row > begin:
                    current[end - row :] -= inverse[begin:row, end : end + beyond].T @ errors[: row - begin]
                scales[group] = _in_half(absmax_scales(current, bits)[0], half_scales)
            scale = scales[group]
            code = np.clip(np.round(left[row] / np.where(scale == 0, 1, scale)), -largest(bits), largest(bits))
            codes[order[row]] = code
            error = (left[row] - code * scale) / inverse[row, row]
            left[row + 1 : end] -= np.outer(inverse[row, row + 1 : end], error)
            errors[row - begin] = error
        left[end:] -= inverse[begin:end, end:].T @ errors
    return Rounded(codes, scales)


def inverse_factor(gram: np.ndarray, damping: float) -> np.ndarray:
    """U, upper triangular, with U^T U the inverse of gram and damping times its mean diagonal on its diagonal."""
    damped = gram + np.eye(len(gram)) * max(damping * float(np.diag(gram).mean()), 1e-12)
    return np.linalg.cholesky(np.linalg.inv(damped)).T


def _in_half(scales: np.ndarray, wanted: bool) -> np.ndarray:
    return scales.astype(np.float16).astype(np.float32) if wanted else scales


def _grouped(weight: np.ndarray, group_size: int) -> np.ndarray:
    """[groups, size, out]."""
    size = len(weight) if group_size == -1 else group_size
    if size < 1 or len(weight) % size:
        raise ConfigError(f"groups of {group_size} of {len(weight)} inputs; give what divides them, or -1")
    return weight.reshape(-1, size, weight.shape[1])
