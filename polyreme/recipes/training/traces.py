"""Traces of the ranks of a job, gathered on rank 0 as one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyreme.distributed.checkpoint.parts import everyone_says
from polyreme.distributed.communication.objects import broadcast_object_list, recv_object_list, send_object_list
from polyreme.distributed.communication.point_to_point import own_address
from polyreme.distributed.job import clocks
from polyreme.profiler import Profiler, RecordEvent, TraceResult
from polyreme.profiler.merge import MARK, RankTrace, merge
from polyreme.profiler.trace import STEP, write_within

TRACE = "trace.json.gz"
MOST_TRACE_BYTES = 50 * 10**6


class StepRecorder:
    """Records steps of a run: begin() before the first of them, end_step() after each, finish() after the last.

    Where several processes train, each does so, and result() brings what they recorded to rank 0.
    """

    note: str

    def __init__(self, steps: int) -> None:
        # of several processes the recording begins with one step more, in which they wait for each other's to begin
        self._is_alone = jax.process_count() == 1
        self._profiler = Profiler(on_trace_ready=lambda _: None, scheduler=(0, steps + (not self._is_alone)))
        self._clock = 0
        self.note = ""

    def begin(self) -> None:
        """Start the recording."""
        self._profiler.start()
        with RecordEvent(MARK):
            self._clock = time.monotonic_ns()
        if not self._is_alone:
            everyone_says(None)
            self._profiler.step()

    def end_step(self) -> None:
        """A step was dispatched."""
        self._profiler.step()

    def finish(self) -> TraceResult | None:
        """Stop; the trace of all ranks on rank 0, None on the others. Every rank calls it."""
        self._profiler.stop()
        trace = self._profiler.result
        assert trace is not None
        if self._is_alone:
            return trace
        events = [event for event in trace.events if event.name != f"{STEP}#0"]
        rank, count = jax.process_index(), jax.process_count()
        offset = clocks.measure(rank, count, own_address(), _from_first)
        names = {f"{device.platform}:{at}": device_name(device) for at, device in enumerate(jax.local_devices())}
        mine = RankTrace(rank, events, self._clock, offset.ahead, names)
        if rank > 0:
            send_object_list([np.frombuffer(mine.packed(), np.uint8), offset.error], 0)
            return None
        traces, errors = [mine], []
        for other in range(1, count):
            told: list[Any] = [None, None]
            recv_object_list(told, other)
            traces.append(RankTrace.unpacked(bytes(told[0])))
            errors.append(told[1])
        self.note = f"{count} ranks by one clock, to {max(errors) / 1e3:.0f} us"
        return TraceResult(merge(traces), facts=trace.facts | {"clocks": self.note})


def _from_first(value: str | None) -> str:
    values: list[Any] = [value]
    broadcast_object_list(values, 0)
    return str(values[0])


def device_name(device: Any) -> str:
    """A device as traces name it."""
    return f"{device.platform}:{device.id}"


def write_trace(trace: TraceResult, folder: Path) -> list[str]:
    """Write the trace for Perfetto into a folder, within MOST_TRACE_BYTES; returns what is to be said of it."""
    folder.mkdir(parents=True, exist_ok=True)
    left_out = write_within(trace.events, folder / TRACE, MOST_TRACE_BYTES, trace.facts)
    if not left_out:
        return []
    return [
        f"note: {left_out:,} of {len(trace.events):,} events, the shortest, are not in {TRACE}, which would be over "
        f"{MOST_TRACE_BYTES // 10**6} MB; the tables count them"
    ]
