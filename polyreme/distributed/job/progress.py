"""Progress of this rank: its step, the phase of each thread, and the number of collectives it has entered.

Kept by threads that work and read by the watchdog's; nothing here takes a lock or does I/O.
"""

import threading
import time
from typing import Any, Self

WORLD = "world"


class Phase:
    """A context in which this thread does one thing; made by watchdog.phase."""

    detail: object
    group: str | None
    name: str
    ranks: tuple[int, ...] | None
    timeout: float | None

    __slots__ = ("_lane", "_progress", "detail", "group", "name", "number", "ranks", "timeout")

    def __init__(
        self,
        progress: "Progress",
        name: str,
        group: str | None,
        ranks: tuple[int, ...] | None,
        detail: object,
        timeout: float | None,
    ) -> None:
        self._progress, self.name, self.detail, self.group = progress, name, detail, group
        self.ranks, self.timeout = ranks, timeout
        self.number: int | None = None

    def __enter__(self) -> Self:
        progress = self._progress
        if self.group is not None:
            self.number = progress.counts[self.group] = progress.counts.get(self.group, 0) + 1
        self._lane = progress.lane()
        self._lane.phases.append(self)
        self._lane.broken = None
        self._lane.changed = time.monotonic()
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        lane = self._lane
        lane.phases.remove(self)
        lane.changed = time.monotonic()
        if error is not None and lane.broken is None:
            lane.broken = self


class _Lane:
    """The phases of one thread, outermost first, and the time of the last change.

    broken is the innermost phase that an exception is coming out of: a collective fails when its peer is gone, and who
    asks then wants to know that it was in the collective. The next phase or step forgets it.
    """

    __slots__ = ("broken", "changed", "is_stepping", "phases")

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.changed = time.monotonic()
        self.is_stepping = False
        self.broken: Phase | None = None

    def is_busy(self) -> bool:
        return bool(self.phases) or self.is_stepping


class Progress:
    """Step, phases and collectives of this process."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.step: int | None = None
        self.batch: object = None
        self.counts: dict[str, int] = {}
        self.is_leaving = False
        self._lanes: dict[int, _Lane] = {}

    def lane(self) -> _Lane:
        """The lane of the calling thread."""
        ident = threading.get_ident()
        lane = self._lanes.get(ident)
        return self._lanes.setdefault(ident, _Lane()) if lane is None else lane

    def begin_step(self, step: int, batch: object) -> None:
        """This thread begins a step."""
        lane = self.lane()
        self.step, self.batch = step, batch
        lane.is_stepping = True
        lane.broken = None
        lane.changed = time.monotonic()

    def end_steps(self) -> None:
        """This thread takes no step for now: what it does outside phases has no time limit."""
        self.lane().is_stepping = False

    def overdue(self) -> bool:
        """Whether a thread has been in the same place for longer than it may."""
        return self._overdue_lane() is not None

    def status(self) -> dict[str, Any]:
        """The status for the monitor: of the overdue thread, else the main thread, else the one that changed last."""
        lane = self._overdue_lane() or self._lanes.get(threading.main_thread().ident or 0)
        if lane is None or not lane.is_busy():
            busy = [found for found in list(self._lanes.values()) if found.is_busy()]
            lane = max(busy, key=lambda found: found.changed, default=lane)
        status: dict[str, Any] = {
            "step": self.step,
            "batch": None if self.batch is None else str(self.batch)[:200],
            "counts": dict(self.counts),
            "leaving": self.is_leaving,
        }
        if lane is None:
            return status
        status["age"] = round(time.monotonic() - lane.changed, 3)
        phase = _innermost(lane) or lane.broken
        if phase is not None:
            detail = None if phase.detail is None else str(phase.detail)[:200]
            ranks = None if phase.ranks is None else list(phase.ranks)
            status |= {"phase": phase.name, "detail": detail, "group": phase.group, "number": phase.number}
            status["ranks"] = ranks
        return status

    def _overdue_lane(self) -> _Lane | None:
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            phase = _innermost(lane)
            limit = self.timeout if phase is None or phase.timeout is None else phase.timeout
            if lane.is_busy() and now - lane.changed > limit:
                return lane
        return None


def _innermost(lane: _Lane) -> Phase | None:
    try:
        return lane.phases[-1]
    except IndexError:  # the thread left it between two looks
        return None
