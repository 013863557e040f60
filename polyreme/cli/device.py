"""`polyreme device`: which devices there are, whether one computes what it must, how fast it is."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.cli import output_file
from polyreme.errors import ConfigError

device_app = typer.Typer(name="device", no_args_is_help=True, help="List, check and measure devices.")

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Such as cpu, gpu:0; the default device.")]
Library = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PJRT library to register under NAME first, as device.register.")
]


@device_app.command("list")
def list_devices(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """List the devices, those of registered plugins among them."""
    from polyreme import device

    names = device.get_available_device()
    facts = [{"device": name, **vars(device.get_device_properties(name))} for name in names]
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    default = device.get_device()
    for fact in facts:
        mark = "*" if fact["device"] == default else " "
        typer.echo(f"{mark} {fact['device']:12} {fact['total_memory'] / 2**30:8.1f} GiB  {_kind(fact)}")


def _kind(fact: dict[str, Any]) -> str:
    capability = "" if fact["major"] is None else f", capability {fact['major']}.{fact['minor']}"
    return f"{fact['name']}{capability}"


@device_app.command()
def check(
    name: Name = None,
    library: Library = None,
    rows: Annotated[str, typer.Option(metavar="PATTERN", help="Names of rows and checks, such as 'matmul*'.")] = "*",
    sample: Annotated[int, typer.Option(min=0, help="So many rows drawn at random; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draw and the order.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no row after so long; 0 for no limit.")] = 0,
    row_seconds: Annotated[float, typer.Option(min=1, help="A row that takes longer is ended.")] = 120,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 1,
    compiled_for: Annotated[
        str, typer.Option("--compile-for", metavar="TARGET", help="Compile rows for v5e:2x2, say, or cuda; run none.")
    ] = "",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="FILE.json and FILE.md are written.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The JSON instead of the page.")] = False,
) -> None:
    """Check that a device computes what every device must: the op contract, and what surrounds it.

    Each row runs in another process, so that one that crashes is that row's failure. Exits 1 if something failed.
    Example: polyreme device check gpu:0 --sample 200 --jobs 4 --output gpu
    """
    if output is not None:
        for ending in (".json", ".md"):
            output_file.check_writable(output.with_name(output.name + ending))
    if compiled_for and (name is not None or library is not None):
        given = "--library" if name is None else name
        raise ConfigError(f"--compile-for {compiled_for}: no device is used; leave {given} out")
    name = compiled_for or _register_name(name, library)
    from polyreme.conformance import kit

    options = kit.KitOptions(rows, sample, seed, seconds, row_seconds, jobs, bool(compiled_for))
    report = kit.run(name, options, _show)
    text = json.dumps(report.to_dict(), indent=1)
    if output is not None:
        output_file.write(output.with_name(output.name + ".json"), text + "\n")
        output_file.write(output.with_name(output.name + ".md"), report.page())
    typer.echo(text if as_json else report.page())
    if not report.is_conforming:
        raise typer.Exit(1)


def _show(outcome: Any) -> None:
    if outcome.status not in ("passed", "skipped"):
        typer.echo(f"{outcome.status}: {outcome.name}: {outcome.detail}", err=True)


@device_app.command()
def bench(
    name: Name = None,
    library: Library = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Measure a device: products, copies, transfers, a call of an op, a captured training step."""
    name = _register_name(name, library)
    from polyreme.conformance import speed

    figures = speed.measure(name)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    for what, (value, unit) in figures.items():
        typer.echo(f"{what:36} {value:12.4g} {unit}")


def _register_name(name: str | None, library: Path | None) -> str:
    """The device's name, whose library every process that is started will register."""
    if library is not None:
        if name is None:
            raise ConfigError("--library: give the NAME under which it is to be known")
        before = os.environ.get("POLYREME_DEVICES", "")
        plugin = name.partition(":")[0]
        os.environ["POLYREME_DEVICES"] = ",".join(filter(None, [before, f"{plugin}={library.absolute()}"]))
        from polyreme import device

        device.register(plugin, library)
    from polyreme import device

    return device.get_device() if name is None else name
