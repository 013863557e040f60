"""`polyreme comm`: every collective of a training step, with its bytes beside the formula's."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer


def comm(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration of a pretraining run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's, dotted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    balance: Annotated[
        float | None, typer.Option(min=0.0, help="FLOP that hide one byte on the wire; by default the backend's.")
    ] = None,
    topology: Annotated[
        str, typer.Option(help="Compile for a TPU slice that need not be here, such as v5e:2x4; takes libtpu.")
    ] = "",
) -> None:
    """List the collectives of a training step: kind, mesh axes, layer, bytes, and what the formula says they must be.

    The step is compiled for the plan's devices and not run. On CPU as many virtual devices are made as the plan has,
    unless CPU_NUM says otherwise.
    Example: polyreme comm configs/gpt_kjv.yaml plan.sharding_stage=1 --topology v5e:2x4
    """
    from polyreme.recipes import config_file

    device, count = config_file.devices(config, overrides or [])
    if device == "cpu" or topology:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if device in (None, "cpu") and not topology:
        os.environ.setdefault("CPU_NUM", str(count))
    loaded = config_file.load(config, overrides or [])
    from polyreme.recipes.planning import communication

    found = communication.report(loaded.config, balance, topology)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.as_text())
