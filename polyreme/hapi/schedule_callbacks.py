"""Callbacks that steer training: LRScheduler, EarlyStopping, ReduceLROnPlateau, and ModelCheckpoint."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.hapi.callback import Callback, Logs

_log = logging.getLogger("polyreme.callbacks")


class ModelCheckpoint(Callback):
    """Saves the Model to save_dir/EPOCH after epochs 0, save_freq, 2 save_freq, ...; at the end to save_dir/final."""

    save_freq: int
    save_dir: str | None

    def __init__(self, save_freq: int = 1, save_dir: str | None = None) -> None:
        super().__init__()
        if isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1:
            raise ConfigError(f"ModelCheckpoint: save_freq={save_freq!r}; give a whole number of epochs, at least 1")
        self.save_freq, self.save_dir = save_freq, save_dir

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_dir and epoch % self.save_freq == 0:
            self.model.save(str(Path(self.save_dir) / str(epoch)))

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self.save_dir:
            self.model.save(str(Path(self.save_dir) / "final"))


class LRScheduler(Callback):
    """Steps the optimizer's learning rate scheduler, if it has one: after each batch, or after each epoch."""

    by_step: bool
    by_epoch: bool

    def __init__(self, by_step: bool = True, by_epoch: bool = False) -> None:
        super().__init__()
        if by_step and by_epoch:
            raise ConfigError("LRScheduler: by_step and by_epoch are both True; choose one")
        self.by_step, self.by_epoch = by_step, by_epoch

    def needs_logs(self, phase: str, step: int) -> bool:
        return False

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        if self.by_step:
            self._advance()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.by_epoch:
            self._advance()

    def _advance(self) -> None:
        scheduler = getattr(self.model.optimizer, "_scheduler", None)
        if scheduler is not None:
            scheduler.step()


class Watched:
    """The best value so far of a monitored quantity.

    mode: "min", "max", or "auto": max for a name with "acc" in it, else min. A value is better if it is so by more than
    min_delta.
    """

    who: str
    monitor: str
    min_delta: float
    rises: bool
    best: float

    def __init__(self, who: str, monitor: str, mode: str, min_delta: float, start: float | None = None) -> None:
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"{who}: mode={mode!r}; give 'auto', 'min' or 'max'")
        self.who, self.monitor, self.min_delta = who, monitor, abs(min_delta)
        self.rises = mode == "max" or (mode == "auto" and "acc" in monitor)
        worst = -math.inf if self.rises else math.inf
        self.best = worst if start is None else start

    def value_in(self, logs: Logs) -> float:
        """The monitored value. Raises ConfigError if logs has none of that name."""
        if self.monitor not in logs:
            names = ", ".join(k for k in logs if k not in ("step", "batch_size"))
            raise ConfigError(f"{self.who}: monitor={self.monitor!r} is not among the results ({names})")
        return float(np.asarray(logs[self.monitor]).reshape(-1)[0])

    def improves(self, value: float) -> bool:
        """True, remembering it, if value is better than the best so far."""
        gain = value - self.best if self.rises else self.best - value
        if not gain > self.min_delta:
            return False
        self.best = value
        return True


class EarlyStopping(Callback):
    """Stops fit once the monitored result has not improved in `patience` evaluations in a row.

    baseline: the value the first evaluation must beat. save_best_model: save the best one to save_dir/best_model, if
    fit has a save_dir. After the stop, self.best_value is the best value and self.stopped_epoch the epoch.
    """

    monitor: str
    mode: str
    patience: int
    verbose: int
    min_delta: float
    baseline: float | None
    save_best_model: bool
    stopped_epoch: int
    wait: int

    def __init__(
        self,
        monitor: str = "loss",
        mode: str = "auto",
        patience: int = 0,
        verbose: int = 1,
        min_delta: float = 0,
        baseline: float | None = None,
        save_best_model: bool = True,
    ) -> None:
        super().__init__()
        self.monitor, self.mode, self.patience, self.verbose = monitor, mode, patience, verbose
        self.min_delta, self.baseline, self.save_best_model = min_delta, baseline, save_best_model
        self.stopped_epoch, self._epoch = 0, 0
        self._begin()

    def _begin(self) -> None:
        self._watched = Watched("EarlyStopping", self.monitor, self.mode, self.min_delta, self.baseline)
        self.wait = 0

    @property
    def best_value(self) -> float:
        """The best value so far."""
        return self._watched.best

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_eval_end(self, logs: Logs | None = None) -> None:
        value = self._watched.value_in(logs or {})
        if self._watched.improves(value):
            self.wait = 0
            folder = self.params.get("save_dir")
            if self.save_best_model and folder:
                self.model.save(str(Path(folder) / "best_model"))
            return
        self.wait += 1
        if self.wait < self.patience:
            return
        self.model.stop_training = True
        self.stopped_epoch = self._epoch
        if self.verbose:
            _log.warning(
                "stopping after epoch %d: %s is %g, the best was %g, %d evaluations ago",
                self._epoch + 1, self.monitor, value, self.best_value, self.wait,
            )  # fmt: skip


class ReduceLROnPlateau(Callback):
    """Multiplies a fixed learning rate by factor when the monitored result has not improved in `patience` evaluations.

    cooldown: evaluations after a cut in which none is counted. min_lr: the rate is never set below this.
    """

    monitor: str
    factor: float
    patience: int
    verbose: int
    mode: str
    min_delta: float
    cooldown: int
    min_lr: float
    wait: int
    cooldown_counter: int

    def __init__(
        self,
        monitor: str = "loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 1,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0,
    ) -> None:
        super().__init__()
        if not 0 <= factor < 1:
            raise ConfigError(f"ReduceLROnPlateau: factor={factor}; give a number of at least 0 and below 1")
        self.monitor, self.factor, self.patience, self.verbose = monitor, factor, patience, verbose
        self.mode, self.min_delta, self.cooldown, self.min_lr = mode, min_delta, cooldown, min_lr
        self._begin()

    def _begin(self) -> None:
        self._watched = Watched("ReduceLROnPlateau", self.monitor, self.mode, self.min_delta)
        self.wait = self.cooldown_counter = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begin()

    def on_eval_end(self, logs: Logs | None = None) -> None:
        improved = self._watched.improves(self._watched.value_in(logs or {}))
        cooling = self.cooldown_counter > 0
        self.cooldown_counter -= cooling
        if improved or cooling:
            self.wait = 0
            return
        self.wait += 1
        if self.wait >= self.patience:
            self._cut(self.model.optimizer)

    def _cut(self, optimizer: Any) -> None:
        old = optimizer.get_lr()
        new = max(old * self.factor, self.min_lr)
        self.wait, self.cooldown_counter = 0, self.cooldown
        if new < old:
            optimizer.set_lr(new)
            if self.verbose:
                _log.warning("%s has stopped improving: learning rate %g -> %g", self.monitor, old, new)
