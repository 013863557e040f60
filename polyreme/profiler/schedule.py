"""The schedule of steps that a Profiler records."""

from __future__ import annotations

import enum
from collections.abc import Callable

from polyreme.errors import ConfigError


class ProfilerState(enum.Enum):
    """The action of a Profiler in a step: nothing, nothing yet (READY: recording comes next), record, and record the
    last step of several, after which on_trace_ready is called."""

    CLOSED = 0
    READY = 1
    RECORD = 2
    RECORD_AND_RETURN = 3


Scheduler = Callable[[int], ProfilerState]
"""The number of a step, from 0 -> what is done in it."""


def make_scheduler(*, closed: int, ready: int, record: int, repeat: int = 0, skip_first: int = 0) -> Scheduler:
    """After skip_first steps, `closed` steps of nothing, `ready` steps and `record` recorded ones, again and again, or
    `repeat` times. Raises ConfigError for negative numbers and no step to record.

    >>> scheduler = make_scheduler(closed=1, ready=1, record=2, repeat=1, skip_first=1)
    >>> [scheduler(step).name for step in range(6)]
    ['CLOSED', 'CLOSED', 'READY', 'RECORD', 'RECORD_AND_RETURN', 'CLOSED']
    """
    if min(closed, ready, repeat, skip_first) < 0 or record < 1:
        raise ConfigError(
            f"make_scheduler: closed={closed}, ready={ready}, record={record}, repeat={repeat}, "
            f"skip_first={skip_first}; give at least 1 step to record, and no negative numbers"
        )
    period = closed + ready + record

    def scheduler(step: int) -> ProfilerState:
        place = step - skip_first
        if place < 0 or (repeat and place >= repeat * period):
            return ProfilerState.CLOSED
        place %= period
        if place < closed:
            return ProfilerState.CLOSED
        if place < closed + ready:
            return ProfilerState.READY
        return ProfilerState.RECORD if place < period - 1 else ProfilerState.RECORD_AND_RETURN

    return scheduler


def scheduler_of(given: Scheduler | tuple[int, int] | None) -> Scheduler:
    """A Profiler's scheduler: a function as it is; (first, end), of which steps first to end - 1 are recorded; None for
    every step. Raises ConfigError for anything else."""
    if given is None:
        return lambda step: ProfilerState.RECORD
    if callable(given):
        return given
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and 0 <= given[0] < given[1]):
        raise ConfigError(
            f"Profiler: scheduler {given!r}; give (first, end) with 0 <= first < end, or make_scheduler()"
        )
    first, end = given
    ready = min(first, 1)
    return make_scheduler(closed=first - ready, ready=ready, record=end - first, repeat=1)
