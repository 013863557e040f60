"""Traces of the ranks of a job as one: by one clock, under the devices' names in the job."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from polyreme.errors import DataError
from polyreme.profiler.trace import TraceEvent

MARK = "clock of the rank"
"""Name of the event by which a trace's times are told on the clock of its process."""


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank. clock: nanoseconds on its process's clock when its MARK began; offset: what its clock is
    ahead of rank 0's, nanoseconds; devices: what its trace calls a device -> the device's name in the job."""

    rank: int
    events: Sequence[TraceEvent]
    clock: int
    offset: int
    devices: Mapping[str, str]

    def packed(self) -> bytes:
        """The trace as bytes for another process."""
        values = {
            **vars(self),
            "devices": dict(self.devices),
            "events": [[getattr(event, field.name) for field in fields(event)] for event in self.events],
        }
        return gzip.compress(json.dumps(values).encode(), compresslevel=1)

    @classmethod
    def unpacked(cls, data: bytes) -> RankTrace:
        """The trace from the bytes of packed."""
        values = json.loads(gzip.decompress(data))
        return cls(**{**values, "events": [TraceEvent(*row) for row in values["events"]]})

    def _shift(self) -> float:
        """The offset that puts a time of the trace on rank 0's clock."""
        mark = next((event for event in self.events if event.name == MARK), None)
        if mark is None:
            raise DataError(f"the trace of rank {self.rank} has no event {MARK!r}, which its times are told by")
        return self.clock - mark.begin - self.offset

    def aligned(self) -> list[TraceEvent]:
        """Its events on rank 0's clock, each with its rank.

        Programs and their runs are numbered as they first come, for each name of a program, so that those which the
        ranks run together have the same numbers on all.
        """
        shift, programs, runs = self._shift(), _Numbers(), _Numbers()
        events = []
        for event in sorted(self.events, key=lambda e: e.begin):
            args = dict(event.args)
            if "program" in args:
                args["program"] = programs.of(event.module, args["program"])
            if "run" in args:
                args["run"] = runs.of((event.module, args.get("program")), args["run"])
            device = self.devices.get(event.device, event.device)
            events.append(replace(event, begin=event.begin + shift, device=device, args=args, rank=self.rank))
        return events


class _Numbers:
    """Numbers from 0 for values as they first come, of each group its own."""

    def __init__(self) -> None:
        self._known: dict[object, dict[object, int]] = {}

    def of(self, group: object, value: object) -> int:
        known = self._known.setdefault(group, {})
        return known.setdefault(value, len(known))


def merge(traces: Sequence[RankTrace]) -> list[TraceEvent]:
    """The events of all ranks by one clock, which begins with the first of them, in the order in which they began."""
    events = [event for trace in traces for event in trace.aligned()]
    first = min((event.begin for event in events), default=0.0)
    moved = (replace(event, begin=event.begin - first) for event in events)
    return sorted(moved, key=lambda e: (e.begin, -e.duration))
