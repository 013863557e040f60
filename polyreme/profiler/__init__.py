"""Profiling: where the time of steps goes, on the host and on devices."""

from polyreme.module_names import suggest_names
from polyreme.profiler.profiler import (
    Profiler,
    ProfilerTarget,
    RecordEvent,
    export_chrome_tracing,
    export_protobuf,
)
from polyreme.profiler.schedule import ProfilerState, make_scheduler
from polyreme.profiler.summary import SortedKeys, SummaryView
from polyreme.profiler.trace import TraceResult, load_profiler_result

__all__ = [
    "Profiler",
    "ProfilerState",
    "ProfilerTarget",
    "RecordEvent",
    "SortedKeys",
    "SummaryView",
    "TraceResult",
    "export_chrome_tracing",
    "export_protobuf",
    "load_profiler_result",
    "make_scheduler",
]

suggest_names(__name__)
