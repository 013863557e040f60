"""A decoder's linear maps with many weights set to zero, block after block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.compression.calibration import InputStatistics, collect, maps_of, walk_blocks
from polyreme.compression.quantize import LayerError
from polyreme.compression.rounding import inverse_factor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.incubate.asp.masks import get_mask_1d
from polyreme.models.files.low_bit_folder import linear_maps
from polyreme.nn.eval_mode import eval_mode

_COLUMNS = 64
"""Inputs that SparseGPT chooses among and hands on the errors of at a time."""
PRUNING_METHODS = ("magnitude", "wanda", "sparsegpt")


@dataclass(frozen=True)
class Sparsity:
    """The share of zero weights: a share of them, or all but n of every m inputs in a row.

    >>> Sparsity.parse("0.5"), Sparsity.parse("2:4")
    (Sparsity(share=0.5, n=0, m=0), Sparsity(share=0.5, n=2, m=4))
    """

    share: float
    n: int = 0
    m: int = 0

    @classmethod
    def parse(cls, text: str) -> Sparsity:
        """The Sparsity of a text, "0.5" or "2:4". Raises ConfigError for anything else."""
        try:
            if ":" in text:
                n, m = map(int, text.split(":"))
                if 0 < n < m:
                    return cls(1 - n / m, n, m)
            elif 0 < float(text) < 1:
                return cls(float(text))
        except ValueError:
            pass
        raise ConfigError(f"--sparsity {text}: give a share of zeros, as 0.5, or n of m that stay, as 2:4")

    def mask(self, scores: np.ndarray) -> np.ndarray:
        """The mask of the weights that stay, bool [in, out], by scores [in, out]: those with the highest for each
        output."""
        if self.m:
            return get_mask_1d(scores.T, self.n, self.m).T.astype(bool)
        count = round(self.share * len(scores))
        mask = np.ones(scores.shape, bool)
        np.put_along_axis(mask, np.argsort(scores, 0, kind="stable")[:count], False, 0)
        return mask


@dataclass(frozen=True)
class PruningOptions:
    """Settings of pruning a decoder: one of PRUNING_METHODS, how many weights go, names or parts of names of maps that
    stay.

    Raises ConfigError for another method.
    """

    method: str = "wanda"
    sparsity: Sparsity = Sparsity(0.5)
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in PRUNING_METHODS:
            known = (*PRUNING_METHODS, "structured")  # which recipes.inference.compress does by itself
            raise ConfigError(f"--method {self.method}: unknown{did_you_mean(self.method, known)}")


def prune_decoder(
    model: Any, options: PruningOptions, rows: Sequence[np.ndarray], say: Callable[[str], None] = lambda text: None
) -> list[LayerError]:
    """Set weights of the linear maps in a decoder's blocks to zero, in place; the error of each map.

    rows: token ids [n, seq] each, which the model is calibrated on. Raises ConfigError for names of skip that fit no
    map.
    """
    names = list(linear_maps(model))
    for part in options.skip:
        if not any(part in name for name in names):
            raise ConfigError(f"--skip {part}: no linear map is called so{did_you_mean(part, names)}")
    errors: list[LayerError] = []

    def change(name: str, block: Any, run: Callable[[], None]) -> None:
        maps = {n: layer for n, layer in maps_of(model, name).items() if not any(part in n for part in options.skip)}
        statistics = collect(block, run, maps)
        for n, layer in maps.items():
            weight = layer.weight.numpy().astype(np.float32)
            pruned = _PRUNE[options.method](weight, statistics[n], options.sparsity)
            errors.append(LayerError(n, statistics[n].relative_error(pruned - weight, weight)))
            layer.weight.set_value(pruned.astype(layer.weight.numpy().dtype))
        say(f"{name}: {len(maps)} linear maps, error {max((e.error for e in errors[-len(maps) :]), default=0):.4f}")

    with eval_mode(model):
        walk_blocks(model, rows, change)
    return errors


def magnitude(weight: np.ndarray, statistics: InputStatistics, sparsity: Sparsity) -> np.ndarray:
    """The weight without its smallest numbers: of all of the map, or of every m inputs."""
    if sparsity.m:
        return np.where(sparsity.mask(np.abs(weight)), weight, 0)
    flat = np.abs(weight).reshape(-1, 1)
    return np.where(Sparsity(sparsity.share).mask(flat).reshape(weight.shape), weight, 0)


def wanda(weight: np.ndarray, statistics: InputStatistics, sparsity: Sparsity) -> np.ndarray:
    """The weight without what |w| times the norm of its input is smallest of, in each output. Source:
    arXiv:2306.11695, equation 1."""
    return np.where(sparsity.mask(np.abs(weight) * statistics.norms[:, None]), weight, 0)


def sparsegpt(weight: np.ndarray, statistics: InputStatistics, sparsity: Sparsity, damping: float = 0.01) -> np.ndarray:
    """The weight without what can be made up for best, and the rest changed to do so. Source: arXiv:2301.00774,
    algorithm 1."""
    left = weight.astype(np.float64)
    inverse = inverse_factor(statistics.gram, damping)
    inputs = len(weight)
    step = _COLUMNS - _COLUMNS % (sparsity.m or 1)
    for begin in range(0, inputs, step):
        end = min(begin + step, inputs)
        diagonal = np.diag(inverse)[begin:end, None]
        mask = sparsity.mask((left[begin:end] / diagonal) ** 2)
        errors = np.zeros((end - begin, weight.shape[1]))
        for row in range(begin, end):
            kept = np.where(mask[row - begin], left[row], 0)
            errors[row - begin] = (left[row] - kept) / inverse[row, row]
            left[row] = kept
            left[row + 1 : end] -= np.outer(inverse[row, row + 1 : end], errors[row - begin])
        left[end:] -= inverse[begin:end, end:].T @ errors
    return left.astype(np.float32)


_PRUNE: dict[str, Callable[[np.ndarray, InputStatistics, Sparsity], np.ndarray]] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "sparsegpt": sparsegpt,
}
