"""Profile of recorded steps under a plan: a trace's kernels beside the programs they belong to, as one account of the
time.

Each device's time is shared out once: computing, communicating with nothing computed beside it, and idle. Communication
is further told apart into waiting, until the last device of a group has come, and transfer after that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polyreme.distributed.comm_report.collectives import CollectiveInstruction, find_collectives, origin_of
from polyreme.distributed.comm_report.hlo import Computation, Instruction, Module
from polyreme.mesh import Durations, Plan
from polyreme.profiler import occupancy
from polyreme.profiler.summary import is_collective, kernel_name
from polyreme.profiler.trace import TraceEvent

PARTS = {
    "computing": "kernels that compute, collectives hidden beside",
    "transfer": "collectives with nothing computed beside them",
    "group": "in a collective, waiting for its last device",
    "others": "idle while another device works",
    "input": "idle, no device works, waiting for a batch",
    "host": "idle, no device works, the host does else",
}
"""What a device's time in a step goes to, and what each is; together they are the step."""

DATA = "wait for a batch"
"""The name of the host's event while it waits for data."""
REMATERIALIZED = "rematted_computation"
"""What jax writes into the origin of what a backward computes again."""


class StepProgram(NamedTuple):
    """A compiled program of the step. module: its name in the trace; text: its optimized HLO; devices: as the trace
    names them, in the order of its partitions; task: "F", "B" or "W" of a chunk, "" for what is no task."""

    stage: int
    name: str
    text: str
    devices: tuple[str, ...]
    chunk: int = 0
    task: str = ""

    @property
    def module(self) -> str:
        """The name in the trace."""
        return self.text.partition("HloModule ")[2].partition(",")[0].split()[0]


class Send(NamedTuple):
    """A transfer from one stage to another in a step: its content, how often, bytes on each device each time."""

    source: int
    what: str
    times: int
    nbytes: int


@dataclass
class OperatorTime:
    """Time of an operator in a layer, seconds a step: the mean over all devices, and on each that runs it. flop: of all
    devices together, by the program's shapes. is_again: recomputed for the backward."""

    layer: str
    op: str
    phase: str
    seconds: float = 0.0
    flop: float = 0.0
    is_again: bool = False
    by_device: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def flops_per_second(self) -> float | None:
        """While a device runs it; None where the program does not tell its arithmetic."""
        busy = sum(self.by_device.values())
        return self.flop / busy if self.flop and busy else None


@dataclass
class CollectiveRow:
    """One kind of collective of a stage, along axes, of a layer; seconds and bytes a step, the mean over the stage's
    devices. groups: the devices that talk to each other; runs: for a device, in a step; wire: bytes a device sends."""

    stage: int
    kind: str
    axes: tuple[str, ...] | None
    layer: str
    phase: str
    groups: tuple[tuple[str, ...], ...]
    payload: float = 0.0
    wire: float = 0.0
    runs: float = 0.0
    transfer: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0


class MeasuredTask(NamedTuple):
    """A task on a stage, seconds from the beginning of its step."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


_FAR = 6  # instructions that are looked through
_OUTER = ("while", "conditional", "call")  # whose instructions are in a trace themselves


class _Instruction(NamedTuple):
    layer: str
    op: str
    phase: str
    flop: int
    is_again: bool


class _ReadProgram:
    """A StepProgram read: what each of its instructions is."""

    def __init__(self, program: StepProgram, plan: Plan) -> None:
        self.program = program
        module = Module(program.text)
        self.instructions = {
            i.name: _describe(module, names, i)
            for names in map(_Origins, itertools.repeat(module), module.computations.values())
            for i in names.computation
        }
        mesh = dataclasses.replace(plan.mesh, pp=1)
        self.collectives = {c.name: c for c in find_collectives(program.text, mesh)}
        self.groups = {
            name: tuple(tuple(program.devices[i] for i in group) for group in mesh.groups(*collective.axes))
            if collective.axes is not None
            else (program.devices,)
            for name, collective in self.collectives.items()
        }
        self._group_of = {
            name: {device: number for number, group in enumerate(groups) for device in group}
            for name, groups in self.groups.items()
        }

    def group(self, name: str, device: str) -> int:
        """The number of the group that a device is in."""
        return self._group_of.get(name, {}).get(device, 0)


def _describe(module: Module, names: _Origins, instruction: Instruction) -> _Instruction:
    own_name = names.origin(instruction)
    named = own_name or names.near(instruction)
    origin = origin_of(named)
    return _Instruction(
        origin.layer if named else "",
        (own_name and (origin.kernel or origin.primitive)) or instruction.opcode,
        origin.phase if named else "",
        0 if instruction.opcode in _OUTER else module.flop(instruction, names.computation),
        REMATERIALIZED in named,
    )


class _Origins:
    """Origins of the instructions of a computation."""

    def __init__(self, module: Module, computation: Computation) -> None:
        self.module, self.computation = module, computation
        self.users: dict[str, list[str]] = defaultdict(list)
        for instruction in computation:
            for operand in instruction.operands:
                self.users[operand].append(instruction.name)

    def origin(self, instruction: Instruction) -> str:
        """The origin of the instruction, or of the last instruction fused into it that has one; "" where the compiler
        kept none."""
        if instruction.op_name:
            return instruction.op_name
        inside = [i for name in instruction.called for i in self.module.computations.get(name, ())]
        return next((i.op_name for i in reversed(inside) if i.op_name), "")

    def near(self, instruction: Instruction) -> str:
        """The origin of the nearest operand that has a layer, else of the nearest instruction that reads it."""
        return self._nearest(instruction, lambda i: i.operands) or self._nearest(
            instruction, lambda i: self.users.get(i.name, ())
        )

    def _nearest(self, instruction: Instruction, following: Callable[[Instruction], Sequence[str]]) -> str:
        level, seen = [instruction], {instruction.name}
        for _ in range(_FAR):
            names = [n for each in level for n in following(each) if n in self.computation.instructions]
            level = [self.computation.instructions[n] for n in dict.fromkeys(names) if n not in seen]
            seen.update(names)
            for each in level:
                name = self.origin(each)
                if name and origin_of(name).layer:
                    return name
        return ""


@dataclass
class StepProfile:
    """An account of recorded steps. step_seconds: of one, from the beginning of the first to the end of the last;
    parts: seconds a step of each of PARTS, the mean over devices; device_parts: of each device."""

    plan: Plan
    steps: int
    step_seconds: float
    devices: tuple[str, ...]
    parts: dict[str, float]
    device_parts: dict[str, dict[str, float]]
    rows: list[OperatorTime]
    collectives: list[CollectiveRow]
    tasks: list[MeasuredTask]
    """Of the last step, where the plan has stages."""
    joined: float
    """Share of the kernels' time whose program is known."""
    programs: Counter[tuple[int, str]]
    """By stage and name, how often a step ran it on a device."""


def account(
    events: Sequence[TraceEvent], programs: Sequence[StepProgram], plan: Plan, devices: Sequence[str]
) -> StepProfile:
    """The account of a trace whose steps the programs ran, on these devices; every step's work lies between the
    beginning of the first and the end of the last."""
    host = [event for event in events if event.rank in (None, 0)]  # of several ranks the first's
    steps = [event for event in host if event.kind == "step"]
    begin = min(event.begin for event in steps)
    kernels = [event for event in events if event.kind == "kernel" and event.device in devices and event.end > begin]
    end = max(event.end for event in (*steps, *kernels))
    read = _join(kernels, [_ReadProgram(program, plan) for program in programs])
    spans = _Spans(kernels, read)
    busy = {device: occupancy.occupancy(spans.of[device], begin, end) for device in devices}
    at_work = [occupancy.without([(begin, end)], taken.idle) for taken in busy.values()]
    anyone = occupancy.united(itertools.chain.from_iterable(at_work))
    data = occupancy.united((e.begin, e.end) for e in host if e.kind == "user" and e.name == DATA)
    second = 1e9 * len(steps)
    rows, collectives = _Rows(second, len(devices)), _Collectives(second)
    for device, taken in busy.items():
        for key, time in taken.computing.items():
            rows.add(device, key, time)
        for (program, name, is_waiting), time in taken.exposed.items():
            collectives.add(program, name, "waiting" if is_waiting else "transfer", time)
        for (program, name, _), time in taken.hidden.items():
            collectives.add(program, name, "hidden", time)
    parts = {device: _parts(taken, anyone, data, second) for device, taken in busy.items()}
    for (program, name), runs in spans.runs.items():
        if name in program.collectives:
            collectives.count(program, name, runs)
        else:
            rows.count(program, name, runs)
    known = sum(event.duration for event in kernels if _number(event) in read)
    return StepProfile(
        plan,
        len(steps),
        (end - begin) / second,
        tuple(devices),
        {part: sum(each[part] for each in parts.values()) / len(devices) for part in PARTS},
        parts,
        sorted(rows.rows.values(), key=lambda row: -row.seconds),
        sorted(collectives.rows.values(), key=lambda row: -(row.transfer + row.waiting + row.hidden)),
        _tasks(kernels, read, steps),
        known / sum(event.duration for event in kernels) if kernels else 1.0,
        _launches(kernels, read, len(steps)),
    )


def _parts(
    taken: occupancy.Occupancy, anyone: list[occupancy.Interval], data: list[occupancy.Interval], second: float
) -> dict[str, float]:
    """One device's time by PARTS. anyone: when any device works; data: when the host waits for a batch."""
    alone = occupancy.without(taken.idle, anyone)  # idle, as all are
    idle, nobody, waits = map(occupancy.length, (taken.idle, alone, occupancy.common(alone, data)))
    waiting = sum(time for (_, _, is_waiting), time in taken.exposed.items() if is_waiting)
    times = {
        "computing": sum(taken.computing.values()),
        "transfer": sum(taken.exposed.values()) - waiting,
        "group": waiting,
        "others": idle - nobody,
        "input": waits,
        "host": nobody - waits,
    }
    return {part: times[part] / second for part in PARTS}


def _number(event: TraceEvent) -> tuple[str, Any]:
    return event.module, event.args.get("program")


def _join(kernels: Sequence[TraceEvent], programs: Sequence[_ReadProgram]) -> dict[tuple[str, Any], _ReadProgram]:
    """By module and number, the program of the same name and devices that has all instructions that ran, the one with
    the fewest others."""
    names: dict[tuple[str, Any], set[str]] = defaultdict(set)
    places: dict[tuple[str, Any], set[str]] = defaultdict(set)
    for event in kernels:
        names[_number(event)].add(event.name)
        places[_number(event)].add(event.device)
    joined = {}
    for number, ran in names.items():
        fitting = [
            p
            for p in programs
            if p.program.module == number[0]
            and places[number] <= set(p.program.devices)
            and ran <= p.instructions.keys()
        ]
        if fitting:
            joined[number] = min(fitting, key=lambda p: len(p.instructions))
    return joined


class _Spans:
    """Kernels as what devices are occupied with. Keys: (program or module's name, instruction) of what computes, with
    whether the group is waited for of what communicates. runs: by program and instruction, how often on all devices."""

    def __init__(self, kernels: Sequence[TraceEvent], read: dict[tuple[str, Any], _ReadProgram]) -> None:
        self.of: dict[str, list[occupancy.Occupied]] = defaultdict(list)
        self.runs: Counter[tuple[_ReadProgram, str]] = Counter()
        arrivals = _last_arrivals(kernels, read)
        for number, event in enumerate(kernels):
            program: Any = read.get(_number(event), event.module)
            if isinstance(program, _ReadProgram):
                self.runs[program, event.name] += 1
            if not _communicates(event, program):
                name = event.name if isinstance(program, _ReadProgram) else kernel_name(event)
                self._add(event, event.begin, event.end, (program, name))
                continue
            here = min(max(arrivals[number], event.begin), event.end)
            self._add(event, event.begin, here, (program, event.name, True), True)
            self._add(event, here, event.end, (program, event.name, False), True)

    def _add(self, event: TraceEvent, begin: float, end: float, key: Any, communicates: bool = False) -> None:
        if end > begin:
            self.of[event.device].append(occupancy.Occupied(begin, end, event.thread, key, communicates))


def _communicates(event: TraceEvent, program: Any) -> bool:
    if isinstance(program, _ReadProgram):
        return event.name in program.collectives
    return is_collective(event)


def _last_arrivals(kernels: Sequence[TraceEvent], read: dict[tuple[str, Any], _ReadProgram]) -> dict[int, float]:
    """By the number of a collective's kernel, when the last device of its group began the same collective."""
    turn: Counter[Any] = Counter()
    meetings: dict[Any, list[int]] = defaultdict(list)
    for number, event in enumerate(kernels):
        program: Any = read.get(_number(event), event.module)
        if not _communicates(event, program):
            continue
        group = program.group(event.name, event.device) if isinstance(program, _ReadProgram) else 0
        mine = (_number(event), event.name, event.device)
        meetings[_number(event), event.name, group, turn[mine]].append(number)
        turn[mine] += 1
    return {number: max(kernels[i].begin for i in group) for group in meetings.values() for number in group}


class _Rows:
    """Rows by layer, operator and phase, as they are added up."""

    def __init__(self, second: float, num_devices: int) -> None:
        self.second, self.num_devices = second, num_devices
        self.rows: dict[Any, OperatorTime] = {}

    def add(self, device: str, key: Any, time: float) -> None:
        program, name = key
        row = self._row(program, name)
        row.seconds += time / self.second / self.num_devices
        row.by_device[device] += time / self.second

    def count(self, program: _ReadProgram, name: str, runs: int) -> None:
        """Add runs of an instruction, on all devices together."""
        self._row(program, name).flop += program.instructions[name].flop * runs * 1e9 / self.second

    def _row(self, program: Any, name: str) -> OperatorTime:
        if isinstance(program, _ReadProgram):
            what = program.instructions[name]
            key = (what.layer, what.op, what.phase, what.is_again)
        else:
            key = ("", f"{program.removeprefix('jit_')}: {name}", "", False)
        if key not in self.rows:
            self.rows[key] = OperatorTime(*key[:3], is_again=key[3])
        return self.rows[key]


class _Collectives:
    """CollectiveRows by stage, kind, axes and layer, as they are added up."""

    def __init__(self, second: float) -> None:
        self.second = second
        self.rows: dict[Any, CollectiveRow] = {}

    def add(self, program: Any, name: str, part: str, time: float) -> None:
        row, count = self._row(program, name)
        setattr(row, part, getattr(row, part) + time / self.second / count)

    def count(self, program: _ReadProgram, name: str, runs: int) -> None:
        """Add runs, on all devices together."""
        row, count = self._row(program, name)
        steps = self.second / 1e9
        what: CollectiveInstruction = program.collectives[name]
        row.runs += runs / steps / count
        row.payload += what.payload * runs / steps / count
        row.wire += what.wire * runs / steps / count

    def _row(self, program: Any, name: str) -> tuple[CollectiveRow, int]:
        if not isinstance(program, _ReadProgram):
            key: Any = (program, kernel_name(TraceEvent(name, "kernel", 0, 0, "")))
            row = self.rows.setdefault(key, CollectiveRow(-1, key[1], None, program.removeprefix("jit_"), "", ()))
            return row, 1
        what = program.collectives[name]
        main = max(what.parts, key=lambda part: part.nbytes).origin
        layer = main.layer or main.kernel or main.primitive
        stage = program.program.stage
        key = (stage, what.kind, what.axes, layer, main.phase)
        if key not in self.rows:
            groups = program.groups[name]
            self.rows[key] = CollectiveRow(stage, what.kind, what.axes, layer, main.phase, groups)
        return self.rows[key], len(program.program.devices)


def _tasks(
    kernels: Sequence[TraceEvent], read: dict[tuple[str, Any], _ReadProgram], steps: Sequence[TraceEvent]
) -> list[MeasuredTask]:
    """Tasks of the last step as the stages ran them: each from its first kernel to its last on any device."""
    runs: dict[Any, list[float]] = {}
    for event in kernels:
        program = read.get(_number(event))
        if program is None or not program.program.task:
            continue
        key = (program.program.stage, program.program.task, program.program.chunk, event.args.get("run"))
        span = runs.setdefault(key, [event.begin, event.end])
        span[0], span[1] = min(span[0], event.begin), max(span[1], event.end)
    by_task: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for (stage, kind, chunk, _), (begin, end) in runs.items():
        by_task[stage, kind, chunk].append((begin, end))
    tasks = []
    for (stage, kind, chunk), spans in by_task.items():
        each = len(spans) // len(steps)
        for microbatch, (begin, end) in enumerate(sorted(spans)[-each:] if each else ()):
            tasks.append(MeasuredTask(stage, kind, microbatch, chunk, begin / 1e9, end / 1e9))
    first = min((task.start for task in tasks), default=0.0)
    return sorted(task._replace(start=task.start - first, end=task.end - first) for task in tasks)


def planned_tasks(profile: StepProfile, *, finer: int = 1, is_even: bool = False) -> list[MeasuredTask]:
    """The tasks of the plan's schedule, when they would run if each took the mean of what it was measured to take and
    nothing else took any time. finer: as many times the microbatches, each as much shorter. is_even: chunks share their
    time equally."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for task in profile.tasks:
        times[task.chunk, task.kind].append(task.end - task.start)
    if not times:
        return []
    mean = {key: sum(each) / len(each) / finer for key, each in times.items()}
    schedule = profile.plan.make_schedule(profile.plan.num_microbatches * finer)
    if is_even:
        by_kind = {kind: sum(time for (_, k), time in mean.items() if k == kind) for kind in {k for _, k in mean}}
        mean = {(chunk, kind): by_kind[kind] / schedule.num_chunks for chunk, kind in mean}
    durations = []
    for chunk in range(schedule.num_chunks):
        forward, backward = mean.get((chunk, "F"), 0.0), mean.get((chunk, "B"), 0.0)
        weights = mean.get((chunk, "W"), 0.0) if schedule.split_backward else backward / 2
        durations.append(Durations(forward, backward if schedule.split_backward else backward / 2, weights))
    return [MeasuredTask(s.stage, *s.task, s.start, s.end) for s in schedule.order(durations)]


def _launches(
    kernels: Sequence[TraceEvent], read: dict[tuple[str, Any], _ReadProgram], steps: int
) -> Counter[tuple[int, str]]:
    runs: dict[tuple[int, str], set[Any]] = defaultdict(set)
    for event in kernels:
        program = read.get(_number(event))
        if program is not None:
            runs[program.program.stage, program.program.name].add(event.args.get("run"))
    return Counter({key: round(len(each) / steps) for key, each in runs.items()})


def layers_of(rows: Iterable[OperatorTime]) -> dict[str, dict[str, float]]:
    """By layer, seconds a step on each device that computes of it."""
    layers: dict[str, dict[str, float]] = {}
    for row in rows:
        place = layers.setdefault(row.layer, {})
        for device, seconds in row.by_device.items():
            place[device] = place.get(device, 0.0) + seconds
    return layers
