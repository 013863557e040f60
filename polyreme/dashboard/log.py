"""A run's metrics.jsonl, followed while it is written: curves by name, and what is no curve."""

from __future__ import annotations

import json
import math
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

CURVES = ("train", "validation")
"""Kinds of records whose numbers are curves; all others are events."""
_MARK = 256
"""Bytes before the place read to, which tell whether the file is still the one that was read."""
_AT_ONCE = 1 << 24
_MOST_EVENTS = 2000
_MOST_CURVES = 1000


class Curve:
    """Values over steps, as they were logged. A value that is not finite is NaN here, and a gap in a chart."""

    steps: array[float]
    values: array[float]

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")

    def add(self, step: float, value: float) -> None:
        """Append a value. A step that is not later than the last replaces what was from it on: a run that went back."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)

    @property
    def last(self) -> float | None:
        """The last value, None if it is not finite."""
        return self.values[-1] if math.isfinite(self.values[-1]) else None

    def sampled(self, most: int, first: float = -math.inf, last: float = math.inf) -> tuple[list[float], list[Any]]:
        """Steps and values between two steps, at most `most` of them, None for what is not finite.

        Of more, the least and the greatest of each of most/2 stretches of equal width stay, and both ends: no spike is
        lost.
        """
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        within = slice(*np.searchsorted(steps, [first, np.nextafter(last, math.inf)]))
        steps, values = steps[within], values[within]
        places = np.arange(len(steps)) if len(steps) <= most else _extremes(steps, values, max(1, most // 2 - 1))
        return steps[places].tolist(), [v if math.isfinite(v) else None for v in values[places].tolist()]


def _extremes(steps: np.ndarray, values: np.ndarray, stretches: int) -> np.ndarray:
    edges = np.linspace(steps[0], steps[-1], stretches + 1)[1:-1]
    starts = np.unique(np.concatenate([[0], np.searchsorted(steps, edges)]))
    starts = starts[starts < len(steps)]
    number = np.repeat(np.arange(len(starts)), np.diff([*starts, len(steps)]))
    is_finite = np.isfinite(values)
    # sorted by stretch, then by value: the first and the last of each stretch are its least and its greatest
    low = np.lexsort((np.where(is_finite, values, math.inf), number))
    high = np.lexsort((np.where(is_finite, values, -math.inf), number))
    ends = np.append(starts[1:], len(steps)) - 1
    return np.unique(np.concatenate([[0, len(steps) - 1], low[starts], high[ends]]))


class FollowedLog:
    """The records of a log file that another process writes.

    A torn last line waits for its rest, a line that is no record is counted in `num_bad` and left out, and a file that
    was cut or begun anew, as a resumed or restarted run does, is read again from its start. A file that is not there
    has no records.
    """

    num_bad: int
    num_events: int

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.events: list[dict[str, Any]] = []
        self.num_bad = self.num_events = 0
        self.last_step: float | None = None
        self._offset, self._mark = 0, b""
        self._identity: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read what is new; True if there was any. Raises nothing for files that vanish or may not be read."""
        try:
            with _opened(self.path) as file:
                return self._read(file)
        except OSError:
            is_new = self._offset > 0
            self._forget()
            return is_new

    def _read(self, file: Any) -> bool:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        is_other = self._identity not in (None, identity) or status.st_size < self._offset
        if not is_other and self._mark:
            file.seek(self._offset - len(self._mark))
            is_other = file.read(len(self._mark)) != self._mark
        if is_other:
            self._forget()
        self._identity = identity
        file.seek(self._offset)
        is_new = is_other
        while data := file.read(_AT_ONCE):
            whole, newline, _ = data.rpartition(b"\n")
            if not newline:  # torn, or a line longer than is read at once, which is no record of ours
                if len(data) == _AT_ONCE:
                    self._take_bytes(data)
                    continue
                break
            for line in whole.split(b"\n"):
                self._take(line)
            self._take_bytes(whole + newline)
            file.seek(self._offset)
            is_new = True
        return is_new

    def _take_bytes(self, data: bytes) -> None:
        self._offset += len(data)
        self._mark = (self._mark + data)[-_MARK:]

    def _take(self, line: bytes) -> None:
        record = _parsed(line)
        if record is None:
            self.num_bad += bool(line.strip())
            return
        kind, step = record["kind"], record["step"]
        if kind not in CURVES:
            self.num_events += 1
            self.events.append(record)
            del self.events[:-_MOST_EVENTS]
            return
        self.last_step = step
        for name, value in _numbers(record):
            if f"{kind}/{name}" in self.curves or len(self.curves) < _MOST_CURVES:
                self.curves.setdefault(f"{kind}/{name}", Curve()).add(step, value)


def parsed_json(text: bytes) -> Any:
    """JSON of whoever wrote it. Raises ValueError for what is none, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _opened(path: Path) -> BinaryIO:
    """A file to read; an OSError for a pipe or device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no file")
    return os.fdopen(descriptor, "rb")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, which has a kind and a step; None for any other line."""
    try:
        record = parsed_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    return record if _is_number(step) and math.isfinite(step) else None


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in ("kind", "step"):
            continue
        if _is_number(value):
            yield name, float(value)
        elif value in ("nan", "inf", "-inf") or (isinstance(value, float) and not math.isfinite(value)):
            # as JsonlLog writes what JSON has no number for, and as Python's json does
            yield name, math.nan


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
