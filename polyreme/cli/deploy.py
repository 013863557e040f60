"""`polyreme export` and `polyreme infer`: a trained model written as an artefact, and an artefact run on files."""

import os
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT_OR_CONFIG", help="Output folder of a run, or the YAML it was run with."),
    ],
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="Where to write: PREFIX.json and its other files.")],
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens in a row; several times for several programs. By default as it was trained."),
    ] = None,
    platform: Annotated[
        list[str] | None,
        typer.Option(help="cpu, cuda, tpu or rocm; several times for several. By default cpu, cuda and tpu."),
    ] = None,
    to: Annotated[
        str, typer.Option(help="xla; iree compiles it for this processor by IREE too, and compares.")
    ] = "xla",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a call; by default open, and 1 with --to iree, which takes none.")
    ] = None,
) -> None:
    """Write the model of a run's newest checkpoint as programs, weights and a manifest, to be run without its code.

    Takes token ids, int64 of batch x length, gives logits of batch x length x vocabulary; the batch size is open.
    Example: polyreme export runs/gpt_kjv deploy/kjv --length 64 --length 128
    """
    if to not in ("xla", "iree"):
        raise ConfigError(f"--to {to}: give xla or iree")
    if to == "iree" and platform:
        raise ConfigError(f"--to iree with --platform {platform[0]}: its program is for this processor; leave that out")
    if prefix.is_dir():
        raise ConfigError(f"{prefix}: a folder; give FOLDER/NAME, what the files' names begin with")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run
    folder = _run_folder(source)
    from polyreme.export.program import PLATFORMS
    from polyreme.recipes.inference import deploy

    if to == "iree":
        lines = deploy.export_iree(folder, prefix, length or [], batch or 1)
    else:
        lines = deploy.export(folder, prefix, length or [], platform or PLATFORMS, batch)
    for line in lines:
        typer.echo(line)


def infer(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="What the artefact's files begin with.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="An input's value; one for each input.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write each output to, as NAME.npy.")] = None,
    describe: Annotated[bool, typer.Option("--describe", help="Say what the artefact is; run nothing.")] = False,
    device: Annotated[str, typer.Option(help="cpu, gpu, gpu:1, tpu or a plug-in's name.")] = "cpu",
    repeat: Annotated[int, typer.Option(min=0, help="Times to run it again, to say how long that takes.")] = 20,
) -> None:
    """Run an artefact on arrays from files, or say what it is.

    Example: polyreme infer deploy/kjv --input tokens=ids.npy --output out
    """
    chosen = dict(_pair(text) for text in inputs or [])
    if len(chosen) < len(inputs or []):
        raise ConfigError(f"--input is given twice for one name: {' '.join(inputs or [])}")
    prefix = prefix.with_name(prefix.name.removesuffix(".json"))
    if describe and (chosen or output):
        raise ConfigError("--describe runs nothing; leave --input and --output out")
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from polyreme.export import read
    from polyreme.recipes.inference import deploy

    lines = deploy.describe(read(prefix)) if describe else deploy.infer(prefix, chosen, output, device, repeat)
    for line in lines:
        typer.echo(line)


def _pair(text: str) -> tuple[str, Path]:
    name, sign, file = text.partition("=")
    if not (name and sign and file):
        raise ConfigError(f"--input {text}: give NAME=FILE.npy")
    return name, Path(file)


def _run_folder(source: Path) -> Path:
    """The output folder of a run, given itself or the run's configuration."""
    if source.is_dir():
        return source
    if not source.exists():
        raise ConfigError(f"{source}: no such folder or file; give the output folder of a run, such as runs/gpt_kjv")
    from polyreme.recipes import config_file

    return Path(config_file.load(source, []).config.output)
