"""Learning rates that a Program computes from a counter of its runs; given to an optimizer as learning_rate.

Each is float32 [1]. One counter serves all of them: it is 0 at the first run, 1 if noam_decay came first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.tensor import autoincreased_step_counter
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops.creation import full
from polyreme.ops.indices.gather import where

COUNTER = "@LR_DECAY_COUNTER@"


@layer
def _decay_step_counter(begin: int = 0) -> Any:
    """How many runs came before this one, float32 [1], from begin on; schedules of one's own use it, as BERT's do."""
    return ar.cast(autoincreased_step_counter(COUNTER, begin), "float32")


def _share(decay_steps: int, staircase: bool) -> Any:
    share = mt.scale(_decay_step_counter(), 1.0 / decay_steps)
    return mt.floor(share) if staircase else share


@layer
def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Any:
    """learning_rate * decay_rate^(step / decay_steps); staircase: of whole parts only."""
    return mt.scale(ar.pow(float(decay_rate), _share(decay_steps, staircase)), float(learning_rate))


@layer
def natural_exp_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Any:
    """learning_rate * e^(-decay_rate * step / decay_steps); staircase: of whole parts only."""
    return mt.scale(mt.exp(mt.scale(_share(decay_steps, staircase), -float(decay_rate))), float(learning_rate))


@layer
def inverse_time_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Any:
    """learning_rate / (1 + decay_rate * step / decay_steps); staircase: of whole parts only."""
    return ar.divide(float(learning_rate), mt.scale(_share(decay_steps, staircase), float(decay_rate), 1.0))


@layer
def polynomial_decay(
    learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Any:
    """(learning_rate - end) * (1 - step / decay_steps)^power + end; after decay_steps end, or again longer if cycle."""
    step = _decay_step_counter()
    if cycle:
        length = mt.scale(mt.maximum(mt.ceil(mt.scale(step, 1.0 / decay_steps)), 1.0), float(decay_steps))
        share = ar.divide(step, length)
    else:
        share = mt.scale(mt.minimum(step, float(decay_steps)), 1.0 / decay_steps)
    left = ar.pow(ar.subtract(1.0, share), float(power))
    return mt.scale(left, float(learning_rate) - float(end_learning_rate), float(end_learning_rate))


@layer
def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Any:
    """values[i] before boundaries[i], the last value after them. Raises ConfigError unless there is one more value."""
    if len(values) != len(boundaries) + 1:
        raise ConfigError(
            f"fluid.layers.piecewise_decay: {len(boundaries)} boundaries and {len(values)} values; give one value more"
        )
    step = _decay_step_counter()
    rate = full([1], float(values[-1]), "float32")
    for bound, value in zip(reversed(boundaries), reversed(values[:-1]), strict=True):
        rate = where(ar.less_than(step, float(bound)), full([1], float(value), "float32"), rate)
    return rate


@layer
def noam_decay(d_model: int, warmup_steps: int) -> Any:
    """d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5). Source: arXiv:1706.03762, equation 3."""
    step = _decay_step_counter(1)
    return mt.scale(mt.minimum(mt.rsqrt(step), mt.scale(step, float(warmup_steps) ** -1.5)), float(d_model) ** -0.5)


@layer
def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> Any:
    """learning_rate / 2 * (cos(pi * epoch / epochs) + 1), epoch = floor(step / step_each_epoch)."""
    epoch = mt.floor(mt.scale(_decay_step_counter(), 1.0 / step_each_epoch))
    half = 0.5 * float(learning_rate)
    return mt.scale(mt.cos(mt.scale(epoch, math.pi / epochs)), half, half)


@layer
def linear_lr_warmup(learning_rate: Any, warmup_steps: int, start_lr: float, end_lr: float) -> Any:
    """From start_lr to end_lr in warmup_steps, then learning_rate, a number or another decay."""
    step = _decay_step_counter()
    rising = mt.scale(step, (float(end_lr) - float(start_lr)) / warmup_steps, float(start_lr))
    after = full([1], float(learning_rate), "float32") if isinstance(learning_rate, (int, float)) else learning_rate
    return where(ar.less_than(step, float(warmup_steps)), rising, after)


__all__ = [
    "cosine_decay", "exponential_decay", "inverse_time_decay", "linear_lr_warmup", "natural_exp_decay", "noam_decay",
    "piecewise_decay", "polynomial_decay",
]  # fmt: skip
