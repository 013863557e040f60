"""Learning rates as functions: in eager code schedulers of optimizer.lr, in a Program what fluid.layers computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.fluid import layers
from polyreme.optimizer import lr
from polyreme.program.mode import in_dynamic_mode


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> Any:
    """learning_rate * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)."""
    if in_dynamic_mode():
        return lr.NoamDecay(d_model, warmup_steps, learning_rate)
    return layers.noam_decay(d_model, warmup_steps) * learning_rate


def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Any:
    """learning_rate * decay_rate^(step / decay_steps); staircase: of whole parts only."""
    if in_dynamic_mode():
        return lr.LambdaDecay(learning_rate, lambda step: decay_rate ** _share(step, decay_steps, staircase))
    return layers.exponential_decay(learning_rate, decay_steps, decay_rate, staircase)


def natural_exp_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Any:
    """learning_rate * e^(-decay_rate * step / decay_steps); staircase: of whole parts only."""
    if in_dynamic_mode():
        return lr.LambdaDecay(learning_rate, lambda step: math.exp(-decay_rate * _share(step, decay_steps, staircase)))
    return layers.natural_exp_decay(learning_rate, decay_steps, decay_rate, staircase)


def inverse_time_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Any:
    """learning_rate / (1 + decay_rate * step / decay_steps); staircase: of whole parts only."""
    if in_dynamic_mode():
        return lr.LambdaDecay(learning_rate, lambda step: 1 / (1 + decay_rate * _share(step, decay_steps, staircase)))
    return layers.inverse_time_decay(learning_rate, decay_steps, decay_rate, staircase)


def polynomial_decay(
    learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Any:
    """(learning_rate - end) * (1 - step / decay_steps)^power + end."""
    if in_dynamic_mode():
        return lr.PolynomialDecay(learning_rate, decay_steps, end_learning_rate, power, cycle)
    return layers.polynomial_decay(learning_rate, decay_steps, end_learning_rate, power, cycle)


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Any:
    """values[i] before boundaries[i], the last value after them."""
    return (lr.PiecewiseDecay if in_dynamic_mode() else layers.piecewise_decay)(boundaries, values)


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> Any:
    """learning_rate / 2 * (cos(pi * epoch / epochs) + 1), epoch = floor(step / step_each_epoch)."""
    if in_dynamic_mode():
        return lr.LambdaDecay(
            learning_rate, lambda step: (math.cos(math.pi * (step // step_each_epoch) / epochs) + 1) / 2
        )
    return layers.cosine_decay(learning_rate, step_each_epoch, epochs)


def linear_lr_warmup(learning_rate: Any, warmup_steps: int, start_lr: float, end_lr: float) -> Any:
    """From start_lr to end_lr in warmup_steps, then learning_rate, a number or another schedule."""
    return (lr.LinearWarmup if in_dynamic_mode() else layers.linear_lr_warmup)(
        learning_rate, warmup_steps, start_lr, end_lr
    )


def _share(step: int, decay_steps: int, staircase: bool) -> float:
    return step // decay_steps if staircase else step / decay_steps
