"""Steps: what Model does with one batch, as captured programs, or eagerly once a capture was refused."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from polyreme import amp
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, ShapeError, did_you_mean
from polyreme.jit.to_static import to_static

_log = logging.getLogger("polyreme.hapi")
_CAST_KEYS = ("custom_white_list", "custom_black_list", "dtype")
_SCALER_KEYS = (
    "init_loss_scaling",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)


@dataclass(frozen=True)
class Precision:
    """Mixed precision as prepare() was asked for it: level O0, O1 or O2, settings of auto_cast and of GradScaler (None
    where the loss is not scaled)."""

    level: str
    cast: dict[str, Any]
    scaler: dict[str, Any] | None

    @classmethod
    def of(cls, configs: str | dict[str, Any] | None) -> Precision:
        """From amp_configs: None, a level, or a dict. Raises ConfigError for a key or level that is not known."""
        given = {"level": configs} if isinstance(configs, str) else dict(configs or {"level": "O0"})
        level = given.pop("level", "O1")
        if given.pop("use_pure_fp16", False):
            level = "O2"
        if level not in ("O0", "O1", "O2"):
            raise ConfigError(f"prepare: amp level {level!r}; give 'O0', 'O1' or 'O2'")
        known = ("level", "use_pure_fp16", *_CAST_KEYS, *_SCALER_KEYS)
        for name in given:
            if name not in known:
                raise ConfigError(f"prepare: amp_configs has {name!r}{did_you_mean(name, known)}")
        return cls(
            level,
            {k: v for k, v in given.items() if k in _CAST_KEYS},
            {k: v for k, v in given.items() if k in _SCALER_KEYS},
        )

    def casting(self) -> AbstractContextManager:
        """The block in which ops are cast."""
        return nullcontext() if self.level == "O0" else amp.auto_cast(level=self.level, **self.cast)

    def decorate(self, network: Any, optimizer: Any) -> None:
        """Cast the network for level O2, its optimizer keeping float32 master weights."""
        amp.decorate(network, optimizer, level="O2", **{k: v for k, v in self.cast.items() if k == "dtype"})

    def make_scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return None if self.level == "O0" or self.scaler is None else amp.GradScaler(**self.scaler)


class Steps:
    """Train, evaluate and predict one batch with a network, a loss and an optimizer.

    The first call of each kind captures it as one program; if that is refused (the network reads values on the host),
    the reason is logged once and the kind runs eagerly from then on.
    """

    def __init__(self, network: Any, loss: Callable | None, optimizer: Any, precision: Precision) -> None:
        self.network, self.loss, self.optimizer, self.precision = network, loss, optimizer, precision
        self.scaler = precision.make_scaler()
        self._written: dict[str, Callable] = {
            "train": self._train,
            "evaluate": self._evaluate,
            "predict": self._predict,
        }
        self._captured = {name: to_static(fn) for name, fn in self._written.items()}

    @property
    def is_captured(self) -> dict[str, bool]:
        """For each kind of step, whether it runs captured."""
        return {name: name in self._captured for name in self._written}

    def captured(self, kind: str) -> Any:
        """The captured function of a kind of step ("train", "evaluate" or "predict"); None once it runs eagerly."""
        return self._captured.get(kind)

    def train(self, inputs: list[Tensor], labels: list[Tensor], update: bool, wants_outputs: bool) -> tuple:
        """Gradients of one batch, and with update the optimizer's step; -> outputs (none unless wanted), losses."""
        return self._run("train", inputs, labels, update, wants_outputs)

    def evaluate(self, inputs: list[Tensor], labels: list[Tensor], wants_outputs: bool) -> tuple:
        """-> outputs (none unless wanted), losses (none without a loss)."""
        return self._run("evaluate", inputs, labels, wants_outputs)

    def predict(self, inputs: list[Tensor]) -> list[Tensor]:
        """-> outputs."""
        return self._run("predict", inputs)

    def _run(self, kind: str, *args: Any) -> Any:
        captured = self._captured.get(kind)
        if captured is not None:
            try:
                return captured(*args)
            except CaptureError as error:
                del self._captured[kind]
                _log.warning("Model: the %s step runs eagerly, because it cannot be captured: %s", kind, error)
        return self._written[kind](*args)

    def _train(self, inputs: list, labels: list, update: bool, wants_outputs: bool) -> tuple[list, list]:
        with self.precision.casting():
            outputs = as_list(self.network(*inputs))
            losses = self._losses(outputs, labels)
        total = functools.reduce(operator.add, losses)
        if self.scaler is None:
            total.backward()
            if update:
                self.optimizer.step()
        else:
            self.scaler.scale(total).backward()
            if update:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        if update:
            self.optimizer.clear_grad()
        return _detached(outputs) if wants_outputs else [], _detached(losses)

    def _evaluate(self, inputs: list, labels: list, wants_outputs: bool) -> tuple[list, list]:
        with no_grad(), self.precision.casting():
            outputs = as_list(self.network(*inputs))
            losses = self._losses(outputs, labels)
        return outputs if wants_outputs else [], losses

    def _predict(self, inputs: list) -> list:
        with no_grad(), self.precision.casting():
            return as_list(self.network(*inputs))

    def _losses(self, outputs: list, labels: list) -> list[Tensor]:
        if self.loss is None:
            return []
        losses = as_list(self.loss(*outputs, *labels))
        for loss in losses:
            if loss.size != 1:
                raise ShapeError(f"Model: the loss has shape {loss.shape}; give one number a batch, such as its mean")
        return losses


def as_list(value: Any) -> list:
    """A list of one or several values; None gives an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach() for t in tensors]
