"""A Recording as its reader sees it: tables, JSON, and the three largest things to change with what each would gain."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyreme.distributed.comm_report.report import axes_text, table
from polyreme.profiler.occupancy import length, united
from polyreme.recipes.pictures import has_matplotlib
from polyreme.recipes.profiling import drawing as profile_drawing
from polyreme.recipes.profiling.run import Recording
from polyreme.recipes.profiling.step_profile import PARTS, MeasuredTask, OperatorTime, layers_of, planned_tasks
from polyreme.recipes.training.traces import write_trace
from polyreme.units import bytes_text

SUMMARY, TEXT = "summary.json", "summary.txt"
_ROWS = 24  # of a table in the text; the JSON has all
_FEW = 8  # of a table in short
_WIDTH = 80  # of sentences, and of what a terminal shows


class Remedy(NamedTuple):
    """Something to change. gain: seconds a step that it would save at most."""

    what: str
    gain: float
    how: str


def changes(recording: Recording) -> list[Remedy]:
    """The losses of time with their remedies, the largest first."""
    profile, plan = recording.profile, recording.config.parallel_plan
    remedies = [
        Remedy(
            "waiting for batches", profile.parts["input"], "raise data.num_workers, or prepare the data (polyreme data)"
        ),
        Remedy(
            "no device works and the host does not wait for data",
            profile.parts["host"],
            # over stages more microbatches fill the pipeline, so that fewer are no remedy
            "give a step more work: a larger train.global_batch"
            + (", fewer train.accumulation" if plan.mesh.pp == 1 < plan.num_microbatches else ""),
        ),
        Remedy(
            "waiting in collectives for the last device to come",
            profile.parts["group"],
            "even out the work of the devices of a group, or use fewer of them",
        ),
    ]
    along: dict[str, float] = {}
    for row in profile.collectives:
        place = axes_text(row.axes)
        share = len([d for d in profile.devices if any(d in g for g in row.groups)]) / len(profile.devices)
        along[place] = along.get(place, 0.0) + row.transfer * (share or 1 / len(profile.devices))
    for place, seconds in along.items():
        how = f"a smaller degree of {place}, or a larger batch for each of its messages (polyreme plan)"
        remedies.append(Remedy(f"collectives along {place} with nothing computed beside them", seconds, how))
    again = sum(row.seconds for row in profile.rows if row.is_again)
    remedies.append(Remedy("recomputed for the backward", again, "plan.recompute: less of it, where memory allows"))
    others = profile.parts["others"]
    if plan.mesh.pp > 1:
        now = _end(planned_tasks(profile))
        finer, even = now - _end(planned_tasks(profile, finer=2)), now - _end(planned_tasks(profile, is_even=True))
        how = f"train.accumulation={2 * plan.num_microbatches}: the schedule with tasks of half the length, as measured"
        remedies.append(Remedy("stages that wait at the ends of a step", finer, how))
        how = "plan.virtual_stages, or other numbers of layers: the same schedule with tasks equally long on all stages"
        remedies.append(Remedy("stages of uneven work", even, how))
    else:
        remedies.append(Remedy("devices idle while others work", others, "even out the work of the devices"))
    return sorted((change for change in remedies if change.gain > 0), key=lambda change: -change.gain)[:3]


def as_dict(recording: Recording) -> dict[str, Any]:
    """Everything, as plain values fit for JSON; seconds and bytes are of one step."""
    profile = recording.profile
    return {
        "plan": profile.plan.to_dict(),
        "steps": profile.steps,
        "step_seconds": profile.step_seconds,
        "plain_step_seconds": recording.plain_seconds,
        "reader_seconds": recording.reader_seconds,
        "kernels_joined": profile.joined,
        "parts": profile.parts,
        "device_parts": profile.device_parts,
        "operators": [
            {
                "layer": row.layer,
                "op": row.op,
                "phase": row.phase,
                "recomputed": row.is_again,
                "seconds": row.seconds,
                "share": row.seconds / profile.step_seconds,
                "flop": row.flop,
                "flops_per_second": row.flops_per_second,
                "devices": dict(row.by_device),
            }
            for row in profile.rows
        ],
        "collectives": [
            vars(row) | {"axes": None if row.axes is None else list(row.axes)} for row in profile.collectives
        ],
        "sends": [send._asdict() for send in recording.sends],
        "placement": {
            "layers": layers_of(profile.rows),
            "programs": [
                {"stage": stage, "program": name, "runs": runs} for (stage, name), runs in profile.programs.items()
            ],
        },
        "memory": recording.memory,
        "measured_memory": recording.measured_memory,
        "timeline": [task._asdict() for task in profile.tasks],
        "planned_timeline": [task._asdict() for task in planned_tasks(profile)],
        "changes": [change._asdict() for change in changes(recording)],
        "notes": notes(recording),
    }


def as_text(recording: Recording) -> str:
    """The tables as text."""
    blocks = [*_beginning(recording), _operators_text(recording), _collectives_text(recording)]
    blocks += [_stages_text(recording), _placement_text(recording), _memory_text(recording)]
    return _join_blocks(blocks)


def in_short(recording: Recording) -> str:
    """The head of as_text and the first rows of its tables, in the width of a terminal."""
    profile = recording.profile
    whole = profile.step_seconds
    operators = [("ms", "share", "phase", "operator", "layer")]
    for row in profile.rows[:_FEW]:
        operators.append((_ms(row.seconds), _share(row.seconds, whole), _phase(row), row.op, row.layer or "-"))
    collectives = [("ms", "waiting", "hidden", "collective", "layer")]
    for c in profile.collectives[:_FEW]:
        times = (_ms(c.transfer), _ms(c.waiting), _ms(c.hidden))
        collectives.append((*times, f"{c.kind} {axes_text(c.axes)}", c.layer))
    tables = [table(_narrow(operators), right=(0, 1))]
    tables += [table(_narrow(collectives), right=(0, 1, 2))] if len(collectives) > 1 else []
    return _join_blocks([*_beginning(recording), *tables, _stages_text(recording), _memory_text(recording)])


def _narrow(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows of which the last column, of paths, begins later where they are wider than a terminal."""
    others = [max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]]
    room = max(8, _WIDTH - sum(others))
    return [(*row, path if len(path) <= room else f"..{path[2 - room :]}") for *row, path in rows]


def _beginning(recording: Recording) -> list[str]:
    profile = recording.profile
    devices = "1 device" if len(profile.devices) == 1 else f"{len(profile.devices)} devices"
    head = (
        f"{profile.steps} steps of {_ms(profile.step_seconds)} ms on {devices}, "
        f"{profile.plan.mesh}; {_ms(recording.plain_seconds)} ms a step when not recorded"
    )
    sentences = [textwrap.fill(text, _WIDTH) for text in (head, *notes(recording))]
    return [*sentences, _parts_text(recording), _changes_text(recording)]


def _join_blocks(blocks: Sequence[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _end(tasks: Sequence[MeasuredTask]) -> float:
    return max((task.end for task in tasks), default=0.0)


def notes(recording: Recording) -> list[str]:
    """Remarks on the figures, in sentences."""
    profile, sentences = recording.profile, []
    cores = os.cpu_count() or 1
    if profile.devices[0].startswith("cpu:") and len(profile.devices) > 1:
        sentences.append(
            f"note: {len(profile.devices)} virtual devices share {cores} cores: a device waits for a core in "
            "collectives and idle time as it would not on a machine of its own; shares of computing compare, those of "
            "waiting do not"
        )
    if "clocks" in recording.trace.facts:
        sentences.append(f"note: {recording.trace.facts['clocks']}; waits shorter than that are not told apart")
    if profile.joined < 0.999:
        sentences.append(
            f"note: {1 - profile.joined:.1%} of the kernels' time is of small programs between the step's own, which "
            "are listed by name and not by layer"
        )
    if not recording.measured_memory:
        sentences.append(
            "note: these devices do not tell what memory they use; the table says what arrays and programs take"
        )
    return sentences


def write(recording: Recording, folder: Path) -> list[str]:
    """Write the trace, the tables and the JSON into a folder; returns what else there is to say of them."""
    said = write_trace(recording.trace, folder)
    if has_matplotlib():
        profile_drawing.draw(recording.profile, recording.sends, folder)
    else:
        said.append("note: no pictures, as matplotlib is not installed; run pip install polyreme[logs]")
    text = as_text(recording) + "".join(f"\n{line}\n" for line in said)
    (folder / TEXT).write_text(text)
    (folder / SUMMARY).write_text(json.dumps(as_dict(recording), indent=1) + "\n")
    return said


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else "-"


def _parts_text(recording: Recording) -> str:
    profile = recording.profile
    whole = profile.step_seconds
    rows = [("part of a step", "ms", "share", "what it is")]
    rows += [(name, _ms(seconds), _share(seconds, whole), PARTS[name]) for name, seconds in profile.parts.items()]
    total = sum(profile.parts.values())
    rows.append(("sum", _ms(total), _share(total, whole), "the mean over devices"))
    return table(rows, right=(1, 2))


def _changes_text(recording: Recording) -> str:
    whole, lines = recording.profile.step_seconds, ["to change, and what that gains of a step at most"]
    for number, each in enumerate(changes(recording), 1):
        gain = f"{_ms(each.gain)} ms, {_share(each.gain, whole)}"
        for text, indent in ((f"{number}. {each.what}: {gain}", ""), (each.how, "   ")):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent="   ")
    return "\n".join(lines)


def _operators_text(recording: Recording) -> str:
    profile = recording.profile
    whole = profile.step_seconds
    rows = [("operator", "layer", "phase", "ms", "share", "GFLOP/s a device")]
    for row in profile.rows[:_ROWS]:
        rows.append((row.op, row.layer or "-", _phase(row), _ms(row.seconds), _share(row.seconds, whole), _rate(row)))
    rest = profile.rows[_ROWS:]
    if rest:
        seconds = sum(row.seconds for row in rest)
        rows.append((f"{len(rest)} more", "", "", _ms(seconds), _share(seconds, whole), ""))
    seconds = profile.parts["computing"]
    rows.append(("computing", "", "", _ms(seconds), _share(seconds, whole), ""))
    return table(rows, right=(3, 4, 5))


def _phase(row: OperatorTime) -> str:
    return f"{row.phase}, again" if row.is_again else row.phase or "-"


def _rate(row: OperatorTime) -> str:
    return "-" if row.flops_per_second is None else f"{row.flops_per_second / 1e9:.2f}"


def _collectives_text(recording: Recording) -> str:
    rows: list[tuple[str, ...]] = [
        ("collective", "axes", "who", "layer", "phase", "runs", "sends", "ms", "waiting", "hidden")
    ]
    for c in recording.profile.collectives[:_ROWS]:
        times = (_ms(c.transfer), _ms(c.waiting), _ms(c.hidden))
        sent = bytes_text(c.wire) if c.groups else "-"
        rows.append((c.kind, axes_text(c.axes), _who(c.groups), c.layer, c.phase or "-", f"{c.runs:g}", sent, *times))
    rest = recording.profile.collectives[_ROWS:]
    if rest:
        sums = [_ms(sum(getattr(c, part) for c in rest)) for part in ("transfer", "waiting", "hidden")]
        rows.append((f"{len(rest)} more", "", "", "", "", "", "", *sums))
    for send in recording.sends:
        rows.append(("send", "pp", f"stage {send.source}", send.what, "-", str(send.times),
                     bytes_text(send.times * send.nbytes), "-", "-", "-"))  # fmt: skip
    return table(rows, right=(5, 6, 7, 8, 9)) if len(rows) > 1 else ""


def _who(groups: Sequence[Sequence[str]]) -> str:
    if not groups:
        return "-"
    names = [device.rpartition(":")[2] for device in groups[0]]
    shown = ",".join(names if len(names) <= 8 else [*names[:3], "..", names[-1]])
    return f"{shown} and {len(groups) - 1} more" if len(groups) > 1 else shown


def _placement_text(recording: Recording) -> str:
    rows = [("layer", "devices", "ms on the busiest", "ms on the least busy")]
    for layer, places in list(layers_of(recording.profile.rows).items())[:_ROWS]:
        names = sorted((name.rpartition(":")[2] for name in places), key=lambda n: int(n))
        rows.append((layer or "-", ",".join(names), _ms(max(places.values())), _ms(min(places.values()))))
    programs = [("program", "stage", "runs a step")]
    programs += [(name, str(stage), str(runs)) for (stage, name), runs in sorted(recording.profile.programs.items())]
    return "\n\n".join([table(rows, right=(2, 3)), table(programs, right=(1, 2))])


def _stages_text(recording: Recording) -> str:
    """Busy and idle time of each stage in the last step, measured and planned."""
    tasks = recording.profile.tasks
    if not tasks:
        return ""
    rows = [("stage", "tasks", "busy, ms", "idle, measured", "idle, planned")]
    planned = planned_tasks(recording.profile)
    for stage in range(recording.profile.plan.mesh.pp):
        busy, idle = _busy(tasks, stage)
        rows.append((f"{stage}", f"{sum(t.stage == stage for t in tasks)}", _ms(busy), f"{idle:.1%}",
                     f"{_busy(planned, stage)[1]:.1%}"))  # fmt: skip
    ends = [_ms(_end(each)) for each in (tasks, planned)]
    return (
        f"{table(rows, right=(0, 1, 2, 3, 4))}\nthe tasks of the last step: {ends[0]} ms measured, {ends[1]} ms planned"
    )


def _busy(tasks: Sequence[MeasuredTask], stage: int) -> tuple[float, float]:
    """Seconds in which a stage runs any task, and the share of the time of all tasks in which it runs none."""
    busy = length(united((task.start, task.end) for task in tasks if task.stage == stage))
    whole = max(task.end for task in tasks)
    return busy, 1 - busy / whole


def _memory_text(recording: Recording) -> str:
    """A row for devices that have the same of everything."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, parts in recording.memory.items():
        told = recording.measured_memory.get(name)
        shown = (*(bytes_text(nbytes) for nbytes in parts.values()), "-" if told is None else bytes_text(told))
        alike.setdefault(shown, []).append(name)
    rows = [("parameters", "optimizer", "workspace", "most in use", "devices")]
    rows += [(*shown, _names(devices)) for shown, devices in alike.items()]
    return table(rows, right=(0, 1, 2, 3))


def _names(devices: Sequence[str]) -> str:
    """Devices of a platform by their numbers, neighbours joined.

    >>> _names(["cpu:0", "cpu:1", "cpu:2", "cpu:5"])
    'cpu:0-2,5'
    """
    runs: list[list[int]] = []
    for number in (int(device.rpartition(":")[2]) for device in devices):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{devices[0].rpartition(':')[0]}:{','.join(texts)}"
