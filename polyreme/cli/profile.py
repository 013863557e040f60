"""`polyreme profile`: where the time of a configuration's steps goes, and what its plan communicates and places."""

import os
from pathlib import Path
from typing import Annotated

import typer

from polyreme import flags
from polyreme.cli.data import ConfigPath, Overrides


def profile(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 3,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the trace and the tables.")] = Path("profile"),
) -> None:
    """Record some steps of a run: time by operator and layer, collectives, placement, memory, what to change.

    Nothing is saved of the run. The folder gets trace.json.gz (ui.perfetto.dev opens it), summary.txt and
    summary.json. Under polyreme launch all ranks are in one trace. On CPU as many virtual devices are made as the plan
    has, unless CPU_NUM says otherwise.
    Example: polyreme profile configs/gpt_kjv.yaml train.global_batch=8 --output profile
    """
    from polyreme.recipes import config_file

    device, count = config_file.devices(config, overrides or [])
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if device in (None, "cpu"):
        os.environ.setdefault("CPU_NUM", str(max(1, count // flags.trainers_num())))
    loaded = config_file.load(config, overrides or [])
    from polyreme.recipes.profiling import report as profile_report
    from polyreme.recipes.profiling import run as profiling

    recording = profiling.record(loaded.config, loaded.folder, steps)
    if recording is None:  # the first rank has all
        return
    said = profile_report.write(recording, output)
    whole = f"every table is in {output / profile_report.TEXT}"
    typer.echo("\n\n".join([profile_report.in_short(recording).rstrip(), *said, whole, f"written: {output}"]))
