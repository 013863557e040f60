"""A pipeline schedule as a reader sees it: timeline in text, one line of figures, and a picture.

matplotlib comes with the extra polyreme[logs] and is imported when a picture is asked for.
Never imports: jax.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError
from polyreme.mesh.schedule import Schedule, bubble_formula, measured_bubble, published_bubble
from polyreme.mesh.timeline import Span
from polyreme.recipes.pictures import matplotlib_part, save

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes that a picture may have."""

_COLOURS = {"F": (0.16, 0.44, 0.76), "B": (0.06, 0.58, 0.45), "W": (0.93, 0.62, 0.13)}
_MEANINGS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_IDLE, _INK = (0.955, 0.955, 0.965), (0.13, 0.14, 0.17)
_ROW, _HEAD, _GAP, _FOOT, _LEFT, _RIGHT, _LEAST_WIDTH = 0.36, 0.66, 0.16, 0.34, 0.8, 0.85, 9.0
"""Inches: a stage's row, the title over a timeline, the space under it, the legend, and the margins."""


def title_text(schedule: Schedule) -> str:
    """Name and sizes of a schedule.

    >>> from polyreme.mesh.schedule import make_schedule
    >>> title_text(make_schedule("VPP", 4, 1, 2))
    'VPP: 4 stages of 2 chunks, 1 microbatch'
    """
    stages = _count(schedule.num_stages, "stage", "stages")
    chunks = f" of {schedule.num_virtual} chunks" if schedule.num_virtual > 1 else ""
    return f"{schedule.name}: {stages}{chunks}, {_count(schedule.num_microbatches, 'microbatch', 'microbatches')}"


def timeline_text(schedule: Schedule, width: int) -> str:
    """The timeline under unit costs: one row per stage, F, B or W with the microbatch, "." for an idle unit of time.

    With several chunks per stage a letter follows, a for the stage's first. A timeline wider than width characters goes
    on below.

    >>> from polyreme.mesh.schedule import make_schedule
    >>> print(timeline_text(make_schedule("1F1B", 2, 3), 80))
    time     0              5              10
    stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
    stage 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    """
    spans = schedule.order()
    labels = {span: _label(schedule, span) for span in spans}
    cell, units = max(map(len, labels.values())) + 1, round(max(span.end for span in spans))
    rows = [list(("." + " " * (cell - 1)) * units) for _ in range(schedule.num_stages)]
    for span, label in labels.items():
        start, stop = round(span.start) * cell, round(span.end) * cell
        length = stop - start - 1
        rows[span.stage][start:stop] = [*label.ljust(length, "-" if span.end - span.start > 1 else " "), " "]
    ruler = list(" " * (cell * units + 8))
    for unit in range(0, units, 5):
        ruler[unit * cell : unit * cell + len(str(unit))] = str(unit)
    names = ["time", *(f"stage {stage}" for stage in range(schedule.num_stages))]
    margin = max(map(len, names)) + 2
    step = max(1, (width - margin) // cell) * cell
    panels = [
        "\n".join(
            (name.ljust(margin) + "".join(row[at : at + step])).rstrip()
            for name, row in zip(names, [ruler[: cell * units], *rows], strict=True)
        )
        for at in range(0, cell * units, step)
    ]
    return "\n\n".join(panels)


def legend_text(schedule: Schedule) -> str:
    """The legend of timeline_text, in one line."""
    signs = [f"{kind} {_meaning(schedule, kind)}" for kind in schedule.kinds]
    chunks = [f"a..{_chunk_letter(schedule, schedule.num_virtual - 1)} chunks of a stage"]
    return ", ".join([*signs, *(chunks if schedule.num_virtual > 1 else []), ". idle, one column a unit of time"])


def bubble_text(schedule: Schedule) -> str:
    """Idle part of the step under unit costs, and the published figure beside it where there is one.

    >>> from polyreme.mesh.schedule import make_schedule
    >>> bubble_text(make_schedule("1F1B", 4, 8))
    '27.3% (formula (p-1)/(m+p-1) = 27.3%)'
    >>> bubble_text(make_schedule("ZBVPP", 4, 8, 2))
    "5.9%, 0.0% of a stage's own span (formula 0 = 0.0%)"
    """
    text, value = f"{schedule.bubble_fraction():.1%}", published_bubble(schedule)
    formula = bubble_formula(schedule)
    if formula and formula.is_of_span:
        text += f", {measured_bubble(schedule):.1%} of a stage's own span"
    if formula is None or value is None:
        return text
    return f"{text} (formula {formula.text} = {value:.1%})"


def live_text(schedule: Schedule) -> str:
    """Most activations live on each stage, in microbatches of a whole stage; until B too, where W holds them longer.

    >>> from polyreme.mesh.schedule import make_schedule
    >>> live_text(make_schedule("ZBH1", 4, 8))
    '4 4 4 4 (4 3 2 1 until B)'
    """

    def row(until: str | None) -> str:
        return " ".join(f"{_live(schedule, stage, until):.3g}" for stage in range(schedule.num_stages))

    text, until_b = row(None), row("B")
    return text if text == until_b else f"{text} ({until_b} until B)"


def comparison(schedules: Sequence[Schedule]) -> str:
    """A table of schedules for the same stages and microbatches: chunks, bubble, live activations and tasks."""
    head = ("schedule", "chunks", "tasks", "peak live", "peak live activations per stage", "bubble")
    rows = [
        (
            schedule.name,
            str(schedule.num_virtual),
            str(sum(map(len, schedule.tables))),
            f"{max(_live(schedule, stage, None) for stage in range(schedule.num_stages)):.3g}",
            live_text(schedule),
            bubble_text(schedule),
        )
        for schedule in schedules
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def check_picture(path: Path) -> None:
    """Raise ConfigError if a picture could not be written there, before any work is done for it."""
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--draw {path}: a picture ends in {', '.join(PICTURES)}; give such a name")
    if not path.parent.is_dir():
        raise ConfigError(f"--draw {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"--draw {path}: is a folder; give the name of a file in it")
    matplotlib_part("figure", "--draw")


def draw(schedules: Sequence[Schedule], path: Path) -> None:
    """Draw timelines under unit costs, one above the other, on a scale where every whole stage's forward is as long."""
    check_picture(path)
    longest = max(schedule.makespan() / schedule.num_virtual for schedule in schedules)
    unit = _unit_inches(schedules, longest)
    heights = [_ROW * each.num_stages for each in schedules]
    width = max(_LEFT + longest * unit + _RIGHT, _LEAST_WIDTH)
    height = sum(heights) + (_HEAD + _GAP) * len(heights) + _FOOT
    figure = matplotlib_part("figure", "--draw").Figure(figsize=(width, height), dpi=150, facecolor="white")
    bottom = height
    for schedule, rows in zip(schedules, heights, strict=True):
        bottom -= _HEAD + rows
        box = (_LEFT / width, bottom / height, longest * unit / width, rows / height)
        _draw_timeline(figure.add_axes(box), schedule, longest, unit)
        bottom -= _GAP
    _draw_legend(figure, schedules, _LEFT / width, 0.15 / height)
    save(figure, path)


def _draw_timeline(axes: Any, schedule: Schedule, longest: float, unit: float) -> None:
    patches = matplotlib_part("patches", "--draw")
    spans, cell = schedule.order(), unit / schedule.num_virtual
    end = max(span.end for span in spans) / schedule.num_virtual
    size = min(8.5, cell * 72 / (0.62 * len(str(schedule.num_microbatches - 1)) + 0.35))
    for stage in range(schedule.num_stages):
        axes.add_patch(patches.Rectangle((0, stage - 0.43), end, 0.86, facecolor=_IDLE, linewidth=0))
        text = f"peak {_live(schedule, stage, None):.3g}"
        axes.text(end + 0.1 / unit, stage, text, va="center", fontsize=8, color=_INK)
    for span in spans:
        colour = _shade(schedule, span)
        x, length = span.start / schedule.num_virtual, (span.end - span.start) / schedule.num_virtual
        box = patches.Rectangle(
            (x, span.stage - 0.43), length, 0.86, facecolor=colour, edgecolor="white", linewidth=0.6
        )
        axes.add_patch(box)
        if size >= 3:  # points; smaller is not legible at 150 dots an inch
            ink = "white" if _brightness(colour) < 0.62 else _INK
            number = str(span.task.microbatch)
            axes.text(x + length / 2, span.stage, number, ha="center", va="center", fontsize=size, color=ink)
    axes.set(xlim=(0, longest), ylim=(schedule.num_stages - 0.45, -0.55), xticks=[])
    axes.set_yticks(range(schedule.num_stages), [f"stage {stage}" for stage in range(schedule.num_stages)], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _draw_title(axes, schedule)


def _draw_title(axes: Any, schedule: Schedule) -> None:
    peak = max(_live(schedule, stage, None) for stage in range(schedule.num_stages))
    # beside the rows too; a longer list would run out of the picture
    live = f"per stage {live_text(schedule)}" if schedule.num_stages <= 16 else f"{peak:.3g}"
    figures = f"bubble {bubble_text(schedule)}   |   peak live activations {live}"
    for text, points, style in (
        (title_text(schedule), 22, {"fontsize": 11, "weight": "bold"}),
        (figures, 8, {"fontsize": 8.5, "color": "0.3"}),
    ):
        axes.annotate(text, (0, 1), (0, points), xycoords="axes fraction", textcoords="offset points", **style)


def _draw_legend(figure: Any, schedules: Sequence[Schedule], left: float, bottom: float) -> None:
    patches = matplotlib_part("patches", "--draw")
    shown = [kind for kind in _MEANINGS if any(kind in schedule.kinds for schedule in schedules)]
    handles = [patches.Patch(facecolor=_COLOURS[kind], label=_legend_meaning(schedules, kind)) for kind in shown]
    handles.append(patches.Patch(facecolor=_IDLE, edgecolor="0.8", linewidth=0.5, label="idle"))
    if any(schedule.num_virtual > 1 for schedule in schedules):
        handles.append(
            patches.Patch(facecolor=_lighter(_COLOURS["F"], 0.55), label="lighter: earlier chunk of a stage")
        )
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left, bottom),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.1,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.4,
    )


def _unit_inches(schedules: Sequence[Schedule], longest: float) -> float:
    """Length of a stage's forward: enough for a number in the narrowest cell, unless the picture gets too wide."""
    most = max(schedule.num_virtual * (0.5 if schedule.num_virtual > 1 else 1) for schedule in schedules)
    return min(0.36 * most, 60 / longest)  # 60 inches are 9,000 dots


def _legend_meaning(schedules: Sequence[Schedule], kind: str) -> str:
    meanings = dict.fromkeys(_meaning(each, kind) for each in schedules if kind in each.kinds)
    return f"{kind}  {' or, split, '.join(meanings)}"


def _meaning(schedule: Schedule, kind: str) -> str:
    return "input gradients" if kind == "B" and schedule.split_backward else _MEANINGS[kind]


def _label(schedule: Schedule, span: Span) -> str:
    chunk = schedule.chunks_of(span.stage).index(span.task.chunk)
    return f"{span.task.kind}{span.task.microbatch}{_chunk_letter(schedule, chunk)}"


def _chunk_letter(schedule: Schedule, index: int) -> str:
    if schedule.num_virtual == 1:
        return ""
    return chr(ord("a") + index) if schedule.num_virtual <= 26 else f".{index}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _live(schedule: Schedule, stage: int, until: str | None) -> float:
    return schedule.peak_live(stage, until) / schedule.num_virtual


def _shade(schedule: Schedule, span: Span) -> tuple[float, ...]:
    """The kind's colour, mixed with white for all chunks of the stage but the last."""
    last = schedule.num_virtual - 1
    white = 0.55 * (1 - schedule.chunks_of(span.stage).index(span.task.chunk) / last) if last else 0.0
    return _lighter(_COLOURS[span.task.kind], white)


def _lighter(colour: Sequence[float], white: float) -> tuple[float, ...]:
    return tuple(part + (1 - part) * white for part in colour)


def _brightness(colour: Sequence[float]) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue
