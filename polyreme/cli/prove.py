"""`polyreme prove`: a configuration's plan against one device, and a served model's requests against company."""

import os
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError, NumericsError


def prove(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="YAML configuration, such as configs/gpt_kjv.yaml; with --serve a model."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's, dotted.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps to compare, 2 if left out.")] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show that a model's texts are the same bits alone and in any company.")
    ] = False,
) -> None:
    """Show that a configuration's plan trains exactly as one device does, or what a served model writes in company.

    Compares loss, every gradient, every updated weight and optimizer array, and checkpoints moved from one to the
    other. On CPU as many virtual devices are made as the plan has, unless CPU_NUM says otherwise. Ends with code 5 if
    anything differs by more than rounding explains.

    With --serve: published weights, a run or a fetched name, as polyreme serve takes. Requests are written alone, then
    all at once, in another order, after known beginnings, beside others that come and leave, and with too few blocks
    for all; tokens and log-probabilities are compared bit by bit.

    Example: polyreme prove configs/gpt_kjv.yaml plan.pp=2 plan.dp=1
    """
    if serve:
        if overrides or steps is not None:
            raise ConfigError("prove --serve: settings and --steps are for training; leave them out")
        _prove_served(str(config))
        return
    from polyreme.recipes import config_file

    device, count = config_file.devices(config, overrides or [])
    if device in (None, "cpu"):  # before jax is loaded, as weights that are fine-tuned do
        os.environ.setdefault("CPU_NUM", str(count))
    loaded = config_file.load(config, overrides or [])
    from polyreme.recipes.planning import proving

    proof = proving.run(loaded.config, steps=2 if steps is None else steps)
    typer.echo(str(proof))
    first = proof.first_difference
    if first is not None:
        raise NumericsError(
            f"the plan does not equal one device: {first.what} {first.name} of step {first.step} differs by "
            f"{first.error:.3g}, rounding explains {first.tolerance:.3g}; please report it with this configuration"
        )


def _prove_served(weights: str) -> None:
    from polyreme.generation.company import check_company
    from polyreme.models.files import packages
    from polyreme.recipes.weights.trained import load_writer

    model, tokenizer = load_writer(packages.resolve(weights))
    differences = []
    for check in check_company(model, tokenizer.end, tokenizer.vocab_size):
        typer.echo(str(check))
        differences += [check.difference] if check.difference else []
    if differences:
        raise NumericsError(f"company changes what a request gets: {differences[0]}; please report it with the model")
