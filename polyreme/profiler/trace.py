"""Events of jax's profiler: read from its file, written and read as Chrome's trace format."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from polyreme.errors import ConfigError, DataError

STEP = "ProfileStep"
"""What the name of a step's event begins with; # and its number follow."""
KINDS = ("step", "user", "operator", "kernel", "runtime")
"""What an event is: a step of the Profiler; a RecordEvent; a call of a compiled function on the host; a part of one on
a device; anything else that jax tells."""
_CALL = re.compile(r"PjitFunction\((.*)\)")
_FORMAT = "polyreme trace 1"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took a time. begin and duration: nanoseconds, from the beginning of the trace. thread: the line it
    stands on. device: that it ran on, "" for the host. module: of a kernel, the compiled function that it is part of.
    args: of a kernel, numbers of its program and of the program's run, where the device tells them. rank: of the
    process, in a trace of several.
    """

    name: str
    kind: str
    begin: float
    duration: float
    thread: str
    device: str = ""
    module: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None

    @property
    def end(self) -> float:
        """The end of the event, nanoseconds from the beginning of the trace."""
        return self.begin + self.duration


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a trace that jax's profiler wrote, an .xplane.pb file, in the order in which they began. Raises
    DataError for a file that is none."""
    try:
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    except Exception as error:  # noqa: BLE001  (the parser raises bare exceptions)
        raise DataError(f"{path}: not a trace of jax's profiler ({error}); give the .xplane.pb file") from None
    events = [_event(plane.name, line.name, raw) for plane in planes for line in plane.lines for raw in line.events]
    return _once(sorted((event for event in events if event is not None), key=lambda e: (e.begin, -e.duration)))


def _event(plane: str, line: str, raw: Any) -> TraceEvent | None:
    name, stats = raw.name, {key: value for key, value in raw.stats if key}
    if raw.duration_ns <= 0 or name.startswith(("end: ", "ThreadpoolListener", "$")):
        return None
    begin, duration = float(raw.start_ns), float(raw.duration_ns)
    if "hlo_op" in stats or plane.startswith("/device:"):
        if "hlo_op" not in stats and line not in ("XLA Ops",):
            return None  # sums over others: steps, modules, scopes
        device = plane.removeprefix("/device:").lower()
        if device.startswith("/host:"):
            device = f"cpu:{stats.get('device_ordinal', 0)}"
        module = str(stats.get("hlo_module", ""))
        numbers = {"program": stats.get("program_id"), "run": stats.get("run_id")}
        told = {key: number for key, number in numbers.items() if isinstance(number, int)}
        return TraceEvent(str(stats.get("hlo_op", name)), "kernel", begin, duration, line, device, module, told)
    if name == STEP and "step_num" in stats:
        return TraceEvent(f"{STEP}#{stats['step_num']}", "step", begin, duration, line)
    if "polyreme" in stats:
        return TraceEvent(name, "user", begin, duration, line)
    call = _CALL.fullmatch(name)
    if call is not None:
        return TraceEvent(call[1], "operator", begin, duration, line)
    return TraceEvent(name, "runtime", begin, duration, line)


def _once(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Events, of a call that jax tells twice, one within the other, the outer."""
    chosen: list[TraceEvent] = []
    last: dict[tuple[str, str], TraceEvent] = {}
    for event in events:
        if event.kind == "operator":
            before = last.get((event.thread, event.name))
            if before is not None and event.end <= before.end:
                continue
            last[event.thread, event.name] = event
        chosen.append(event)
    return chosen


def write_chrome(events: Sequence[TraceEvent], path: Path, facts: dict[str, Any] | None = None) -> None:
    """Write events as Chrome's trace format, which ui.perfetto.dev and chrome://tracing open; .gz compresses.

    A device is a process there, and so is the host; in a trace of several ranks a rank is, with its devices' threads.
    """
    places = list(dict.fromkeys(_place(event) for event in events))
    processes = list(dict.fromkeys(device for device, _ in places))
    number = {place: i for i, place in enumerate(places)}
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "tid": 0, "args": {"name": name}}
        for i, name in enumerate(processes)
    ]
    rows += [
        {"ph": "M", "name": "thread_name", "pid": processes.index(place[0]), "tid": i, "args": {"name": place[1]}}
        for place, i in number.items()
    ]
    for event in events:
        place = _place(event)
        row = {"ph": "X", "name": event.name, "cat": event.kind, "ts": event.begin / 1e3, "dur": event.duration / 1e3}
        args = event.args | ({"module": event.module} if event.module else {})
        rows.append(row | {"pid": processes.index(place[0]), "tid": number[place]} | ({"args": args} if args else {}))
    text = json.dumps({"schemaVersion": _FORMAT, "displayTimeUnit": "ms", **(facts or {}), "traceEvents": rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _place(event: TraceEvent) -> tuple[str, str]:
    """The names of the process and thread that an event has in Chrome's format."""
    device = event.device or "host"
    return (device, event.thread) if event.rank is None else (f"{_RANK_NAME}{event.rank}", f"{device}: {event.thread}")


def _of_place(process: str, thread: str) -> dict[str, Any]:
    """What _place tells of an event."""
    rank = None
    if process.startswith(_RANK_NAME):
        rank = int(process.removeprefix(_RANK_NAME))
        process, _, thread = thread.partition(": ")
    return {"thread": thread, "device": "" if process == "host" else process, "rank": rank}


_RANK_NAME = "rank "


def write_within(events: Sequence[TraceEvent], path: Path, most_bytes: int, facts: dict[str, Any] | None = None) -> int:
    """write_chrome into a file of at most so many bytes; returns how many events were left out for it: the shortest of
    jax's runtime, and where these are not enough the shortest of all but steps."""
    left_out = 0
    chosen = list(events)
    while True:
        write_chrome(chosen, path, facts)
        size = path.stat().st_size
        if size <= most_bytes or len(chosen) <= 1:
            return left_out
        count = len(chosen) - int(len(chosen) * 0.9 * most_bytes / size)
        order = sorted(range(len(chosen)), key=lambda i: (_RANK[chosen[i].kind], chosen[i].duration))
        dropped = set(order[:count])
        left_out += count
        chosen = [event for i, event in enumerate(chosen) if i not in dropped]


_RANK = {"runtime": 0, "kernel": 1, "operator": 1, "user": 1, "step": 2}


def read_chrome(path: Path) -> list[TraceEvent]:
    """Events that write_chrome wrote. Raises DataError for another file."""
    try:
        data = path.read_bytes()
        whole = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        if whole.get("schemaVersion") != _FORMAT:
            raise ValueError(f"schemaVersion {whole.get('schemaVersion')!r}, not {_FORMAT!r}")
        rows = whole["traceEvents"]
        processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
        threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
        return [
            TraceEvent(
                row["name"],
                row["cat"],
                row["ts"] * 1e3,
                row["dur"] * 1e3,
                module=row.get("args", {}).get("module", ""),
                args={key: value for key, value in row.get("args", {}).items() if key != "module"},
                **_of_place(processes[row["pid"]], threads[row["tid"]]),
            )
            for row in rows
            if row["ph"] == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise DataError(f"{path}: not a trace that a Profiler exported ({error})") from None


class TraceResult:
    """The recording of a Profiler. events: all of them, in the order in which they began."""

    events: list[TraceEvent]
    facts: dict[str, Any]

    def __init__(
        self, events: Sequence[TraceEvent], source: bytes | None = None, facts: dict[str, Any] | None = None
    ) -> None:
        self.events, self.facts, self._source = list(events), facts or {}, source

    def save(self, path: str | Path, format: str = "json") -> None:
        """Write it as "json", Chrome's trace format, or "pb", the protobuf (XSpace) that jax's profiler writes."""
        where = Path(path)
        if format == "json":
            write_chrome(self.events, where, self.facts)
        elif format == "pb":
            if self._source is None:
                raise ConfigError(f"save({str(path)!r}, 'pb'): read from JSON, which has no protobuf; give 'json'")
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_bytes(self._source)
        else:
            raise ConfigError(f"save: format {format!r}; give 'json' or 'pb'")

    def get_data(self) -> dict[str, list[TraceEvent]]:
        """Events by thread."""
        threads: dict[str, list[TraceEvent]] = {}
        for event in self.events:
            threads.setdefault(event.thread, []).append(event)
        return threads

    def get_extra_info(self) -> dict[str, Any]:
        """Facts about the run: devices, versions."""
        return dict(self.facts)


def load_profiler_result(filename: str | Path) -> TraceResult:
    """Load a file that Profiler.export or an exporter wrote, JSON or protobuf. Raises DataError for a file that is
    neither."""
    path = Path(filename)
    if not path.is_file():
        raise DataError(f"{path}: no such file; give one that Profiler.export wrote")
    if path.suffix in (".json", ".gz"):
        return TraceResult(read_chrome(path))
    return TraceResult(read_trace(path), path.read_bytes())
