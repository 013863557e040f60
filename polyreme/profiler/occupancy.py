"""Occupancy of a device at every moment of a trace: spans on several threads, some within others, share one time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Interval = tuple[float, float]


class Occupied(NamedTuple):
    """Something that a device did: from begin to end, on a thread, what it counts as, and whether it is communication,
    during which others may compute."""

    begin: float
    end: float
    thread: str
    key: Hashable
    is_communication: bool = False


@dataclass
class Occupancy:
    """A device's time, all of it once. computing: by key, time in which it computed, divided equally where several did
    at once. exposed: by key, time in which it communicated and did not compute; hidden: in which it did both, which is
    part of computing. idle: when it did neither, disjoint and in order."""

    computing: dict[Any, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[Any, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[Any, float] = field(default_factory=lambda: defaultdict(float))
    idle: list[Interval] = field(default_factory=list)


def occupancy(spans: Iterable[Occupied], begin: float, end: float) -> Occupancy:
    """A device's time from begin to end. Of spans within one another on a thread, the innermost counts.

    >>> outer, inner = Occupied(0, 4, "a", "loop"), Occupied(1, 2, "a", "product")
    >>> found = occupancy([outer, inner, Occupied(3, 6, "b", "sum", True)], 0, 10)
    >>> dict(found.computing), dict(found.exposed), dict(found.hidden), found.idle
    ({'loop': 3.0, 'product': 1.0}, {'sum': 2.0}, {'sum': 1.0}, [(6, 10)])
    """
    threads: dict[str, list[Occupied]] = defaultdict(list)
    for span in spans:
        if span.end > begin and span.begin < end:
            threads[span.thread].append(span)
    pieces = heapq.merge(*(_innermost(each) for each in threads.values()), key=lambda piece: piece[:2])
    result = Occupancy()
    now: float = begin
    active: list[tuple[float, int, Occupied]] = []  # by their ends
    count = 0
    for start, stop, span in pieces:
        start, stop = max(start, begin), min(stop, end)
        if stop <= start:
            continue
        now = _advance(result, active, now, start)
        count += 1
        heapq.heappush(active, (stop, count, span))
    _advance(result, active, now, end)
    return result


def _innermost(spans: Sequence[Occupied]) -> list[tuple[float, float, Occupied]]:
    """One thread's time as (begin, end, the innermost span there), in order."""
    pieces: list[tuple[float, float, Occupied]] = []
    stack: list[Occupied] = []
    now = float("-inf")

    def until(time: float) -> None:
        nonlocal now
        while stack and now < time:
            stop = min(stack[-1].end, time)
            if stop > now:
                pieces.append((now, stop, stack[-1]))
                now = stop
            if stack[-1].end <= now:
                stack.pop()
        now = max(now, time)

    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        until(span.begin)
        stack.append(span)
    until(max((span.end for span in spans), default=now))
    return pieces


def _advance(result: Occupancy, active: list[tuple[float, int, Occupied]], now: float, until: float) -> float:
    """Share out the time from now on; what has ended by then is taken out of active."""
    while now < until:
        while active and active[0][0] <= now:
            heapq.heappop(active)
        stop = min(active[0][0], until) if active else until
        computing = [span for _, _, span in active if not span.is_communication]
        communicating = [span for _, _, span in active if span.is_communication]
        if computing:
            for span in computing:
                result.computing[span.key] += (stop - now) / len(computing)
            for span in communicating:
                result.hidden[span.key] += (stop - now) / len(communicating)
        elif communicating:
            for span in communicating:
                result.exposed[span.key] += (stop - now) / len(communicating)
        else:
            result.idle.append((now, stop))
        now = stop
    return until


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, disjoint and in order.

    >>> united([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Times that are in both; each is disjoint and in order.

    >>> common([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    result, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            result.append((begin, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return result


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Times that are in the first alone.

    >>> without([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(0, 1), (2, 3), (7, 9)]
    """
    gaps, at = [], float("-inf")
    for begin, end in second:
        gaps.append((at, begin))
        at = end
    return common(first, [*gaps, (at, float("inf"))])


def length(intervals: Iterable[Interval]) -> float:
    """The total length of disjoint spans."""
    return sum(end - begin for begin, end in intervals)
