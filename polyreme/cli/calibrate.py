"""`polyreme calibrate`: measure this machine for the planner."""

import os
from pathlib import Path
from typing import Annotated

import typer

from polyreme.cli.output_file import check_writable, write
from polyreme.errors import ConfigError
from polyreme.planner.calibration import calibration_file, to_yaml


def calibrate(
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many virtual CPU devices to make; by default CPU_NUM, else 8.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write; by default the user's cache folder.")
    ] = None,
) -> None:
    """Measure matmul, collectives, memory and dispatch on this machine's devices, in under a minute.

    `polyreme plan --devices N` then plans for what was measured. The file is a cluster file: `polyreme plan --cluster`
    takes it too, on any machine. On a processor the devices share its cores, and all are kept busy while measuring.

    Example: polyreme calibrate --output this_machine.yaml
    """
    path = calibration_file() if output is None else output
    _check(path, is_own=output is None)
    if devices is not None:
        os.environ["CPU_NUM"] = str(devices)
    os.environ.setdefault("CPU_NUM", "8")  # of no effect on accelerators
    from polyreme.recipes.planning import calibrate as recipe

    cluster = recipe.run(typer.echo)
    write(path, f"# measured by `polyreme calibrate`\n{to_yaml(cluster)}")
    count = f"{cluster.num_devices} device{'s' if cluster.num_devices > 1 else ''} of kind {cluster.device.name!r}"
    typer.echo(f"{count}: written to {path}; `polyreme plan CONFIG --devices {cluster.num_devices}` uses it")


def _check(path: Path, *, is_own: bool) -> None:
    """Raise ConfigError before a minute of measuring, if the result could not be written."""
    if is_own:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path.parent}: cannot be made ({error.strerror}); give --output FILE") from None
    check_writable(path)
