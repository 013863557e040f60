"""Steps: what Model does with one batch, as captured programs, or eagerly once a capture was refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, DataError, ShapeError, did_you_mean
from polyreme.jit.to_static import to_static
from polyreme.training import Microbatch, MixedPrecision, StepPolicy, TrainingStep

Parts = list[tuple[list[Tensor], list]]
"""Of each microbatch, its losses and its outputs."""
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


def precision_of(configs: str | dict[str, Any] | None) -> MixedPrecision:
    """Mixed precision from amp_configs: None, a level, or a dict. Raises ConfigError for an unknown key or level."""
    settings = {"level": configs} if isinstance(configs, str) else dict(configs or {"level": "O0"})
    level = settings.pop("level", "O1")
    if settings.pop("use_pure_fp16", False):
        level = "O2"
    if level not in ("O0", "O1", "O2"):
        raise ConfigError(f"prepare: amp level {level!r}; give 'O0', 'O1' or 'O2'")
    known = ("level", "use_pure_fp16", *_CAST_KEYS, *_SCALER_KEYS)
    for name in settings:
        if name not in known:
            raise ConfigError(f"prepare: amp_configs has {name!r}{did_you_mean(name, known)}")
    cast: dict[str, Any] = {k: v for k, v in settings.items() if k in _CAST_KEYS}
    return MixedPrecision(level, **cast, scaler={k: v for k, v in settings.items() if k in _SCALER_KEYS})


class Steps:
    """Train, evaluate and predict one batch with a network, a loss and an optimizer.

    A batch comes in microbatches, of which inputs and labels are sequences of Tensors, the arguments of network and
    loss. One that is one piece trains as the loop does that a user would write, random numbers included. The first call
    of each kind captures it as one program; if that is refused (the network reads values on the host), the reason is
    logged once and the kind runs eagerly from then on.
    """

    loss: Callable[..., Any] | None

    network: Any
    non_finite: str
    step: TrainingStep

    def __init__(
        self,
        network: Any,
        loss: Callable[..., Any] | None,
        optimizer: Any,
        precision: MixedPrecision,
        non_finite: str = "apply",
    ) -> None:
        self.network, self.loss, self.non_finite = network, loss, non_finite
        self.skipped: Tensor | None = None
        """Of the last update, bool: whether it was left out; None if nobody looked."""
        policy = StepPolicy(precision, non_finite, accumulates=False)
        self.step = TrainingStep(self._forward, optimizer, policy, output=self._outputs)
        self._written: dict[str, Callable] = {
            "train": self._train,
            "evaluate": self._evaluate,
            "predict": self._predict,
        }
        self._captured = {name: to_static(fn) for name, fn in self._written.items()}

    @property
    def scaler(self) -> Any:
        """The loss scaler, None where the loss is not scaled."""
        return self.step.scaler

    @property
    def is_captured(self) -> dict[str, bool]:
        """For each kind of step, whether it runs captured."""
        return {name: name in self._captured for name in self._written}

    def captured(self, kind: str) -> Any:
        """The captured function of a kind of step ("train", "evaluate" or "predict"); None once it runs eagerly."""
        return self._captured.get(kind)

    def train(self, batch: list[Microbatch], update: bool, wants_outputs: bool) -> Parts:
        """Gradients of one batch, and with update the optimizer's step; -> losses, outputs (none unless wanted)."""
        parts, self.skipped = self._run("train", batch, update, wants_outputs)
        return parts

    def evaluate(self, batch: list[Microbatch], wants_outputs: bool) -> Parts:
        """-> losses (none without a loss), outputs (none unless wanted)."""
        return self._run("evaluate", batch, wants_outputs)

    def predict(self, batch: list[Microbatch]) -> Parts:
        """-> no losses, outputs; labels are not looked at."""
        return self._run("predict", batch)

    def _run(self, kind: str, *args: Any) -> Any:
        captured = self._captured.get(kind)
        if captured is not None:
            try:
                return captured(*args)
            except CaptureError as error:
                del self._captured[kind]
                _log.warning("Model: the %s step runs eagerly, because it cannot be captured: %s", kind, error)
        return self._written[kind](*args)

    def _train(self, batch: list[Microbatch], update: bool, wants_outputs: bool) -> tuple[Parts, Tensor | None]:
        loss, parts = self.step.gradients(batch)
        skipped = self.step.update(loss).get("skipped") if update else None
        kept = [(losses, [out.detach() for out in outputs] if wants_outputs else []) for losses, outputs in parts]
        return kept, skipped

    def _forward(self, inputs: list, labels: list) -> tuple[list[Tensor], list]:
        """-> losses, outputs."""
        outputs = self._outputs(inputs)
        return self._losses(outputs, labels), outputs

    def _outputs(self, inputs: list) -> list:
        return as_list(self.network(*inputs))

    def _evaluate(self, batch: list[Microbatch], wants_outputs: bool) -> Parts:
        return [(losses, outputs or []) for losses, outputs in self.step.evaluate(batch, outputs=wants_outputs)]

    def _predict(self, batch: list[Microbatch]) -> Parts:
        return self.step.evaluate(batch, losses=False, outputs=True)

    def _losses(self, outputs: list, labels: list) -> list[Tensor]:
        if self.loss is None:
            return []
        try:
            losses = as_list(self.loss(*outputs, *labels))
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            raise DataError(
                f"Model: the loss is called with {len(outputs)} outputs of the network and {len(labels)} labels, which "
                f"are not the arguments that {_name(self.loss)} takes; a sample of the data is (inputs..., labels...), "
                "such as (image, label), and Model(network, inputs, labels) says which is which"
            ) from error
        for loss in losses:
            if loss.size != 1:
                raise ShapeError(
                    f"Model: the loss has shape {list(loss.shape)}; give one number a batch, such as its mean"
                )
        return losses


def _name(loss: Callable[..., Any]) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def as_list(value: Any) -> list[Any]:
    """A list of one or several values; None gives an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
