"""`polyreme schedule`: show, compare and draw pipeline schedules."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from polyreme.errors import ConfigError
from polyreme.mesh.schedule import Schedule, make_schedule
from polyreme.mesh.schedules import SCHEDULES, ScheduleKind
from polyreme.recipes.planning import schedule_drawing as drawing

_STYLES = {"F": "white on blue", "B": "black on green", "W": "black on yellow"}


def schedule(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help=f"One of {', '.join(SCHEDULES)}.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Stages of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a batch.")] = 8,
    virtual: Annotated[
        int | None,
        typer.Option(min=1, help="Chunks per stage; by default the fewest. With --all, where there is a choice."),
    ] = None,
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timeline: .png, .svg or .pdf.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Compare all schedules.")] = False,
) -> None:
    """Show a pipeline schedule: its timeline, bubble and live activations, with F = B = W = 1.

    Example: polyreme schedule 1F1B --stages 4 --microbatches 8 --draw 1f1b.png
    """
    if draw is not None:
        drawing.check_picture(draw)
    if every:
        if name is not None:
            raise ConfigError(f"schedule {name} --all: give a name or --all, not both")
        chosen = [make_schedule(each, stages, microbatches, _chunks(kind, virtual)) for each, kind in SCHEDULES.items()]
        typer.echo(f"stages: {stages}, microbatches: {microbatches}\n\n{drawing.comparison(chosen)}")
    else:
        if name is None:
            raise ConfigError(f"polyreme schedule needs the name of one ({', '.join(SCHEDULES)}) or --all")
        least = SCHEDULES.named(name).least_virtual
        chosen = [make_schedule(name, stages, microbatches, least if virtual is None else virtual)]
        _show(chosen[0])
    if draw is not None:
        drawing.draw(chosen, draw)
        typer.echo(f"\ndrawn: {draw}")


def _chunks(kind: ScheduleKind, virtual: int | None) -> int:
    has_choice = kind.most_virtual > kind.least_virtual
    return virtual if has_choice and virtual is not None else kind.least_virtual


def _show(chosen: Schedule) -> None:
    typer.echo(f"{drawing.title_text(chosen)}\n")
    timeline = Text(drawing.timeline_text(chosen, shutil.get_terminal_size((120, 24)).columns))
    for kind, style in _STYLES.items():
        timeline.highlight_regex(rf"\b{kind}[0-9][0-9a-z.]*-*", style)
    console = Console(file=sys.stdout, highlight=False)  # plain where standard output is not a terminal
    console.print(timeline, soft_wrap=True)
    tasks = " ".join(str(len(table)) for table in chosen.tables)
    typer.echo(
        f"\n{drawing.legend_text(chosen)}\n\n"
        f"bubble                 {drawing.bubble_text(chosen)}\n"
        f"peak live activations  {drawing.live_text(chosen)}, per stage, in microbatches of a whole stage\n"
        f"tasks                  {tasks}, per stage"
    )
