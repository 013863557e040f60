"""One pass over a DataLoader: where its batches come from, and where it stands."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from polyreme.errors import DataError
from polyreme.io.failure import WorkerFailure, doing
from polyreme.io.fetch import EMPTY, END, Fetcher, LeftOut, fetch_whole
from polyreme.io.pool import WorkerPool
from polyreme.io.worker import BatchRequest

Convert = Callable[[Any], Any]


@dataclass
class Position:
    """The next batch to deliver."""

    epoch: int
    batches: int


@dataclass
class ReaderTime:
    """Seconds that this process has waited for batches of its loaders."""

    seconds: float = 0.0


waiting: ReaderTime = ReaderTime()


class Source(Protocol):
    """Gives batches of Tensors; take raises StopIteration after the last one."""

    def take(self) -> Any: ...
    def ready(self) -> bool: ...
    def close(self) -> None: ...


class Epoch:
    """An iterator over the batches of a source; up to `room` that have arrived are taken ahead.

    empty makes the error for a pass that gave nothing at all.
    """

    def __init__(self, source: Source, position: Position, room: int, empty: Callable[[], DataError]) -> None:
        self.position = position
        self.finished = False
        self._source = source
        self._room = room
        self._empty = empty
        self._ended: str | None = None
        self._ahead: deque[Any] = deque()  # batches, or the exception in the place of one

    def __iter__(self) -> "Epoch":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise DataError(f"this iteration over the DataLoader has ended: {self._ended}; start a new one")
        if self.finished:
            raise StopIteration
        began = time.perf_counter()
        try:
            batch = self._ahead.popleft() if self._ahead else self._source.take()
            if isinstance(batch, BaseException):
                raise batch
        except StopIteration:
            self._finish()
            raise
        except BaseException as error:
            self.close(f"it failed with {type(error).__name__}")
            raise
        finally:
            waiting.seconds += time.perf_counter() - began
        self.position.batches += 1
        self._read_ahead()
        return batch

    def close(self, reason: str) -> None:
        """End this pass before its end; asking it for more is an error that gives the reason."""
        if not self.finished:
            self._ended = reason
        self._ahead.clear()
        self._source.close()

    def _finish(self) -> None:
        self.finished: bool = True
        self._source.close()
        if self.position.batches == 0:
            raise self._empty() from None

    def _read_ahead(self) -> None:
        while len(self._ahead) < self._room and self._source.ready():
            try:
                self._ahead.append(self._source.take())
            except (DataError, StopIteration) as stop:  # raised when its turn comes
                self._ahead.append(stop)
                return


class InProcess:
    """Reads each batch when it is asked for."""

    def __init__(self, fetcher: Fetcher, tasks: Iterator[BatchRequest], convert: Convert, left_out: LeftOut) -> None:
        self._fetcher, self._left_out = fetcher, left_out
        self._tasks = tasks
        self._convert = convert

    def take(self) -> Any:
        """Read, collate and convert the next batch."""
        for task in self._tasks:
            try:
                batch = fetch_whole(self._fetcher, task.content, task.skip)
            except Exception as error:
                failure = WorkerFailure.of(error, doing(task.content, self._fetcher.position))
                raise DataError(f"DataLoader failed {failure.place}: {failure.kind}: {failure.text}") from error
            if batch is END:
                break
            self._left_out.note(self._fetcher.take_left_out())
            if not task.skip and batch is not EMPTY:
                return self._convert(batch)
        raise StopIteration

    def ready(self) -> bool:
        """Never: what is not asked for is not read."""
        return False

    def close(self) -> None:
        """Give nothing more."""
        self._tasks = iter(())


class InWorkers:
    """Takes batches from worker processes, which are already reading."""

    def __init__(self, pool: WorkerPool, convert: Convert, keep: bool) -> None:
        self._pool = pool
        self._convert = convert
        self._keep = keep

    def take(self) -> Any:
        """Wait for the next batch and convert it."""
        return self._pool.take(self._convert)

    def ready(self) -> bool:
        """Whether take would not wait."""
        return not self._pool.closed and self._pool.ready()

    def close(self) -> None:
        """Let the workers go, unless they are kept for the next epoch."""
        if not self._keep:
            self._pool.close()
