"""Callback: what may happen between the batches and epochs of Model; CallbackList: several as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from polyreme.errors import ConfigError

Logs = dict[str, Any]
_PHASES = ("train", "eval", "predict")


class Callback:
    """Base of all callbacks: override the hooks that matter. self.model is the Model, self.params its run's settings.

    logs of a batch: "loss" (a list of floats, of this batch), each metric by name (since the epoch's start), "step" and
    "batch_size".
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        """Takes the settings of the run: epochs, steps, verbose, metrics, save_dir, log_freq, save_freq."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Takes the Model."""
        self.model = model

    def needs_logs(self, phase: str, step: int) -> bool:
        """Whether this callback reads loss and metrics after this batch; if none does, nobody waits for the device.

        A class that overrides on_train_batch_end (on_eval_batch_end) is taken to read them after every batch.
        """
        hook = f"on_{phase}_batch_end"
        return getattr(type(self), hook) is not getattr(Callback, hook)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before the first epoch."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """After the last epoch."""

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Before an evaluation; logs has "steps" and "metrics"."""

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """After an evaluation, with its results."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Before a prediction; logs has "steps"."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """After a prediction."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before an epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """After an epoch, before its evaluation."""

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a training batch, counted from 0 in each epoch."""

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a training batch."""

    def on_eval_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a batch of an evaluation."""

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a batch of an evaluation."""

    def on_predict_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a batch of a prediction."""

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a batch of a prediction."""


class CallbackList:
    """Several callbacks called in order, as one."""

    callbacks: list[Callback]

    def __init__(self, callbacks: Sequence[Callback] | None = None) -> None:
        self.callbacks = list(callbacks or ())
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"callbacks holds a {type(callback).__name__}; give instances of Callback")

    def append(self, callback: Callback) -> None:
        """Adds one at the end."""
        self.callbacks.append(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def bind(self, model: Any, params: dict[str, Any]) -> Self:
        """Hands every callback its Model and the settings of the run."""
        for callback in self.callbacks:
            callback.set_model(model)
            callback.set_params(params)
        return self

    def set_model(self, model: Any) -> None:
        """Callback.set_model on each."""
        for callback in self.callbacks:
            callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Callback.set_params on each."""
        for callback in self.callbacks:
            callback.set_params(params)

    def needs_logs(self, phase: str, step: int) -> bool:
        """Whether some callback reads the logs after this batch."""
        return any(callback.needs_logs(phase, step) for callback in self.callbacks)

    def on_begin(self, phase: str, logs: Logs | None = None) -> None:
        """on_train_begin, on_eval_begin or on_predict_begin of each."""
        self._call(phase, "begin", logs)

    def on_end(self, phase: str, logs: Logs | None = None) -> None:
        """on_train_end, on_eval_end or on_predict_end of each."""
        self._call(phase, "end", logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Callback.on_epoch_begin on each."""
        for callback in self.callbacks:
            callback.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Callback.on_epoch_end on each."""
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_batch_begin(self, phase: str, step: int, logs: Logs | None = None) -> None:
        """on_train_batch_begin and its like of each."""
        self._call(phase, "batch_begin", step, logs)

    def on_batch_end(self, phase: str, step: int, logs: Logs | None = None) -> None:
        """on_train_batch_end and its like of each."""
        self._call(phase, "batch_end", step, logs)

    def _call(self, phase: str, moment: str, *args: Any) -> None:
        if phase not in _PHASES:
            raise ConfigError(f"CallbackList: phase {phase!r}; give one of {', '.join(_PHASES)}")
        for callback in self.callbacks:
            getattr(callback, f"on_{phase}_{moment}")(*args)
