"""A plan as a picture: memory of the fullest device over a step, by what holds it, and the timeline of every stage.

matplotlib comes with the extra polyreme[logs] and is imported when a picture is asked for.
Never imports: jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from polyreme.errors import ConfigError
from polyreme.mesh import Durations, Plan, Task
from polyreme.planner.mixed import MixedStages
from polyreme.planner.pipeline import pipeline_seconds
from polyreme.planner.prediction import Memory, Prediction
from polyreme.recipes.pictures import matplotlib_part, save

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes that a picture may have."""

_GIB = 2**30
_COLOURS = {"F": (0.16, 0.44, 0.76), "B": (0.06, 0.58, 0.45), "W": (0.93, 0.62, 0.13), "end": (0.55, 0.42, 0.66)}
_MEANINGS = {"F": "forward", "B": "backward", "W": "weight gradients", "end": "sum of gradients, update"}
_PARTS = {
    "parameters": (0.27, 0.35, 0.47),
    "gradients": (0.52, 0.60, 0.70),
    "optimizer": (0.77, 0.82, 0.88),
    "workspace": (0.88, 0.80, 0.66),
    "activations": (0.85, 0.48, 0.30),
}
_IDLE, _INK, _LIMIT = (0.955, 0.955, 0.965), (0.13, 0.14, 0.17), (0.75, 0.1, 0.1)
_MOST_MICROBATCHES = 24  # of a pipeline at least twice its stages; more are not legible


class Bar(NamedTuple):
    """A task as it is drawn, seconds."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def check_picture(path: Path) -> None:
    """Raise ConfigError if a picture could not be written there, before any work is done for it."""
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--explain {path}: a picture ends in {', '.join(PICTURES)}; give such a name")
    if path.is_dir():
        raise ConfigError(f"--explain {path}: is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--explain {path}: there is no folder {path.parent}; make it first")
    matplotlib_part("figure", "--explain")


def draw(
    path: Path,
    title: str,
    plan: Plan,
    prediction: Prediction | MixedStages,
    durations: Sequence[Durations],
    *,
    is_serial: bool = False,
) -> None:
    """Draw a plan's step to path.

    durations: of each chunk of the model on one microbatch, seconds. is_serial: devices share their units and run one
    program at a time. Of many microbatches only the first are drawn, which the picture says.
    """
    check_picture(path)
    shown = _show(plan)
    bars = timeline(plan, durations, shown, is_serial=is_serial)
    busy = max(bar.end for bar in bars)
    # what comes after the last task: gradients summed over replicas, the update, moves to and from the host
    in_turn = plan.num_microbatches * sum(sum(each[:3]) for each in durations)
    tasks = in_turn if is_serial else pipeline_seconds(plan, durations)
    end = busy + max(prediction.step_seconds - tasks, 0.0)
    stages = plan.mesh.pp
    height = 3.6 + min(0.34 * stages, 6.0)
    figure = matplotlib_part("figure", "--explain").Figure(
        figsize=(11, height), dpi=150, facecolor="white", layout="constrained"
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, max(0.7, min(0.34 * stages, 6.0))))
    unit, name = _unit(end)
    fullest = max(range(stages), key=lambda stage: prediction.stages[stage].total / prediction.capacity_of(stage))
    _draw_memory(above, [bar for bar in bars if bar.stage == fullest], prediction, fullest, plan, end, unit)
    _draw_timeline(below, bars, stages, busy, end, unit)
    below.set_xlabel(f"{name} of a step{_left_out(plan, shown)}", fontsize=8.5, color=_INK)
    figure.suptitle(title, fontsize=11, weight="bold", x=0.01, ha="left", color=_INK)
    save(figure, path)


def timeline(plan: Plan, durations: Sequence[Durations], microbatches: int, *, is_serial: bool = False) -> list[Bar]:
    """Every task of the first microbatches, by stage and start.

    >>> [tuple(bar) for bar in timeline(Plan(), [Durations(1.0, 1.0, 1.0)], 1)]
    [(0, 'F', 0, 0.0, 1.0), (0, 'B', 0, 1.0, 3.0)]
    """
    if plan.mesh.pp == 1:
        (only,) = durations
        tasks = [(Task(kind, m, 0), only.of(kind, False)) for m in range(microbatches) for kind in ("F", "B")]
        return _one_after_another([(0, task, seconds) for task, seconds in tasks])
    schedule = plan.make_schedule(microbatches)
    split = schedule.split_backward
    if is_serial:
        order = schedule.order(durations)
        return _one_after_another([(s.stage, s.task, durations[s.task.chunk].of(s.task.kind, split)) for s in order])
    spans = schedule.order(durations)
    return sorted(Bar(s.stage, s.task.kind, s.task.microbatch, s.start, s.end) for s in spans)


def live_bytes(bars: Sequence[Bar], peak: float) -> list[tuple[float, float]]:
    """(time, bytes of activations) along one stage's tasks, from nothing up to peak and down again.

    A forward's activations pile up while it runs and go while the task runs that reads them last.

    >>> live_bytes([Bar(0, "F", 0, 0, 1), Bar(0, "B", 0, 1, 3)], 10.0)
    [(0.0, 0.0), (1, 10.0), (3, 0.0)]
    """
    ordered = sorted(bars, key=lambda bar: bar.start)
    last = "W" if any(bar.kind == "W" for bar in ordered) else "B"
    held, points = 0, [(0.0, 0)]
    for bar in ordered:
        points.append((bar.start, held))
        held += (bar.kind == "F") - (bar.kind == last)
        points.append((bar.end, held))
    most = max(count for _, count in points) or 1
    found = [(time, count * peak / most) for time, count in points]
    return [found[0], *(b for a, b in pairwise(found) if b != a)]


def _one_after_another(tasks: Sequence[tuple[int, Task, float]]) -> list[Bar]:
    bars, now = [], 0.0
    for stage, task, seconds in tasks:
        bars.append(Bar(stage, task.kind, task.microbatch, now, now + seconds))
        now += seconds
    return bars


def _show(plan: Plan) -> int:
    return min(plan.num_microbatches, max(_MOST_MICROBATCHES, 2 * plan.mesh.pp) // plan.mesh.pp * plan.mesh.pp)


def _left_out(plan: Plan, shown: int) -> str:
    count = plan.num_microbatches
    return "" if shown == count else f", {shown} of its {count} microbatches (the others go on in the same way)"


def _unit(seconds: float) -> tuple[float, str]:
    return (1.0, "seconds") if seconds >= 2 else (1e-3, "milliseconds") if seconds >= 2e-3 else (1e-6, "microseconds")


def _draw_memory(
    axes: Any,
    bars: Sequence[Bar],
    prediction: Prediction | MixedStages,
    stage: int,
    plan: Plan,
    end: float,
    unit: float,
) -> None:
    memory: Memory = prediction.stages[stage]
    points = [*live_bytes(bars, memory.activations), (end, 0.0)]
    times = [time / unit for time, _ in points]
    constant = {name: [getattr(memory, name) / _GIB] * len(points) for name in _PARTS if name != "activations"}
    rows = {**constant, "activations": [nbytes / _GIB for _, nbytes in points]}
    labels = [f"{name}  {getattr(memory, name) / _GIB:.2f}" for name in _PARTS]
    axes.stackplot(times, *[rows[name] for name in _PARTS], colors=list(_PARTS.values()), labels=labels, linewidth=0)
    limit = prediction.capacity_of(stage) / _GIB
    total = memory.total / _GIB
    if limit < 3 * total:  # else the memory itself would be a line at the bottom
        axes.axhline(limit, color=_LIMIT, linewidth=1.2)
        text = f"what a device has: {limit:.2f} "
        axes.text(end / unit, limit, text, ha="right", va="bottom", fontsize=8, color=_LIMIT)
    axes.set_ylim(0, max(total, limit if limit < 3 * total else 0) * 1.12)
    axes.set_ylabel("GiB", fontsize=8.5, color=_INK)
    where = f"stage {stage}, the fullest of {plan.mesh.pp}" if plan.mesh.pp > 1 else "a device"
    verdict = "fits" if prediction.fits else f"does not fit: {total - limit:.2f} GiB too much"
    heading = f"Memory of {where}: {total:.2f} GiB at the peak, of {limit:.2f} that can be used: {verdict}"
    axes.set_title(heading, fontsize=9, loc="left", color=_INK)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, reverse=True)
    _plain(axes)


def _draw_timeline(axes: Any, bars: Sequence[Bar], stages: int, busy: float, end: float, unit: float) -> None:
    patches = matplotlib_part("patches", "--explain")
    for stage in range(stages):
        axes.broken_barh([(0, end / unit)], (stage - 0.42, 0.84), facecolor=_IDLE)
        row = [bar for bar in bars if bar.stage == stage]
        spans = [(bar.start / unit, (bar.end - bar.start) / unit) for bar in row]
        colours = [_COLOURS[bar.kind] for bar in row]
        # an edge around thin bars would hide them
        edge = 0.4 if len(row) < 150 else 0.0
        axes.broken_barh(spans, (stage - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=edge)
        if end > busy:
            axes.broken_barh([(busy / unit, (end - busy) / unit)], (stage - 0.42, 0.84), facecolor=_COLOURS["end"])
        for bar in row:
            # points at 9 inches of axes; a number that does not fit its bar is left out
            if (bar.end - bar.start) / end * 9 * 72 > 5.5 * len(str(bar.microbatch)) + 3 and stages <= 18:
                middle = (bar.start + bar.end) / 2 / unit
                axes.text(middle, stage, str(bar.microbatch), ha="center", va="center", fontsize=6.5, color="white")
    axes.set(xlim=(0, end / unit), ylim=(stages - 0.45, -0.55))
    step = max(1, stages // 16)
    names = [f"stage {s}" if stages > 1 else "" for s in range(0, stages, step)]
    axes.set_yticks(range(0, stages, step), names, fontsize=8)
    kinds = [kind for kind in _MEANINGS if kind == "end" or any(bar.kind == kind for bar in bars)]
    handles = [patches.Patch(facecolor=_COLOURS[kind], label=_MEANINGS[kind]) for kind in kinds]
    handles.append(patches.Patch(facecolor=_IDLE, edgecolor="0.8", linewidth=0.5, label="waiting"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.tick_params(length=2, labelsize=8, colors=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
