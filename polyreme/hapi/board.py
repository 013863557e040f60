"""TensorBoard: a run's losses and metrics as event files; VisualDL is refused.

Floor: 5.  The only file that imports tensorboardX, which is optional.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.hapi.callback import Callback, Logs


class TensorBoard(Callback):
    """Writes train/NAME after every training batch (x: batches) and eval/NAME after every evaluation (x: epochs).

    Needs tensorboardX (`pip install polyreme[logs]`); raises ConfigError where it is missing.
    """

    def __init__(self, log_dir: str) -> None:
        super().__init__()
        try:
            writer = importlib.import_module("tensorboardX").SummaryWriter
        except ImportError as error:
            raise ConfigError(f"TensorBoard: {error}; pip install 'polyreme[logs]'") from error
        self.log_dir, self._writer_class = log_dir, writer
        self._writer: Any = None
        self._batches = 0
        self._epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        self._batches += 1
        self._write("train", logs or {}, self._batches)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        self._write("eval", logs or {}, self._epoch + 1)
        self._writer.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, phase: str, logs: Logs, at: int) -> None:
        if self._writer is None:
            self._writer = self._writer_class(self.log_dir)
        for name, value in logs.items():
            if name not in ("step", "batch_size"):
                self._writer.add_scalar(f"{phase}/{name}", float(np.asarray(value).reshape(-1)[0]), at)


class VisualDL(Callback):
    """Refused: VisualDL's log files are not written here; TensorBoard's are."""

    def __init__(self, log_dir: str) -> None:
        raise ConfigError(
            f"VisualDL(log_dir={log_dir!r}): VisualDL's log files are not written here; "
            "use callbacks.TensorBoard(log_dir), whose event files TensorBoard shows"
        )
