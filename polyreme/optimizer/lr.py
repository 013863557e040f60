"""Learning rate schedulers: the learning rate as a function of the step, held on the host.

Each is a closed form of `last_epoch`, so a jump (`step(epoch)`), a resume and a walk give the same rate.
"Epoch" is the public API's word for one call of `step`, be it per batch or per pass over the data.
"""

from __future__ import annotations

import math
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.errors import ArgumentTypeError, CaptureError, CheckpointError, ConfigError, NumericsError
from polyreme.keyword_names import NamesKeywords
from polyreme.module_names import suggest_names

__all__ = [
    "CosineAnnealingDecay",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LambdaDecay",
    "LinearLR",
    "LinearWarmup",
    "MultiStepDecay",
    "MultiplicativeDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "OneCycleLR",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceOnPlateau",
    "StepDecay",
]

Observer = Callable[[float], object]


class LRScheduler(NamesKeywords):
    """Base of all schedulers; a subclass defines `get_lr()` from `base_lr` and `last_epoch`.

    The constructor takes the first step, so `last_epoch` is 0 after it (or the given last_epoch + 1, to resume).
    Every write of `last_lr` must be finite (else NumericsError) and is told to the observers. A subclass with more
    state overrides `state_keys()` to set `self.keys`, the names of the attributes that `state_dict` saves.

    >>> class Halving(LRScheduler):
    ...     def get_lr(self):
    ...         return self.base_lr / 2**self.last_epoch
    >>> s = Halving(0.8)
    >>> s.step(); s.step(); s()
    0.2
    """

    base_lr: float
    last_epoch: int
    keys: list[str]

    # References are weak, and the tuple is replaced and never changed, so copies of a scheduler share no observers.
    _observers: tuple[weakref.ref[Any], ...] = ()

    def __init__(self, learning_rate: float = 0.1, last_epoch: int = -1, verbose: bool = False) -> None:
        self.base_lr = _number(self, "learning_rate", learning_rate, low=0.0)
        self.last_epoch = _number(self, "last_epoch", last_epoch, low=-1)
        self.verbose = verbose
        self._last_lr = self.base_lr
        self.step()

    def __call__(self) -> float:
        """The learning rate in force."""
        return self.last_lr

    @property
    def last_lr(self) -> float:
        """The learning rate in force."""
        return self._last_lr

    @last_lr.setter
    def last_lr(self, value: Any) -> None:
        lr = float(_scalar(value))
        if not math.isfinite(lr):
            raise NumericsError(
                f"{type(self).__name__} gives learning rate {lr} at epoch {self.last_epoch}; "
                "make its settings give a finite number"
            )
        self._last_lr = lr
        for reference in self._observers:
            observer = reference()
            if observer is not None:
                observer(lr)

    def get_lr(self) -> float:
        """The learning rate at `last_epoch`; each scheduler defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define get_lr(self) -> the rate at self.last_epoch")

    def step(self, epoch: float | None = None) -> None:
        """Moves to the next epoch, or to the given one, and sets `last_lr`; ConfigError for a negative epoch."""
        self.last_epoch = self._next_epoch(epoch)
        self.last_lr = self.get_lr()
        if self.verbose:
            self._report()

    def subscribe(self, observer: Observer) -> None:
        """Calls observer(lr) after every change of the rate, for as long as the observer itself is alive.

        The reference is weak: keep the function, or the object whose method it is (a bare lambda is gone at once).
        """
        reference = weakref.WeakMethod(observer) if hasattr(observer, "__self__") else weakref.ref(observer)
        self._observers = (*(r for r in self._observers if r() is not None), reference)

    def unsubscribe(self, observer: Observer) -> None:
        """Stops calling observer; ConfigError if it was not subscribed."""
        kept = tuple(r for r in self._observers if r() is not None and r() != observer)
        if len(kept) == len([r for r in self._observers if r() is not None]):
            raise ConfigError(f"{observer!r} does not observe this {type(self).__name__}; subscribe it first")
        self._observers = kept

    def state_keys(self) -> None:
        """Sets `self.keys`, the names of the attributes that make up the state."""
        self.keys = ["last_epoch", "last_lr"]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, lists and dicts: fit for JSON."""
        self.state_keys()
        return {key: _plain(getattr(self, key)) for key in self.keys}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave; CheckpointError, with nothing changed, if keys are missing or unknown."""
        self.state_keys()
        self._check_keys(state_dict, self.keys)
        # The rate goes last: observers hear of it when the rest is in place.
        for key in sorted(self.keys, key=lambda k: k == "last_lr"):
            setattr(self, key, state_dict[key])

    set_dict = set_state_dict

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_observers"}

    def _next_epoch(self, epoch: float | None) -> Any:
        if state.watch.active is not None and not state.recording():
            raise CaptureError(
                f"{type(self).__name__}.step() inside a captured function would run while capturing only, and the rate "
                "would never change again; call it outside"
            )
        if epoch is None:
            return self.last_epoch + 1
        return _number(self, "epoch", epoch, low=0)

    def _check_keys(self, state: Mapping[str, Any], keys: Sequence[str]) -> None:
        missing, unknown = [k for k in keys if k not in state], [k for k in state if k not in keys]
        if missing or unknown:
            raise CheckpointError(
                f"{type(self).__name__}.set_state_dict needs the keys {list(keys)}, but {missing} are missing and "
                f"{unknown} unknown; give the state_dict of a {type(self).__name__} made with the same arguments"
            )

    def _report(self) -> None:
        sys.stdout.write(f"Epoch {self.last_epoch}: {type(self).__name__} set learning rate to {self.last_lr}.\n")


class NoamDecay(LRScheduler):
    """Linear warmup, then decay with 1/sqrt(epoch): lr * d_model^-0.5 * min(epoch^-0.5, epoch * warmup_steps^-1.5).

    Source: arXiv:1706.03762, section 5.3.
    """

    d_model: int
    warmup_steps: int

    def __init__(
        self,
        d_model: int,
        warmup_steps: int,
        learning_rate: float = 1.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.d_model = _number(self, "d_model", d_model, above=0)
        self.warmup_steps = _number(self, "warmup_steps", warmup_steps, above=0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        epoch = self.last_epoch
        decay = epoch**-0.5 if epoch > 0 else 1.0
        return self.base_lr * self.d_model**-0.5 * min(decay, epoch * self.warmup_steps**-1.5)


class PiecewiseDecay(LRScheduler):
    """values[i] before boundaries[i], and values[-1] from the last boundary on."""

    boundaries: list[float]
    values: list[Any]

    def __init__(
        self, boundaries: Sequence[float], values: Sequence[float], last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.boundaries = _ascending(self, "boundaries", boundaries, equal=True)
        if not self.boundaries or len(values) != len(self.boundaries) + 1:
            raise ConfigError(
                f"PiecewiseDecay got {len(self.boundaries)} boundaries and {len(values)} values; "
                "give at least one boundary, and one more value than boundaries"
            )
        self.values = [_number(self, "values", value) for value in values]
        super().__init__(self.values[0], last_epoch, verbose)

    def get_lr(self) -> float:
        return self.values[bisect_right(self.boundaries, self.last_epoch)]


class NaturalExpDecay(LRScheduler):
    """lr * exp(-gamma * epoch); gamma > 0."""

    gamma: float

    def __init__(self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False) -> None:
        self.gamma = _number(self, "gamma", gamma, above=0.0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * math.exp(-self.gamma * self.last_epoch)


class InverseTimeDecay(LRScheduler):
    """lr / (1 + gamma * epoch); gamma >= 0."""

    gamma: float

    def __init__(self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False) -> None:
        self.gamma = _number(self, "gamma", gamma, low=0.0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr / (1 + self.gamma * self.last_epoch)


class PolynomialDecay(LRScheduler):
    """(lr - end_lr) * (1 - epoch / decay_steps)^power + end_lr, and end_lr after decay_steps.

    With cycle, end_lr is not held: the span grows to the next multiple of decay_steps and the decay goes on over it.
    """

    decay_steps: int
    end_lr: float
    power: float

    def __init__(
        self,
        learning_rate: float,
        decay_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.decay_steps = _check_count(self, "decay_steps", decay_steps)
        self.end_lr = _number(self, "end_lr", end_lr)
        self.power = _number(self, "power", power, above=0.0)
        self.cycle = cycle
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        epoch, span = self.last_epoch, self.decay_steps
        if self.cycle:
            span *= max(math.ceil(epoch / span), 1)
        return (self.base_lr - self.end_lr) * (1 - min(epoch, span) / span) ** self.power + self.end_lr


class LinearWarmup(LRScheduler):
    """From start_lr to end_lr in a straight line over warmup_steps, then learning_rate, a number or a scheduler.

    A scheduler starts at its own epoch 0 when the warmup ends, and is stepped by this one; its state is saved with it.
    """

    warmup_steps: int
    start_lr: float
    end_lr: float

    def __init__(
        self,
        learning_rate: float | LRScheduler,
        warmup_steps: int,
        start_lr: float,
        end_lr: float,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if isinstance(learning_rate, ReduceOnPlateau):
            raise ConfigError(
                "LinearWarmup cannot step a ReduceOnPlateau, which needs a metric; warm up first, then make the plateau"
            )
        if not isinstance(learning_rate, LRScheduler):
            learning_rate = _number(self, "learning_rate", learning_rate, low=0.0)
        self.learning_rate = learning_rate
        self.warmup_steps = _check_count(self, "warmup_steps", warmup_steps)
        self.start_lr = _number(self, "start_lr", start_lr, low=0.0)
        self.end_lr = _number(self, "end_lr", end_lr, above=self.start_lr)
        super().__init__(start_lr, last_epoch, verbose)

    def get_lr(self) -> float:
        epoch = self.last_epoch - self.warmup_steps
        if epoch < 0:
            return self.start_lr + (self.end_lr - self.start_lr) * self.last_epoch / self.warmup_steps
        if isinstance(self.learning_rate, LRScheduler):
            self.learning_rate.step(epoch)
            return self.learning_rate()
        return self.learning_rate

    def state_dict(self) -> dict[str, Any]:
        """The state, with the inner scheduler's under "LinearWarmup_LR"."""
        state = super().state_dict()
        if isinstance(self.learning_rate, LRScheduler):
            state["LinearWarmup_LR"] = self.learning_rate.state_dict()
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the state, the inner scheduler's too; CheckpointError as the base."""
        own = dict(state_dict)
        if isinstance(self.learning_rate, LRScheduler):
            self._check_keys(state_dict, ["last_epoch", "last_lr", "LinearWarmup_LR"])
            self.learning_rate.set_state_dict(own.pop("LinearWarmup_LR"))
        super().set_state_dict(own)

    set_dict = set_state_dict


class ExponentialDecay(LRScheduler):
    """lr * gamma^epoch; 0 < gamma < 1."""

    gamma: float

    def __init__(self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False) -> None:
        self.gamma = _number(self, "gamma", gamma, above=0.0, below=1.0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * self.gamma**self.last_epoch


class MultiStepDecay(LRScheduler):
    """lr * gamma^(number of milestones reached); 0 <= gamma < 1."""

    milestones: list[float]
    gamma: float

    def __init__(
        self,
        learning_rate: float,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.milestones = _ascending(self, "milestones", milestones)
        self.gamma = _number(self, "gamma", gamma, low=0.0, below=1.0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * self.gamma ** bisect_right(self.milestones, self.last_epoch)


class StepDecay(LRScheduler):
    """lr * gamma^floor(epoch / step_size); 0 <= gamma < 1."""

    step_size: int
    gamma: float

    def __init__(
        self, learning_rate: float, step_size: int, gamma: float = 0.1, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.step_size = _check_count(self, "step_size", step_size)
        self.gamma = _number(self, "gamma", gamma, low=0.0, below=1.0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * self.gamma ** (self.last_epoch // self.step_size)


class LambdaDecay(LRScheduler):
    """lr * lr_lambda(epoch)."""

    lr_lambda: Callable[..., float]

    def __init__(
        self, learning_rate: float, lr_lambda: Callable[[int], float], last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.lr_lambda = _function(self, "lr_lambda", lr_lambda)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * self.lr_lambda(self.last_epoch)


class MultiplicativeDecay(LRScheduler):
    """lr * lr_lambda(1) * ... * lr_lambda(epoch); lr_lambda must always give the same factor for an epoch."""

    lr_lambda: Callable[..., float]

    def __init__(
        self, learning_rate: float, lr_lambda: Callable[[int], float], last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.lr_lambda = _function(self, "lr_lambda", lr_lambda)
        self._so_far = (0, 1.0)  # the product up to an epoch, so that a walk costs one factor a step
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        epoch, factor = self._so_far if self._so_far[0] <= self.last_epoch else (0, 1.0)
        for k in range(epoch + 1, int(self.last_epoch) + 1):
            factor *= self.lr_lambda(k)
        self._so_far = (int(self.last_epoch), factor)
        return self.base_lr * factor


class CosineAnnealingDecay(LRScheduler):
    """eta_min + (lr - eta_min) * (1 + cos(pi * epoch / T_max)) / 2: down over T_max, then up again, without restarts.

    Source: arXiv:1608.03983, equation 5.
    """

    T_max: int
    eta_min: float

    def __init__(
        self, learning_rate: float, T_max: int, eta_min: float = 0, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.T_max = _check_count(self, "T_max", T_max)
        self.eta_min = _number(self, "eta_min", eta_min)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return _cosine(self.base_lr, self.eta_min, self.last_epoch / self.T_max)


class CosineAnnealingWarmRestarts(LRScheduler):
    """A cosine from lr to eta_min over T_0 epochs, then again over T_0 * T_mult, T_0 * T_mult^2, ...

    `step` also takes a fraction, such as epoch + batch / num_batches; `last_epoch` is then its whole part.
    Source: arXiv:1608.03983, section 3.
    """

    T_mult: int
    eta_min: float
    epoch_fraction: float

    def __init__(
        self,
        learning_rate: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.T_0 = _check_count(self, "T_0", T_0)
        self.T_mult = _check_count(self, "T_mult", T_mult)
        self.eta_min = _number(self, "eta_min", eta_min)
        self.epoch_fraction = 0.0
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        epoch_in_cycle, span = self.last_epoch + self.epoch_fraction, self.T_0
        if self.T_mult == 1:
            epoch_in_cycle %= span
        while epoch_in_cycle >= span:
            epoch_in_cycle, span = epoch_in_cycle - span, span * self.T_mult
        return _cosine(self.base_lr, self.eta_min, epoch_in_cycle / span)

    def state_dict(self) -> dict[str, Any]:
        """The state, with "epoch_fraction" when steps were given in fractions."""
        state = super().state_dict()
        return {**state, "epoch_fraction": self.epoch_fraction} if self.epoch_fraction else state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the state; CheckpointError as the base."""
        own = dict(state_dict)
        fraction = own.pop("epoch_fraction", 0.0)
        super().set_state_dict(own)
        self.epoch_fraction = fraction

    set_dict = set_state_dict

    def _next_epoch(self, epoch: float | None) -> int:
        if epoch is not None:
            self.epoch_fraction = _number(self, "epoch", epoch, low=0) % 1
        return math.floor(super()._next_epoch(epoch))


class OneCycleLR(LRScheduler):
    """One rise from max / divide_factor to max over phase_pct of the run, then one fall to end_learning_rate.

    With three_phase the fall goes back to max / divide_factor in as many epochs as the rise took, then to the end.
    The rate at epoch total_steps - 1 is end_learning_rate; it is held for the one step a loop takes after its last
    batch, and a step further raises ConfigError. Source: arXiv:1708.07120.
    """

    total_steps: int

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        divide_factor: float = 25.0,
        end_learning_rate: float = 0.0001,
        phase_pct: float = 0.3,
        anneal_strategy: str = "cos",
        three_phase: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        high = _number(self, "max_learning_rate", max_learning_rate, low=0.0)
        start = high / _number(self, "divide_factor", divide_factor, above=0.0)
        end = _number(self, "end_learning_rate", end_learning_rate, low=0.0)
        self.total_steps = _check_count(self, "total_steps", total_steps)
        limit = {"below": 0.5} if three_phase else {"high": 1.0}
        rise = _number(self, "phase_pct", phase_pct, low=0.0, **limit) * self.total_steps - 1
        self._anneal = {"cos": _cosine, "linear": _line}[
            _choice(self, "anneal_strategy", anneal_strategy, ("cos", "linear"))
        ]
        last = self.total_steps - 1
        knots = [(0.0, start), (rise, high), (2 * rise, start), (last, end)]
        self._knots = knots if three_phase else [knots[0], knots[1], knots[3]]
        super().__init__(start, last_epoch, verbose)

    def get_lr(self) -> float:
        if self.last_epoch > self.total_steps:
            raise ConfigError(
                f"OneCycleLR was made for total_steps={self.total_steps} and stepped to epoch {self.last_epoch}; "
                "make total_steps as large as the number of steps"
            )
        epoch = min(self.last_epoch, self.total_steps - 1)
        after = next((i for i, knot in enumerate(self._knots) if epoch < knot[0]), len(self._knots) - 1)
        (x0, y0), (x1, y1) = self._knots[after - 1], self._knots[after]
        return self._anneal(y0, y1, (epoch - x0) / (x1 - x0) if x1 > x0 else 1.0)


class CyclicLR(LRScheduler):
    """Up from base to max over step_size_up epochs, down over step_size_down, and again.

    The height of the cycle is scaled by mode: "triangular" 1, "triangular2" 1 / 2^(cycle - 1), "exp_range"
    exp_gamma^epoch, where cycle counts from 1. scale_fn replaces mode: it is given the cycle, or the epoch when
    scale_mode is "iterations". Source: arXiv:1506.01186.
    """

    max_lr: float
    step_size_up: int
    step_size_down: int
    exp_gamma: float
    scale_fn: Callable[[float], float]
    scale_mode: str
    mode: str

    def __init__(
        self,
        base_learning_rate: float,
        max_learning_rate: float,
        step_size_up: int,
        step_size_down: int | None = None,
        mode: str = "triangular",
        exp_gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.max_lr = _number(self, "max_learning_rate", max_learning_rate, low=0.0)
        self.step_size_up = _check_count(self, "step_size_up", step_size_up)
        self.step_size_down = (
            self.step_size_up if step_size_down is None else _check_count(self, "step_size_down", step_size_down)
        )
        self.exp_gamma = _number(self, "exp_gamma", exp_gamma, low=0.0)
        _choice(self, "scale_mode", scale_mode, ("cycle", "iterations"))
        if scale_fn is not None:
            self.scale_fn, self.scale_mode = _function(self, "scale_fn", scale_fn), scale_mode
        else:
            self.mode = _choice(self, "mode", mode, ("triangular", "triangular2", "exp_range"))
            self.scale_fn = getattr(self, f"_{mode}")
            self.scale_mode = "iterations" if mode == "exp_range" else "cycle"
        super().__init__(base_learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        cycle, at = divmod(self.last_epoch, self.step_size_up + self.step_size_down)
        up = at / self.step_size_up
        height = up if up <= 1 else 1 - (at - self.step_size_up) / self.step_size_down
        scale = self.scale_fn(cycle + 1 if self.scale_mode == "cycle" else self.last_epoch)
        return self.base_lr + (self.max_lr - self.base_lr) * height * scale

    def _triangular(self, cycle: float) -> float:
        return 1.0

    def _triangular2(self, cycle: float) -> float:
        return 0.5 ** (cycle - 1)

    def _exp_range(self, epoch: float) -> float:
        return self.exp_gamma**epoch


class LinearLR(LRScheduler):
    """lr * factor, the factor going straight from start_factor to end_factor over total_steps, then held."""

    total_steps: int
    start_factor: float
    end_factor: float

    def __init__(
        self,
        learning_rate: float,
        total_steps: int,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.total_steps = _check_count(self, "total_steps", total_steps)
        self.start_factor = _number(self, "start_factor", start_factor, above=0.0, high=1.0)
        self.end_factor = _number(self, "end_factor", end_factor, low=0.0, high=1.0)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * _line(self.start_factor, self.end_factor, min(self.last_epoch / self.total_steps, 1.0))


class ReduceOnPlateau(LRScheduler):
    """Multiplies the rate by factor when a metric has not improved for more than patience epochs.

    Better means by more than threshold: of the best value so far ("rel"), or as it is ("abs"). After a cut, cooldown
    epochs are not looked at. The rate stays at or above min_lr, and a cut of epsilon or less is not made.

    >>> s = ReduceOnPlateau(1.0, patience=1, factor=0.5)
    >>> for loss in (3.0, 2.0, 2.0, 2.0):
    ...     s.step(loss)
    >>> s()
    0.5
    """

    mode: str
    threshold_mode: str
    factor: float
    patience: int
    threshold: float
    cooldown: int
    min_lr: float
    epsilon: float
    base_lr: float
    cooldown_counter: int
    num_bad_epochs: int
    last_epoch: int
    keys: list[str]

    def __init__(
        self,
        learning_rate: float,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0,
        epsilon: float = 1e-8,
        verbose: bool = False,
    ) -> None:
        self.mode = _choice(self, "mode", mode, ("min", "max"))
        self.threshold_mode = _choice(self, "threshold_mode", threshold_mode, ("rel", "abs"))
        self.factor = _number(self, "factor", factor, low=0.0, below=1.0)
        self.patience = _number(self, "patience", patience, low=0)
        self.threshold = _number(self, "threshold", threshold, low=0.0)
        self.cooldown = _number(self, "cooldown", cooldown, low=0)
        self.min_lr = _number(self, "min_lr", min_lr, low=0.0)
        self.epsilon = _number(self, "epsilon", epsilon, low=0.0)
        self.base_lr = self._last_lr = _number(self, "learning_rate", learning_rate, low=0.0)
        self.verbose = verbose
        self.best: float | None = None
        self.cooldown_counter = self.num_bad_epochs = self.last_epoch = 0

    def get_lr(self) -> float:
        """The learning rate in force; only a metric changes it."""
        return self.last_lr

    def state_keys(self) -> None:
        """Sets `self.keys`."""
        self.keys = ["cooldown_counter", "best", "num_bad_epochs", "last_epoch", "last_lr"]

    def step(self, metrics: Any, epoch: float | None = None) -> None:  # type: ignore[override]  # the public signature
        """Looks at one value of the metric (a number, array or Tensor of one element) and cuts the rate if it is time.

        A NaN never counts as better. Raises ConfigError for anything that is not one number.
        """
        metric = self._one_number(metrics)
        self.last_epoch = self._next_epoch(epoch)
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
        elif self._is_better(metric):
            self.best, self.num_bad_epochs = metric, 0
        else:
            self.num_bad_epochs += 1
        if self.num_bad_epochs > self.patience:
            self._cut()

    def _cut(self) -> None:
        self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        lr = max(self.last_lr * self.factor, self.min_lr)
        if self.last_lr - lr > self.epsilon:
            self.last_lr = lr
            if self.verbose:
                self._report()

    def _is_better(self, metric: float) -> bool:
        if self.best is None:
            return not math.isnan(metric)
        margin = self.threshold * (self.best if self.threshold_mode == "rel" else 1.0)
        return metric < self.best - margin if self.mode == "min" else metric > self.best + margin

    def _one_number(self, metrics: Any) -> float:
        value = _scalar(metrics)
        if not isinstance(value, Real):
            raise ArgumentTypeError(
                f"ReduceOnPlateau.step got {metrics!r}; give one number, array or Tensor of one element"
            )
        return float(value)


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def _line(start: float, end: float, part: float) -> float:
    return start + (end - start) * part


def _scalar(value: Any) -> Any:
    """A Tensor or array of one element as that element; anything else unchanged."""
    array = value.numpy() if hasattr(value, "numpy") else value
    return array.item() if isinstance(array, (np.ndarray, np.generic)) and array.size == 1 else array


def _plain(value: Any) -> Any:
    value = _scalar(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _number(
    owner: LRScheduler,
    name: str,
    value: Any,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """The value itself if it is finite and in range; else ConfigError, or ArgumentTypeError for what is no number."""
    value = _scalar(value)
    bounds = {"at least": low, "above": above, "at most": high, "below": below}
    wanted = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    if (
        not _is_finite(value)
        or (low is not None and value < low)
        or (above is not None and value <= above)
        or (high is not None and value > high)
        or (below is not None and value >= below)
    ):
        if hasattr(value, "set_lr_scheduler"):
            optimizer, name = type(value).__name__, type(owner).__name__
            raise ArgumentTypeError(
                f"{name}: got the optimizer {optimizer}; make the schedule first, of a rate, and give it to the "
                f"optimizer: {optimizer}(learning_rate={name}(0.1, ...), parameters=...)"
            )
        kind = ConfigError if _is_number(value) else ArgumentTypeError
        raise kind(f"{type(owner).__name__}: {name}={value!r}; give a number {wanted}".rstrip())
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _check_count(owner: LRScheduler, name: str, value: Any) -> int:
    value = _scalar(value)
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < 1:
        kind = ConfigError if is_whole else ArgumentTypeError
        raise kind(f"{type(owner).__name__}: {name}={value!r}; give a whole number of at least 1")
    return int(value)


def _ascending(owner: LRScheduler, name: str, values: Any, *, equal: bool = False) -> list[float]:
    """values as floats, each above the one before it, or not below it where equal ones may stand."""
    is_list = isinstance(values, (list, tuple))
    if not is_list or any(a > b or (a == b and not equal) for a, b in pairwise(values)):
        order = "numbers, none below the one before it" if equal else "increasing numbers"
        kind = ConfigError if is_list else ArgumentTypeError
        raise kind(f"{type(owner).__name__}: {name}={values!r}; give a list of {order}")
    return [_number(owner, name, value) for value in values]


def _choice(owner: LRScheduler, name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{type(owner).__name__}: {name}={value!r}; give one of {', '.join(choices)}")
    return value


def _function(owner: LRScheduler, name: str, value: Any) -> Callable[[Any], float]:
    if not callable(value):
        raise ArgumentTypeError(f"{type(owner).__name__}: {name}={value!r}; give a function of the epoch")
    function: Callable[[Any], Any] = value
    return function


suggest_names(__name__)
