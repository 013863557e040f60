"""Learning rates of dygraph that go on with every minimize(), as 1.7 and 1.8 have them.

Each is a closed form of step_num, the number of steps so far from begin on in strides of step. A class of one's own
defines step(), which gives the rate at step_num.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.optimizer import lr


class LearningRateDecay:
    """Base of them: called, it gives the rate of this step, [1] of dtype, and moves on to the next."""

    step_num: int
    step_size: int
    dtype: str

    def __init__(self, begin: int = 0, step: int = 1, dtype: str = "float32") -> None:
        self.step_num, self.step_size, self.dtype = begin, step, dtype

    def step(self) -> Any:
        """The rate at step_num, a number or a Tensor of one."""
        raise NotImplementedError(f"{type(self).__name__} has no step(); write one that gives the rate at step_num")

    def __call__(self) -> Tensor:
        """The rate of this step; the next call gives that of the next."""
        rate = self.step()
        self.step_num += self.step_size
        return self.create_lr_var(rate)

    def create_lr_var(self, lr: Any) -> Tensor:
        """A rate as a Tensor of shape [1]."""
        return to_tensor([float(lr)], dtype=self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Where it is, under the name that 1.7's optimizers keep it by."""
        return {"global_step": to_tensor([self.step_num], dtype="int64")}

    def set_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from where state_dict() was taken."""
        self.step_num = int(np.asarray(state_dict["global_step"]).reshape(()))


class PiecewiseDecay(LearningRateDecay):
    """values[i] before boundaries[i], the last value after them. Raises ConfigError unless there is one more value."""

    boundaries: list[int]
    values: list[float]

    def __init__(
        self, boundaries: Sequence[int], values: Sequence[float], begin: int, step: int = 1, dtype: str = "float32"
    ) -> None:
        super().__init__(begin, step, dtype)
        if len(values) != len(boundaries) + 1:
            raise ConfigError(
                f"PiecewiseDecay: {len(boundaries)} boundaries and {len(values)} values; give one value more"
            )
        self.boundaries, self.values = list(boundaries), list(values)

    def step(self) -> float:
        return float(self.values[bisect_right(self.boundaries, self.step_num)])


class _Decay(LearningRateDecay):
    """A rate that depends on step_num / decay_steps, or on its whole part with staircase."""

    def __init__(
        self, learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False, begin: int = 0,
        step: int = 1, dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(begin, step, dtype)
        self.learning_rate, self.decay_steps = learning_rate, decay_steps
        self.decay_rate, self.staircase = decay_rate, staircase

    def _share(self) -> float:
        share = self.step_num / self.decay_steps
        return math.floor(share) if self.staircase else share


class NaturalExpDecay(_Decay):
    """learning_rate * e^(-decay_rate * step / decay_steps); staircase: of whole parts only."""

    def step(self) -> float:
        return self.learning_rate * math.exp(-self.decay_rate * self._share())


class ExponentialDecay(_Decay):
    """learning_rate * decay_rate^(step / decay_steps); staircase: of whole parts only."""

    def step(self) -> float:
        return self.learning_rate * self.decay_rate ** self._share()


class InverseTimeDecay(_Decay):
    """learning_rate / (1 + decay_rate * step / decay_steps); staircase: of whole parts only."""

    def step(self) -> float:
        return self.learning_rate / (1 + self.decay_rate * self._share())


class PolynomialDecay(LearningRateDecay):
    """(learning_rate - end) * (1 - step / decay_steps)^power + end; after decay_steps end, or again longer if cycle."""

    learning_rate: float
    decay_steps: int
    end_learning_rate: float
    power: float
    cycle: bool

    def __init__(
        self, learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0,
        cycle: bool = False, begin: int = 0, step: int = 1, dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(begin, step, dtype)
        self.learning_rate, self.decay_steps, self.end_learning_rate = learning_rate, decay_steps, end_learning_rate
        self.power, self.cycle = power, cycle

    def step(self) -> float:
        if self.cycle:
            share = self.step_num / (self.decay_steps * max(math.ceil(self.step_num / self.decay_steps), 1))
        else:
            share = min(self.step_num, self.decay_steps) / self.decay_steps
        return (self.learning_rate - self.end_learning_rate) * (1 - share) ** self.power + self.end_learning_rate


class CosineDecay(LearningRateDecay):
    """learning_rate / 2 * (cos(pi * epoch / epochs) + 1), epoch = floor(step / step_each_epoch)."""

    learning_rate: float
    step_each_epoch: int
    epochs: int

    def __init__(
        self, learning_rate: float, step_each_epoch: int, epochs: int, begin: int = 0, step: int = 1,
        dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(begin, step, dtype)
        self.learning_rate, self.step_each_epoch, self.epochs = learning_rate, step_each_epoch, epochs

    def step(self) -> float:
        epoch = self.step_num // self.step_each_epoch
        return self.learning_rate * 0.5 * (math.cos(epoch * math.pi / self.epochs) + 1)


class NoamDecay(LearningRateDecay):
    """learning_rate * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5). Source: arXiv:1706.03762, equation 3.

    Raises ConfigError for begin=0, where the rate would be 0.
    """

    d_model: int
    warmup_steps: int
    learning_rate: float

    def __init__(
        self, d_model: int, warmup_steps: int, begin: int = 1, step: int = 1, dtype: str = "float32",
        learning_rate: float = 1.0,
    ) -> None:  # fmt: skip
        if begin < 1:
            raise ConfigError(f"NoamDecay: begin={begin}; its first step is 1")
        super().__init__(begin, step, dtype)
        self.d_model, self.warmup_steps, self.learning_rate = d_model, warmup_steps, learning_rate

    def step(self) -> float:
        rising = self.step_num * self.warmup_steps**-1.5
        return self.learning_rate * self.d_model**-0.5 * min(self.step_num**-0.5, rising)


class LinearLrWarmup(LearningRateDecay):
    """From start_lr to end_lr in warmup_steps, then learning_rate: a number, or another decay, which moves on with
    every step from the first."""

    learning_rate: Any
    warmup_steps: int
    start_lr: float
    end_lr: float

    def __init__(
        self, learning_rate: Any, warmup_steps: int, start_lr: float, end_lr: float, begin: int = 1, step: int = 1,
        dtype: str = "float32",
    ) -> None:  # fmt: skip
        if start_lr >= end_lr:
            raise ConfigError(f"LinearLrWarmup: start_lr={start_lr} is not below end_lr={end_lr}")
        super().__init__(begin, step, dtype)
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.start_lr, self.end_lr = start_lr, end_lr

    def step(self) -> float:
        if self.step_num < self.warmup_steps:
            return self.start_lr + (self.end_lr - self.start_lr) * self.step_num / self.warmup_steps
        base = self.learning_rate
        return float(base.step() if isinstance(base, LearningRateDecay) else base)

    def __call__(self) -> Tensor:
        rate = super().__call__()
        if isinstance(self.learning_rate, LearningRateDecay):
            self.learning_rate()
        return rate

    def state_dict(self) -> dict[str, Any]:
        base = self.learning_rate
        inner = base.state_dict() if isinstance(base, LearningRateDecay) else {}
        return super().state_dict() | {f"base_{name}": value for name, value in inner.items()}

    def set_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().set_dict(state_dict)
        if isinstance(self.learning_rate, LearningRateDecay):
            inner = {n.removeprefix("base_"): v for n, v in state_dict.items() if n.startswith("base_")}
            self.learning_rate.set_dict(inner)


class _EpochDecay(LearningRateDecay):
    """A rate that moves on with epoch(), not with minimize()."""

    def __init__(self, learning_rate: float, dtype: str = "float32") -> None:
        super().__init__(0, 1, dtype)
        if isinstance(learning_rate, bool) or not isinstance(learning_rate, (int, float)):
            raise TypeError(f"{type(self).__name__}: learning_rate is a number, got {learning_rate!r}")
        self.base_lr = float(learning_rate)

    def __call__(self) -> Tensor:
        return self.create_lr_var(self.step())

    def epoch(self, epoch: int | None = None) -> None:
        """Move to the next epoch, or to this one."""
        self.step_num = self.step_num + 1 if epoch is None else epoch


class StepDecay(_EpochDecay):
    """learning_rate * decay_rate^floor(epoch / step_size)."""

    step_size_of_epochs: int
    decay_rate: float

    def __init__(self, learning_rate: float, step_size: int, decay_rate: float = 0.1) -> None:
        super().__init__(learning_rate)
        if not isinstance(step_size, int) or step_size < 1 or decay_rate >= 1:
            raise ConfigError(
                f"StepDecay: step_size={step_size!r}, decay_rate={decay_rate!r}; give a whole number of at least 1 and "
                "a factor below 1"
            )
        self.step_size_of_epochs, self.decay_rate = step_size, decay_rate

    def step(self) -> float:
        return self.base_lr * self.decay_rate ** (self.step_num // self.step_size_of_epochs)


class MultiStepDecay(_EpochDecay):
    """learning_rate * decay_rate^(how many milestones the epoch has reached)."""

    milestones: list[int]
    decay_rate: float

    def __init__(self, learning_rate: float, milestones: Sequence[int], decay_rate: float = 0.1) -> None:
        super().__init__(learning_rate)
        if list(milestones) != sorted(set(milestones)) or decay_rate >= 1:
            raise ConfigError(
                f"MultiStepDecay: milestones={milestones!r}, decay_rate={decay_rate!r}; give increasing epochs and a "
                "factor below 1"
            )
        self.milestones, self.decay_rate = list(milestones), decay_rate

    def step(self) -> float:
        return self.base_lr * self.decay_rate ** bisect_right(self.milestones, self.step_num)


class LambdaDecay(_EpochDecay):
    """learning_rate * lr_lambda(epoch)."""

    def __init__(self, learning_rate: float, lr_lambda: Callable[[int], float]) -> None:
        super().__init__(learning_rate)
        if not callable(lr_lambda):
            raise TypeError(f"LambdaDecay: lr_lambda is a function of the epoch, got {lr_lambda!r}")
        self.lr_lambda = lr_lambda

    def step(self) -> float:
        return self.base_lr * self.lr_lambda(self.step_num)


class ReduceLROnPlateau(LearningRateDecay):
    """The rate of polyreme.optimizer.lr.ReduceOnPlateau: step(loss) cuts it when the loss got no better."""

    def __init__(
        self, learning_rate: float, mode: str = "min", decay_rate: float = 0.1, patience: int = 10,
        verbose: bool = False, threshold: float = 1e-4, threshold_mode: str = "rel", cooldown: int = 0,
        min_lr: float = 0, eps: float = 1e-8, dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(0, 1, dtype)
        self.scheduler = lr.ReduceOnPlateau(
            learning_rate, mode, decay_rate, patience, threshold, threshold_mode, cooldown, min_lr, eps, verbose
        )

    def __call__(self) -> Tensor:
        return self.create_lr_var(self.scheduler())

    def step(self, loss: Any = None) -> float:
        """Look at one value of the loss, and cut the rate if it is time; -> the rate, which is all without a loss."""
        if loss is not None:
            self.scheduler.step(loss)
        return self.scheduler()

    def state_dict(self) -> dict[str, Any]:
        return {"LR_Scheduler": self.scheduler.state_dict()}

    def set_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.scheduler.set_state_dict(state_dict["LR_Scheduler"])


__all__ = [
    "CosineDecay", "ExponentialDecay", "InverseTimeDecay", "LambdaDecay", "LearningRateDecay", "LinearLrWarmup",
    "MultiStepDecay", "NaturalExpDecay", "NoamDecay", "PiecewiseDecay", "PolynomialDecay", "ReduceLROnPlateau",
    "StepDecay",
]  # fmt: skip
