"""Recorded steps as pictures: who sends to whom, what runs where, and each stage's tasks beside the planned ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from polyreme.distributed.comm_report.report import axes_text
from polyreme.recipes.pictures import matplotlib_part, save
from polyreme.recipes.profiling.step_profile import PARTS, MeasuredTask, Send, StepProfile, layers_of, planned_tasks
from polyreme.units import bytes_text

COMMUNICATION, PLACEMENT, TIMELINE = "communication.svg", "placement.svg", "timeline.svg"
_MOST_DEVICES = 64
_MOST_LAYERS = 32
_INK, _IDLE = (0.13, 0.14, 0.17), (0.955, 0.955, 0.965)
_AXES = ((0.16, 0.44, 0.76), (0.85, 0.48, 0.30), (0.06, 0.58, 0.45), (0.55, 0.42, 0.66), (0.93, 0.62, 0.13),
         (0.75, 0.1, 0.1), (0.35, 0.35, 0.38), (0.2, 0.65, 0.75))  # fmt: skip
_PARTS = dict(zip(PARTS, (*_AXES[:5], (0.8, 0.8, 0.82)), strict=True))
_TASKS = {"F": _AXES[0], "B": _AXES[2], "W": _AXES[4]}
_MEANINGS = {"F": "forward", "B": "backward", "W": "weight gradients"}


def draw(profile: StepProfile, sends: Sequence[Send], folder: Path) -> None:
    """Write communication.svg, placement.svg, and under pipeline stages timeline.svg into a folder. Raises ConfigError
    where matplotlib is not installed."""
    _draw_communication(profile, sends, folder / COMMUNICATION)
    _draw_placement(profile, folder / PLACEMENT)
    if profile.tasks:
        _draw_timeline(profile, folder / TIMELINE)


def _figure(width: float, height: float) -> Any:
    figure = matplotlib_part("figure", "polyreme profile")
    return figure.Figure(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")


# who sends to whom


def _draw_communication(profile: StepProfile, sends: Sequence[Send], path: Path) -> None:
    places = _places(profile)
    links, wires, times = _links(profile, sends)
    names = sorted(wires, key=lambda name: -wires[name])
    colours = {name: _AXES[place % len(_AXES)] for place, name in enumerate(names)}
    most = max(wires.values(), default=1.0)
    width = max(x for x, _ in places.values()) + 2
    height = max(y for _, y in places.values()) + 2
    figure = _figure(5.2 + 1.2 * width, max(3.6, 1.2 * height, 0.62 * len(names) + 1.4))
    graph, bars = figure.subplots(1, 2, width_ratios=[max(1.2 * width, 3.0), 5.2])
    patches = matplotlib_part("patches", "polyreme profile")
    for place, name in enumerate(names):
        for first, second in sorted(links[name]):
            if first in places and second in places:
                graph.add_patch(
                    patches.FancyArrowPatch(
                        places[first],
                        places[second],
                        connectionstyle=f"arc3,rad={0.1 + 0.09 * (place % 4)}",
                        arrowstyle="-",
                        linewidth=0.8 + 5 * (wires[name] / most) ** 0.5,
                        color=colours[name],
                        alpha=0.75,
                        zorder=1,
                    )
                )
    for device, (x, y) in places.items():
        graph.add_patch(patches.Circle((x, y), 0.24, facecolor="white", edgecolor=_INK, linewidth=1.2, zorder=2))
        graph.text(x, y, device.rpartition(":")[2], ha="center", va="center", fontsize=8, color=_INK, zorder=3)
    graph.set(xlim=(-1, width - 1), ylim=(height - 1, -1), xticks=[], yticks=[], aspect="equal")
    graph.spines[:].set_visible(False)
    left_out = len(profile.devices) - len(places)
    title = f"{profile.plan.mesh}: who sends to whom" + (f" (the first {len(places)} devices)" if left_out else "")
    graph.set_title(title, loc="left", fontsize=10, weight="bold")
    _draw_axes_bars(bars, names, wires, times, colours)
    save(figure, path)


def _places(profile: StepProfile) -> dict[str, tuple[float, float]]:
    """The position of each device in the drawing: the inner half of the axes of more than one device runs to the right,
    the outer half down."""
    mesh = profile.plan.mesh
    live = [axis for axis in mesh.order if mesh.degree(axis) > 1]
    down, right = live[: len(live) // 2], live[len(live) // 2 :]
    places = {}
    for index, device in enumerate(profile.devices[:_MOST_DEVICES]):
        at = mesh.coordinates(index)
        x, y = (_position([(at[axis], mesh.degree(axis)) for axis in axes]) for axes in (right, down))
        places[device] = (x, y)
    return places


def _position(digits: Sequence[tuple[int, int]]) -> float:
    """Along one direction: neighbours of the innermost axis at 1, wider for axes outside of it."""
    position, step = 0.0, 1.0
    for digit, degree in reversed(digits):
        position += digit * step
        step = step * degree + 0.4
    return position


def _links(
    profile: StepProfile, sends: Sequence[Send]
) -> tuple[dict[str, set[tuple[str, str]]], dict[str, float], dict[str, list[float]]]:
    """By axes: pairs of neighbours in a ring, bytes a device sends on the mean, and seconds of transfer, waiting and
    hidden."""
    links: dict[str, set[tuple[str, str]]] = defaultdict(set)
    wires: dict[str, float] = defaultdict(float)
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in profile.collectives:
        name = axes_text(row.axes) if row.groups else "programs between the step's"
        for group in row.groups:
            links[name].update(pairwise(group))
            if len(group) > 2:
                links[name].add((group[0], group[-1]))
        share = sum(map(len, row.groups)) / len(profile.devices) or 1.0
        wires[name] += row.wire * share
        times[name] = [a + b * share for a, b in zip(times[name], (row.transfer, row.waiting, row.hidden), strict=True)]
    for send in sends:
        wires["pp"] += send.times * send.nbytes / profile.plan.mesh.pp
        times["pp"] = times["pp"]
        for line in profile.plan.mesh.groups("pp"):
            links["pp"].update((profile.devices[a], profile.devices[b]) for a, b in pairwise(line))
    return links, wires, times


def _draw_axes_bars(
    bars: Any,
    names: Sequence[str],
    wires: dict[str, float],
    times: dict[str, list[float]],
    colours: dict[str, Any],
) -> None:
    parts = (("transfer", 1.0), ("waiting for the group", 0.45), ("hidden behind computation", 0.18))
    longest = max((sum(each) for each in times.values()), default=0.0) or 1.0
    for line, name in enumerate(names):
        left = 0.0
        for seconds, (_, alpha) in zip(times[name], parts, strict=True):
            bars.barh(line, 1e3 * seconds, left=left, height=0.42, color=colours[name], alpha=alpha)
            left += 1e3 * seconds
        timed = _milliseconds(left) if left else "not timed"
        text = f"{name}: {bytes_text(wires[name])} a device and step, {timed}"
        bars.text(0, line - 0.34, text, fontsize=8.5, color=colours[name], va="center")
    bars.set(ylim=(max(len(names), 1) - 0.4, -0.7), xlim=(0, 1e3 * longest * 1.05), yticks=[])
    bars.set_xlabel("ms a step on a device: " + ", ".join(name for name, _ in parts) + " (paler)", fontsize=8)
    bars.tick_params(labelsize=8)
    bars.spines[["top", "right", "left"]].set_visible(False)


# what runs where


def _draw_placement(profile: StepProfile, path: Path) -> None:
    layers = layers_of(profile.rows)
    heaviest = sorted(layers, key=lambda name: -sum(layers[name].values()))[:_MOST_LAYERS]
    shown = sorted(heaviest, key=lambda name: (name == "", _natural(name)))
    devices = profile.devices[:_MOST_DEVICES]
    figure = _figure(4.6 + 0.42 * len(devices), 3.0 + 0.21 * len(shown))
    above, below = figure.subplots(2, 1, height_ratios=[2.2, 0.21 * len(shown) + 0.6], sharex=True)
    bottom = [0.0] * len(devices)
    for part, colour in _PARTS.items():
        values = [1e3 * profile.device_parts[device][part] for device in devices]
        above.bar(range(len(devices)), values, bottom=bottom, color=colour, label=part, width=0.8)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    above.set_title("Each device's step, ms", loc="left", fontsize=10, weight="bold")
    above.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    above.tick_params(labelsize=8, bottom=False)
    above.spines[["top", "right"]].set_visible(False)
    table = [[1e3 * layers[name].get(device, float("nan")) for device in devices] for name in shown]
    image = below.imshow(table, aspect="auto", cmap="YlGnBu", vmin=0, interpolation="none")
    below.set_facecolor(_IDLE)
    below.set_yticks(range(len(shown)), [name or "(no layer)" for name in shown], fontsize=7)
    below.set_xticks(range(len(devices)), [device.rpartition(":")[2] for device in devices], fontsize=7)
    below.set_xlabel("device", fontsize=8)
    more = f"\nthe {len(shown)} that take most of {len(layers)}" if len(shown) < len(layers) else ""
    below.set_title(f"Computing of each layer on each device, ms{more}", loc="left", fontsize=10, weight="bold")
    figure.colorbar(image, ax=below, shrink=0.6).ax.tick_params(labelsize=7)
    save(figure, path)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


# each stage's tasks


def _draw_timeline(profile: StepProfile, path: Path) -> None:
    planned = planned_tasks(profile)
    end = 1e3 * max(task.end for task in (*planned, *profile.tasks))
    stages = profile.plan.mesh.pp
    figure = _figure(11, 1.6 + 2 * (0.5 + 0.36 * stages))
    panels = figure.subplots(2, 1, sharex=True)
    titles = ("Measured, the last step recorded", "Planned, every task as long as it was on the mean and nothing else")
    for axes, tasks, title in zip(panels, (profile.tasks, planned), titles, strict=True):
        _draw_tasks(axes, tasks, stages, end)
        axes.set_title(
            f"{title}: {_milliseconds(1e3 * max(task.end for task in tasks))}", loc="left", fontsize=9.5, weight="bold"
        )
    patches = matplotlib_part("patches", "polyreme profile")
    kinds = [kind for kind in _TASKS if any(task.kind == kind for task in planned)]
    handles = [patches.Patch(facecolor=_TASKS[kind], label=_MEANINGS[kind]) for kind in kinds]
    panels[1].set_xlabel("ms", fontsize=8)
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    save(figure, path)


def _draw_tasks(axes: Any, tasks: Sequence[MeasuredTask], stages: int, end: float) -> None:
    for task in tasks:
        start, length = 1e3 * task.start, 1e3 * (task.end - task.start)
        axes.barh(
            task.stage,
            length,
            left=start,
            height=0.82,
            color=_TASKS[task.kind],
            edgecolor="white",
            linewidth=0.5,
            alpha=0.9,
        )
        if length > 0.012 * end:
            axes.text(
                start + length / 2, task.stage, task.microbatch, ha="center", va="center", fontsize=7, color="white"
            )
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=8)
    axes.set(xlim=(0, end), ylim=(stages - 0.5, -0.5), facecolor=_IDLE)
    axes.tick_params(labelsize=8, left=False)
    axes.spines[:].set_visible(False)


def _milliseconds(value: float) -> str:
    """To three digits, thousands apart.

    >>> _milliseconds(0.01234), _milliseconds(2958.6)
    ('0.0123 ms', '2,959 ms')
    """
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"
