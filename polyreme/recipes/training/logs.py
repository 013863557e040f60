"""Logs of a run: metrics.jsonl, which the others are made from, TensorBoard files, and a picture of the loss.

tensorboardX and matplotlib come with the extra polyreme[logs] and are imported when asked for.
"""

import contextlib
import errno
import importlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from polyreme import faults
from polyreme.errors import ConfigError
from polyreme.recipes.config import LogConfig

_SMOOTHING_SHARE = 50  # the smoothed curve averages a fiftieth of what is drawn on either side


class JsonlLog:
    """One JSON object a line, whole lines only, steps never repeated.

    resume_step None starts anew: a log already there is kept as metrics.1.jsonl, metrics.2.jsonl and so on. A number
    keeps the records of steps up to it and drops what a killed run wrote after, its torn last line included.

    >>> import tempfile
    >>> with JsonlLog(Path(tempfile.mkdtemp()) / "metrics.jsonl") as log:
    ...     log.write({"kind": "train", "step": 1, "loss": 2.5})
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        if path.exists():
            if resume_step is None:
                os.rename(path, _free_name(path))
            else:
                _cut_after(path, resume_step)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, whole or not at all; NaN and infinity become strings, as JSON has no such numbers.

        Raises OSError if it cannot be written; the next one may be.
        """
        line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False).encode() + b"\n"
        faults.point("log.write")
        written = self._file.write(line)
        if written != len(line):
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - (written or 0))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class LogWarning(UserWarning):
    """A part of a run's log could not be written; the run goes on."""


class RunLog:
    """Everything a run reports, sent to each place the configuration asks for.

    A place that cannot be written any more (a full disk) is told of once, by a LogWarning, and the run goes on: what it
    trains is worth more than what it says; metrics.jsonl is tried again with each record. Raises ConfigError before the
    run starts if a place needs a package that is not installed.
    """

    folder: Path
    config: LogConfig

    def __init__(self, folder: Path, config: LogConfig, *, title: str, tokens_per_step: int, resume_step: int | None):
        self.folder, self.config = folder, config
        self._title, self._tokens_per_step = title, tokens_per_step
        if config.plot and not config.jsonl:
            raise ConfigError("log.plot=true needs log.jsonl=true: the picture is drawn from metrics.jsonl")
        if config.plot:
            optional("matplotlib", "log.plot")
        if config.tensorboard:
            optional("tensorboardX", "log.tensorboard")
        self._jsonl = JsonlLog(folder / "metrics.jsonl", resume_step) if config.jsonl else None
        self._lost = 0
        purge = None if resume_step is None else resume_step + 1
        self._board = _EventFile(folder / "tensorboard", purge) if config.tensorboard else None

    def train(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the readings of a training step (Reading.as_dict())."""
        self._record("train", step, values)

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """Record a measurement on the validation split, such as {"loss": 3.1}."""
        self._record("validation", step, values)

    def event(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Record something that is not a curve: the configuration at the start, a text sample, a resume."""
        self._write_record({"kind": kind, "step": step} | dict(values))
        self._write_board(step, {f"{kind}/{name}": str(value) for name, value in values.items()})

    def close(self) -> Path | None:
        """Write out what is buffered and draw the picture; returns its path, or None if there is none."""
        if self._board:
            self._board.close()
        if self._jsonl:
            self._jsonl.__exit__()
        self._board, lost, self._lost = None, self._lost, 0
        if lost:
            warnings.warn(f"{lost} records of metrics.jsonl were not written", LogWarning, stacklevel=2)
        if not self.config.plot:
            return None
        source, picture = self.folder / "metrics.jsonl", self.folder / "loss.png"
        try:
            return plot_loss(source, picture, self._title, tokens_per_step=self._tokens_per_step)
        except OSError as error:
            warnings.warn(f"{picture} was not drawn: {error}", LogWarning, stacklevel=2)
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._write_record({"kind": kind} | dict(values) | {"step": step})
        numbers = {n: float(v) for n, v in values.items() if n != "step" and isinstance(v, int | float | np.number)}
        self._write_board(step, {f"{kind}/{name}": value for name, value in numbers.items()})

    def _write_record(self, record: Mapping[str, Any]) -> None:
        if self._jsonl is None:
            return
        try:
            self._jsonl.write(record)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                warnings.warn(
                    f"{self._jsonl.path}: a record cannot be written ({error.strerror or error}); the run goes on "
                    "without it, and tries again with the next: make room on the disk",
                    LogWarning,
                    stacklevel=4,
                )

    def _write_board(self, step: int, values: Mapping[str, float | str]) -> None:
        if self._board is None:
            return
        try:
            self._board.write(step, values)
        except OSError as error:
            self._board.close()
            self._board = None  # half a record may be in its file, behind which nothing could be read
            warnings.warn(
                f"{self.folder / 'tensorboard'}: cannot be written ({error.strerror or error}); the run goes on "
                "without it, everything is in metrics.jsonl",
                LogWarning,
                stacklevel=4,
            )


class _EventFile:
    """TensorBoard's events, written as they come: SummaryWriter's thread dies of a full disk, and its caller waits.

    first_step: events of an earlier run from this step on are not shown.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._summary = importlib.import_module("tensorboardX.summary")
        self._protocol = importlib.import_module("tensorboardX.proto.event_pb2")
        events = importlib.import_module("tensorboardX.event_file_writer")
        self._file = events.EventsWriter(str(folder / "events"))
        if first_step is not None:
            start = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
            self._file.write_event(self._protocol.Event(step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write numbers and texts of a step by their tags. Raises OSError."""
        for tag, value in values.items():
            make = self._summary.text if isinstance(value, str) else self._summary.scalar
            event = self._protocol.Event(step=step, wall_time=time.time(), summary=make(tag, value))
            self._file.write_event(event)
        self._file.flush()

    def close(self) -> None:
        """Close the file, to which every record has been written or has failed to be."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log, up to the first line that is not whole."""
    for _, record in _records(path):
        yield record


def plot_loss(jsonl: Path, png: Path, title: str, *, tokens_per_step: int) -> Path | None:
    """Draw training and validation loss over steps from a log; returns png, or None if the log has no finite loss."""
    figure_module = optional("matplotlib.figure", "log.plot")
    curves: dict[str, list[tuple[int, float]]] = {"train": [], "validation": []}
    for record in read_jsonl(jsonl):
        if record.get("kind") in curves and isinstance(record.get("loss"), int | float):
            curves[record["kind"]].append((record["step"], record["loss"]))
    if not curves["train"]:
        return None
    figure = figure_module.Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_train(axes, *zip(*curves["train"], strict=True))
    if curves["validation"]:
        _draw_validation(axes, *zip(*curves["validation"], strict=True))
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"optimizer step ({tokens_per_step:,} tokens each)")
    axes.set_ylabel("cross-entropy loss (nats per token)")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.margins(x=0.02)
    temporary = png.with_name(f".{png.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, png)
    return png


def smooth(values: Sequence[float], reach: int) -> np.ndarray:
    """Mean of each value and up to `reach` neighbours on either side, as many on one side as on the other.

    Centred, so that the curve does not trail behind a falling loss as an exponential average would.

    >>> smooth([5.0, 3.0, 4.0], reach=1).tolist()
    [5.0, 4.0, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach_here = np.minimum(reach, np.minimum(index, index[::-1]))
    return (sums[index + reach_here + 1] - sums[index - reach_here]) / (2 * reach_here + 1)


def optional(module: str, setting: str) -> ModuleType:
    """Import a package of the extra polyreme[logs]; raises ConfigError naming the setting and the remedy."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting}=true needs {error.name}, which is not installed: pip install polyreme[logs], "
            f"or set {setting}=false"
        ) from None


def _draw_train(axes: Any, steps: tuple[int, ...], losses: tuple[float, ...]) -> None:
    reach = len(losses) // _SMOOTHING_SHARE
    if reach == 0:
        axes.plot(steps, losses, color="tab:blue", linewidth=1.8, label=f"train (last {losses[-1]:.3f})")
        return
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label=f"train (last {losses[-1]:.3f})")
    axes.plot(steps, smooth(losses, reach), color="tab:blue", linewidth=1.8, label="train, smoothed")


def _draw_validation(axes: Any, steps: tuple[int, ...], losses: tuple[float, ...]) -> None:
    label = f"validation (last {losses[-1]:.3f})"
    axes.plot(steps, losses, color="tab:orange", marker="o", markersize=4, linewidth=1.4, label=label)


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records with the byte offset each starts at; ends at the first line that is not a whole JSON object."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                return
            yield offset, record
            offset += len(line)


def _cut_after(path: Path, step: int) -> None:
    """Cut the file before the first record of a later step, or before a torn line."""
    end = 0
    with path.open("rb+") as file:
        for offset, record in _records(path):
            if record.get("step", 0) > step:
                break
            file.seek(offset)
            end = offset + len(file.readline())
        file.truncate(end)


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return name
