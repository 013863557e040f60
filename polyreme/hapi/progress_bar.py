"""ProgBarLogger: how far a run of Model is, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.errors import ConfigError
from polyreme.hapi.callback import Callback, Logs


class ProgBarLogger(Callback):
    """Prints loss, metrics and ms/step every log_freq batches.

    verbose: 0 nothing, 1 a live bar where output is a terminal (lines elsewhere), 2 lines. file: where to, standard
    output by default.
    """

    log_freq: int

    def __init__(self, log_freq: int = 1, verbose: int = 2, file: TextIO | None = None) -> None:
        super().__init__()
        if isinstance(log_freq, bool) or not isinstance(log_freq, int) or log_freq < 1:
            raise ConfigError(f"ProgBarLogger: log_freq={log_freq!r}; give a whole number of batches, at least 1")
        if verbose not in (0, 1, 2):
            raise ConfigError(f"ProgBarLogger: verbose={verbose!r}; give 0 (nothing), 1 (a bar) or 2 (lines)")
        self.log_freq, self.verbose, self._file = log_freq, verbose, file
        self._live: Live | None = None
        self._steps: int | None = None
        self._start = 0.0
        self._samples = 0

    def needs_logs(self, phase: str, step: int) -> bool:
        return self.verbose > 0 and phase != "predict" and self._is_due(step)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._note(f"Epoch {epoch + 1}/{self.params.get('epochs')}")
        self._open(self.params.get("steps"))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.close()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.close()

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        self._note("Evaluation")
        self._open((logs or {}).get("steps"))

    def on_eval_end(self, logs: Logs | None = None) -> None:
        self.close()
        parts = [f"{self._samples} samples", *_values(logs or {})]
        self._note(f"Evaluation: {' - '.join(parts)}")

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._note("Prediction")
        self._open((logs or {}).get("steps"))

    def on_predict_end(self, logs: Logs | None = None) -> None:
        self.close()
        self._note(f"Prediction: {self._samples} samples")

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        self._show(step, logs or {})

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        self._show(step, logs or {})

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        self._show(step, {k: v for k, v in (logs or {}).items() if k == "batch_size"})

    def _is_due(self, step: int) -> bool:
        return (step + 1) % self.log_freq == 0 or step + 1 == self._steps

    def _open(self, steps: int | None) -> None:
        self._steps, self._samples, self._start = steps, 0, time.monotonic()
        if self.verbose != 1:
            return
        file = self._file or sys.stdout
        console = Console(file=file, highlight=False)
        # FORCE_COLOR, which notebooks set, asks for colours, not for a cursor that moves
        if console.is_terminal and file.isatty():
            self._live = Live(console=console, refresh_per_second=8)
            self._live.start()

    def close(self) -> None:
        """Takes the live bar off the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, step: int, logs: Logs) -> None:
        self._samples += logs.get("batch_size", 0)
        if self.verbose == 0 or not self._is_due(step):
            return
        text = " - ".join([f"step {step + 1}/{self._steps or '?'}", *_values(logs), self._pace(step)])
        if self._live is None:
            self._note(text)
        else:
            self._live.update(self._picture(step, text))

    def _pace(self, step: int) -> str:
        seconds = (time.monotonic() - self._start) / (step + 1)
        return f"{seconds * 1e3:.1f} ms/step"

    def _picture(self, step: int, text: str) -> Any:
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=self._steps or step + 1, completed=step + 1, width=30), Text(text))
        return row

    def _note(self, text: str) -> None:
        if self.verbose:
            print(text, file=self._file or sys.stdout, flush=True)


def _values(logs: Logs) -> list[str]:
    parts = []
    for name, value in logs.items():
        if name in ("step", "batch_size"):
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        parts.append(f"{name}: {' '.join(f'{v:.4f}' for v in numbers)}")
    return parts
