"""nce: a loss over many classes that tells the true one from a few drawn ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core.rng import fixed_key
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.initializer import Assign
from polyreme.ops.arithmetic import cast
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import reshape, unsqueeze
from polyreme.ops.math import log1p, sigmoid
from polyreme.ops.random import rand
from polyreme.ops.search import searchsorted
from polyreme.program.parameters import LayerParameters

SAMPLERS = ("uniform", "log_uniform", "custom_dist")


def nce(
    input: Any,
    label: Any,
    num_total_classes: int,
    sample_weight: Any = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    num_neg_samples: int | None = None,
    name: str | None = None,
    sampler: str = "uniform",
    custom_dist: Sequence[float] | None = None,
    seed: int = 0,
    is_sparse: bool = False,
) -> Any:
    """Noise-contrastive loss of each row, [n, width] and true classes [n, t] -> [n, 1].

    With p the sigmoid of a class's score and b its chance times num_neg_samples (10 if None), it is the sum of
    -log(p / (p + b)) over the true classes and of -log(b / (p + b)) over the drawn ones, over 1 + num_neg_samples.
    sampler: every class has the same chance, log((c + 2) / (c + 1)) / log(classes + 1), or what custom_dist says.
    sample_weight [n, 1]: factors of the rows. is_sparse says how a gradient is stored; it is the same, and dense here.
    With a seed the same classes are drawn in each run. Raises ConfigError for chances that are none.
    """
    draws = 10 if num_neg_samples is None else num_neg_samples
    chances = class_chances(sampler, num_total_classes, custom_dist)
    parameters = LayerParameters("nce", name)
    weight = parameters.parameter(param_attr, [num_total_classes, input.shape[1]], input.dtype)
    bias = parameters.bias(bias_attr, [num_total_classes, 1], input.dtype)
    expected = parameters.statistic(None, [num_total_classes], input.dtype, Assign(chances * draws))
    upto = parameters.statistic(None, [num_total_classes], input.dtype, Assign(np.cumsum(chances)))
    loss = noise_contrastive_loss(input, label, weight, bias, expected, upto, draws, seed)
    return loss if sample_weight is None else loss * sample_weight


def noise_contrastive_loss(
    input: Any, label: Any, weight: Any, bias: Any, expected: Any, upto: Any, draws: int, seed: int = 0
) -> Any:
    """nce's loss of each row with these parameters: [n, 1].

    expected: how often each class is drawn in draws draws, [classes]. upto: the sum of the chances up to each class.
    Raises ShapeError unless input and label have 2 dims, and draws is at least 1.
    """
    if draws < 1 or input.ndim != 2 or label.ndim != 2:
        raise ShapeError(
            f"nce: input {list(input.shape)} and label {list(label.shape)} need 2 dims each, num_neg_samples={draws} "
            "at least 1"
        )
    drawn = searchsorted(upto, rand([input.shape[0], draws], input.dtype, **fixed_key(seed)), right=True)
    true, noise = _score(input, label, weight, bias), _score(input, drawn, weight, bias)
    losses = log1p(_gather(expected, label) / true).sum(1) + log1p(noise / _gather(expected, drawn)).sum(1)
    return reshape(losses, [-1, 1]) / (draws + 1)


def class_chances(sampler: str, classes: int, custom: Sequence[float] | None) -> np.ndarray:
    """The chance of each class to be drawn."""
    if (sampler == "custom_dist") != (custom is not None):
        raise ConfigError(f"nce: custom_dist goes with sampler='custom_dist', got sampler={sampler!r}")
    if sampler == "uniform":
        return np.full(classes, 1 / classes)
    if sampler == "log_uniform":
        each = np.arange(classes)
        return np.log((each + 2) / (each + 1)) / np.log(classes + 1)
    if custom is None:
        raise ConfigError(f"nce: sampler={sampler!r}; it is one of {', '.join(SAMPLERS)}")
    found = np.asarray(custom, np.float64)
    # sums of float32 chances are off by about a rounding a class
    if found.shape != (classes,) or (found < 0).any() or abs(found.sum() - 1) > classes * 2.0**-20:
        raise ConfigError(f"nce: custom_dist holds {classes} chances that add up to 1, got {found.tolist()[:10]}")
    return found


def _gather(values: Any, index: Any) -> Any:
    """Elements of a vector at indices [n, k] -> [n, k]."""
    return reshape(gather(values, reshape(index, [-1])), [index.shape[0], index.shape[1]])


def _score(x: Any, classes: Any, weight: Any, bias: Any) -> Any:
    """sigmoid(x w_c + b_c) of every row for its classes: [n, width], [n, k] -> [n, k]."""
    index = cast(reshape(classes, [-1]), "int64")
    rows = reshape(gather(weight, index), [classes.shape[0], classes.shape[1], weight.shape[1]])
    scores = (rows * unsqueeze(x, 1)).sum(2)
    return sigmoid(scores if bias is None else scores + _gather(reshape(bias, [-1]), classes))
