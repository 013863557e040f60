"""`polyreme prove`: a configuration's plan against one device, tensor by tensor."""

import os
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import NumericsError


def prove(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration, such as configs/gpt_kjv.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's, dotted.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 2,
) -> None:
    """Show that a configuration's plan trains exactly as one device does.

    Compares loss, every gradient, every updated weight and optimizer array, and checkpoints moved from one to the
    other. On CPU as many virtual devices are made as the plan has, unless CPU_NUM says otherwise. Ends with code 5 if
    anything differs by more than rounding explains.

    Example: polyreme prove configs/gpt_kjv.yaml plan.pp=2 plan.dp=1
    """
    from polyreme.recipes import config_file

    loaded = config_file.load(config, overrides or [])
    if loaded.config.device in (None, "cpu"):
        os.environ.setdefault("CPU_NUM", str(loaded.config.plan.num_devices))
    from polyreme.recipes import proving

    proof = proving.run(loaded.config, steps=steps)
    typer.echo(str(proof))
    first = proof.first_difference
    if first is not None:
        raise NumericsError(
            f"the plan does not equal one device: {first.what} {first.name} of step {first.step} differs by "
            f"{first.error:.3g}, rounding explains {first.tolerance:.3g}; please report it with this configuration"
        )
