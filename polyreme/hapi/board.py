"""A run's losses and metrics for a board: files for TensorBoard and VisualDL, Weights & Biases.

The only file that imports tensorboardX, visualdl and wandb, which are optional.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np

from polyreme import flags
from polyreme.errors import ConfigError
from polyreme.hapi.callback import Callback, Logs


class _Board(Callback):
    """Writes train/NAME after every training batch (x: batches) and eval/NAME after every evaluation (x: epochs)."""

    def __init__(self) -> None:
        super().__init__()
        self._batches = 0
        self._epoch = 0

    def write(self, phase: str, values: dict[str, float], at: int) -> None:
        """Write numbers at a step of the phase's axis; those of an evaluation are flushed, to be seen at once."""
        raise NotImplementedError

    def close(self) -> None:
        """The training has ended."""
        raise NotImplementedError

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        self._batches += 1
        self._write("train", logs or {}, self._batches)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        self._write("eval", logs or {}, self._epoch + 1)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.close()

    def _write(self, phase: str, logs: Logs, at: int) -> None:
        kept = {n: v for n, v in logs.items() if n not in ("step", "batch_size")}
        self.write(phase, {f"{phase}/{n}": float(np.asarray(v).reshape(-1)[0]) for n, v in kept.items()}, at)


class _FileBoard(_Board):
    """A board that writes files into a folder, through a package's writer.

    writer_of: the package, the class in it, and how the package is installed.
    """

    writer_of: ClassVar[tuple[str, str, str]]

    def __init__(self, log_dir: str) -> None:
        super().__init__()
        package, name, install = self.writer_of
        try:
            self._writer_class = getattr(importlib.import_module(package), name)
        except ImportError as error:
            raise ConfigError(f"{type(self).__name__}: {error}; {install}") from error
        self.log_dir = log_dir
        self._writer: Any = None

    def write(self, phase: str, values: dict[str, float], at: int) -> None:
        if self._writer is None:
            self._writer = self._writer_class(self.log_dir)
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)
        if phase == "eval":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class TensorBoard(_FileBoard):
    """Writes train/NAME after every training batch (x: batches) and eval/NAME after every evaluation (x: epochs).

    Needs tensorboardX (`pip install polyreme[logs]`); raises ConfigError where it is missing.
    """

    writer_of: ClassVar[tuple[str, str, str]] = (
        "tensorboardX",
        "SummaryWriter",
        "pip install 'polyreme[logs]'",
    )


class VisualDL(_FileBoard):
    """Writes what TensorBoard does, as VisualDL's log files, through its own package.

    Needs visualdl (`pip install visualdl`); raises ConfigError where it is missing.
    """

    writer_of: ClassVar[tuple[str, str, str]] = (
        "visualdl",
        "LogWriter",
        "pip install visualdl, or use callbacks.TensorBoard(log_dir)",
    )


class WandbCallback(_Board):
    """Logs train/NAME after every training batch and eval/NAME after every evaluation to Weights & Biases, from rank 0.

    The x axes are train/batch and eval/epoch. Arguments are those of wandb.init, others by name too; a run that is
    active already is used, and left open. Needs wandb (`pip install wandb`); raises ConfigError where it is missing.
    """

    settings: dict[str, Any]

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        dir: str | None = None,
        mode: str | None = None,
        job_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(f"WandbCallback: {error}; pip install wandb") from error
        own = {"project": project, "entity": entity, "name": name, "dir": dir, "mode": mode, "job_type": job_type}
        self.settings = {k: v for k, v in own.items() if v is not None} | kwargs
        self._is_ours = False
        self._run: Any = None

    @property
    def run(self) -> Any:
        """The run of Weights & Biases that is logged to, started when first asked for."""
        if self._run is None:
            self._is_ours = self._wandb.run is None
            self._run = self._wandb.init(**self.settings) if self._is_ours else self._wandb.run
            for phase, axis in (("train", "train/batch"), ("eval", "eval/epoch")):
                self._run.define_metric(axis)
                self._run.define_metric(f"{phase}/*", step_metric=axis)
        return self._run

    def write(self, phase: str, values: dict[str, float], at: int) -> None:
        if flags.trainer_id() == 0:
            self.run.log({**values, "train/batch" if phase == "train" else "eval/epoch": at})

    def close(self) -> None:
        if self._run is not None and self._is_ours:
            self._run.finish()
        self._run = None
