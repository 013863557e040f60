"""Tables of what a Profiler recorded."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import jax

from polyreme.errors import ConfigError
from polyreme.profiler.trace import TraceEvent

_UNITS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
_COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast")
_NUMBERED = re.compile(r"[.\d]+$")


class SortedKeys(enum.Enum):
    """The sort key of rows: time on the host (CPU) or on the devices (GPU stands for all of them)."""

    CPUTotal = 0
    CPUAvg = 1
    CPUMax = 2
    CPUMin = 3
    GPUTotal = 4
    GPUAvg = 5
    GPUMax = 6
    GPUMin = 7


class SummaryView(enum.Enum):
    """Tables: of devices, of kinds of events, of the model's steps, of collectives, of parts of compiled functions on
    devices, of calls of ops, of memory, of copies, and of what the user named."""

    DeviceView = 0
    OverView = 1
    ModelView = 2
    DistributedView = 3
    KernelView = 4
    OperatorView = 5
    MemoryView = 6
    MemoryManipulationView = 7
    UDFView = 8


@dataclass
class CallTimes:
    """CallTimes of events of one name, nanoseconds."""

    durations: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Their sum."""
        return sum(self.durations)

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Total, mean, most and least; zeros of none."""
        if not self.durations:
            return 0.0, 0.0, 0.0, 0.0
        return self.total, self.total / len(self.durations), max(self.durations), min(self.durations)


@dataclass
class CallRow:
    """CallTimes of one name on the host and on the devices, and rows of what it is made of."""

    name: str
    host: CallTimes = field(default_factory=CallTimes)
    device: CallTimes = field(default_factory=CallTimes)
    parts: dict[str, CallTimes] = field(default_factory=dict)

    def sorted_by(self, key: SortedKeys) -> float:
        """The figure that rows are sorted by."""
        times = self.device if key.name.startswith("GPU") else self.host
        return times.figures[("Total", "Avg", "Max", "Min").index(key.name[3:])]


def operator_rows(events: Iterable[TraceEvent]) -> list[CallRow]:
    """A row for each function called, op or captured: its calls, their time on devices, and their kernels."""
    rows: dict[str, CallRow] = {}
    events = list(events)
    for event in events:
        if event.kind == "operator":
            rows.setdefault(event.name, CallRow(event.name)).host.durations.append(event.duration)
    for event in events:
        if event.kind == "kernel":
            name = event.module.removeprefix("jit_")
            row = rows.setdefault(name, CallRow(name))
            row.device.durations.append(event.duration)
            row.parts.setdefault(kernel_name(event), CallTimes()).durations.append(event.duration)
    return list(rows.values())


def kernel_name(event: TraceEvent) -> str:
    """A kernel's name without the number that tells it from others of the kind.

    >>> kernel_name(TraceEvent("fusion.12", "kernel", 0, 1, ""))
    'fusion'
    """
    return _NUMBERED.sub("", event.name) or event.name


def is_collective(event: TraceEvent) -> bool:
    """Whether a kernel moves data between devices."""
    return event.kind == "kernel" and _COLLECTIVE.search(event.name) is not None


def covered(events: Iterable[TraceEvent]) -> float:
    """Nanoseconds in which at least one of the events was under way.

    >>> covered([TraceEvent(name, "kernel", begin, 3, "") for name, begin in (("a", 0), ("b", 2), ("c", 9))])
    8.0
    """
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.begin):
        total += max(0.0, event.end - max(event.begin, end))
        end = max(end, event.end)
    return total


def text_of(
    events: Sequence[TraceEvent],
    sorted_by: SortedKeys = SortedKeys.CPUTotal,
    op_detail: bool = True,
    thread_sep: bool = False,
    time_unit: str = "ms",
    views: SummaryView | Sequence[SummaryView] | None = None,
    with_memory: bool = False,
) -> str:
    """The tables of a recording. Raises ConfigError for a unit or view that there is not."""
    if time_unit not in _UNITS:
        raise ConfigError(f"summary: time_unit {time_unit!r}; give one of {', '.join(_UNITS)}")
    chosen = tuple(SummaryView) if views is None else (views,) if isinstance(views, SummaryView) else tuple(views)
    table = _Tables(events, sorted_by, op_detail, thread_sep, time_unit)
    makers: dict[SummaryView, Callable[[], str]] = {
        SummaryView.DeviceView: table.devices,
        SummaryView.OverView: table.overview,
        SummaryView.ModelView: table.steps,
        SummaryView.DistributedView: table.collectives,
        SummaryView.KernelView: table.kernels,
        SummaryView.OperatorView: table.operators,
        SummaryView.MemoryView: memory_text if with_memory or views is not None else str,
        SummaryView.MemoryManipulationView: table.copies,
        SummaryView.UDFView: table.named,
    }
    for view in chosen:
        if view not in makers:
            raise ConfigError(f"summary: {view!r} is no view; give SummaryViews")
    return "\n\n".join(text for view in chosen if (text := makers[view]()))


def memory_text() -> str:
    """Memory in use on the devices now, and at most so far, by their own account."""
    rows = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if stats:
            shown = (stats.get(name, 0) / 2**20 for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"))
            rows.append([str(device), *(f"{value:.1f}" for value in shown)])
        else:
            rows.append([str(device), "not told", "", ""])
    return _table("Memory, MiB", ["device", "in use", "most", "limit"], rows)


class _Tables:
    def __init__(self, events: Sequence[TraceEvent], key: SortedKeys, detail: bool, by_thread: bool, unit: str) -> None:
        self.events, self.key, self.detail, self.by_thread, self.unit = events, key, detail, by_thread, unit
        self.span = max((e.end for e in events), default=0.0) - min((e.begin for e in events), default=0.0)

    def of(self, *kinds: str) -> list[TraceEvent]:
        return [event for event in self.events if event.kind in kinds]

    def time(self, nanoseconds: float) -> str:
        return f"{nanoseconds / _UNITS[self.unit]:.3f}"

    def share(self, nanoseconds: float, whole: float) -> str:
        return f"{100 * nanoseconds / whole:.2f}" if whole else "0.00"

    def figures(self, times: CallTimes) -> str:
        return " / ".join(map(self.time, times.figures))

    def devices(self) -> str:
        by_device: dict[str, list[TraceEvent]] = {}
        for event in self.of("kernel"):
            by_device.setdefault(event.device, []).append(event)
        rows = [[name, self.time(covered(e)), self.share(covered(e), self.span)] for name, e in by_device.items()]
        return _table("Devices", ["device", f"busy {self.unit}", "% of the trace"], rows)

    def overview(self) -> str:
        names = {"step": "steps", "user": "named by RecordEvent", "operator": "calls", "kernel": "on devices",
                 "runtime": "jax's runtime"}  # fmt: skip
        rows = [[name, str(len(e)), self.time(covered(e)), self.share(covered(e), self.span)]
                for kind, name in names.items() if (e := self.of(kind))]  # fmt: skip
        title = f"Overview of {self.time(self.span)} {self.unit}: time in which something of a kind was under way"
        return _table(title, ["events", "count", self.unit, "%"], rows)

    def steps(self) -> str:
        rows = [[event.name, self.time(event.duration)] for event in self.of("step")]
        return _table("Steps", ["step", self.unit], rows)

    def collectives(self) -> str:
        events = [event for event in self.events if is_collective(event)]
        if not events:
            return ""
        compute = [e for e in self.of("kernel") if not is_collective(e)]
        alone = covered([*compute, *events]) - covered(compute)
        text = self._by_kernel("Collectives", events)
        return f"{text}\n{self.time(alone)} of {self.time(covered(events))} {self.unit} with no computation beside them"

    def kernels(self) -> str:
        return self._by_kernel("Kernels", self.of("kernel"))

    def copies(self) -> str:
        words = ("copy", "transpose", "memcpy")
        events = [e for e in self.of("kernel") if any(word in e.name.lower() for word in words)]
        return self._by_kernel("Copies", events) if events else ""

    def _by_kernel(self, title: str, events: Sequence[TraceEvent]) -> str:
        rows: dict[str, CallRow] = {}
        for event in events:
            row = rows.setdefault(kernel_name(event), CallRow(kernel_name(event)))
            row.device.durations.append(event.duration)
        whole = sum(row.device.total for row in rows.values())
        ordered = sorted(rows.values(), key=lambda row: -row.device.total)
        cells = [
            [r.name, str(len(r.device.durations)), self.figures(r.device), self.share(r.device.total, whole)]
            for r in ordered
        ]
        return _table(title, ["name", "count", f"total / mean / most / least {self.unit}", "%"], cells)

    def operators(self) -> str:
        groups: dict[str, list[TraceEvent]] = {"": self.of("operator", "kernel")}
        if self.by_thread:
            threads = dict.fromkeys(e.thread for e in self.of("operator"))
            groups = {thread: [e for e in self.of("operator") if e.thread == thread] for thread in threads}
        return "\n\n".join(
            self._operators(f"Calls{thread and f' of thread {thread}'}", e) for thread, e in groups.items()
        )

    def _operators(self, title: str, events: Sequence[TraceEvent]) -> str:
        rows = sorted(operator_rows(events), key=lambda row: -row.sorted_by(self.key))
        host, device = (sum(getattr(row, side).total for row in rows) for side in ("host", "device"))
        cells = []
        for row in rows:
            calls = str(len(row.host.durations))
            shares = self.share(row.host.total, host), self.share(row.device.total, device)
            cells.append([row.name, calls, self.figures(row.host), shares[0], self.time(row.device.total), shares[1]])
            if self.detail:
                for name, times in sorted(row.parts.items(), key=lambda item: -item[1].total):
                    share = self.share(times.total, device)
                    cells.append([f"  {name}", str(len(times.durations)), "", "", self.time(times.total), share])
        heads = ["name", "calls", f"host total / mean / most / least {self.unit}", "%", f"devices {self.unit}", "%"]
        return _table(title, heads, cells)

    def named(self) -> str:
        rows: dict[str, CallRow] = {}
        for event in self.of("user"):
            rows.setdefault(event.name, CallRow(event.name)).host.durations.append(event.duration)
        ordered = sorted(rows.values(), key=lambda row: -row.sorted_by(self.key))
        cells = [[row.name, str(len(row.host.durations)), self.figures(row.host)] for row in ordered]
        return _table("Named by RecordEvent", ["name", "count", f"total / mean / most / least {self.unit}"], cells)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    shown = [[cell if len(cell) <= 48 else f"{cell[:45]}..." for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [heads, *shown]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip()

    return "\n".join([title, line(heads), "  ".join("-" * width for width in widths), *map(line, shown)])
