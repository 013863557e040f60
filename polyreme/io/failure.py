"""Failures while reading data: carried from a worker to the parent, and worded there."""

import builtins
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyreme import errors
from polyreme.errors import DataError

_SHOWN = 16  # sample ids listed in a message


class WorkerTraceback(Exception):
    """The traceback of an exception that was raised in a worker process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True)
class WorkerFailure:
    """An exception in words; args only when all are plain values, so that it can be made again in the parent."""

    place: str
    kind: str
    text: str
    args: tuple[Any, ...] | None
    traceback: str

    @classmethod
    def of(cls, error: BaseException, place: str) -> "WorkerFailure":
        """The record of an exception; place says what was being done."""
        plain = all(isinstance(arg, (str, bytes, int, float, type(None))) for arg in error.args)
        lines = "".join(traceback.format_exception(error))
        return cls(place, type(error).__name__, str(error), error.args if plain else None, lines)

    def raised_by(self, worker: int, pid: int | None) -> DataError:
        """The DataError to raise in the parent, with the original exception as its cause where it can be made again."""
        error = DataError(f"DataLoader worker {worker} (pid {pid}) failed {self.place}: {self.kind}: {self.text}")
        where = WorkerTraceback(self.traceback)
        original = self._original()
        if original is not None:
            original.__cause__ = where
        error.__cause__ = original or where
        return error

    def _original(self) -> BaseException | None:
        found = getattr(builtins, self.kind, None) or getattr(errors, self.kind, None)
        if self.args is None or not isinstance(found, type) or not issubclass(found, Exception):
            return None
        try:
            return found(*self.args)
        except TypeError:  # UnicodeDecodeError and the like, whose args were not all kept
            return None


def doing(task: Any, position: int) -> str:
    """What a fetch at this position of a task is doing, with the sample ids.

    >>> doing([4, 9], 1)
    'reading sample 9 (batch of samples 4, 9)'
    """
    if isinstance(task, list):
        if position < 0:
            return f"collating samples {listed(task)}"
        return f"reading sample {task[position]} (batch of samples {listed(task)})"
    return "reading the stream" if task is None else f"reading {task} samples of the stream"


def listed(ids: Sequence[Any]) -> str:
    """The ids, comma separated, the first few only."""
    shown = ", ".join(str(i) for i in ids[:_SHOWN])
    return shown + (f", ... ({len(ids)} in all)" if len(ids) > _SHOWN else "")
