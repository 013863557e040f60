"""`polyreme examples`: the configurations and texts that come with polyreme, to begin with."""

from pathlib import Path
from typing import Annotated

import typer


def examples(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where they go; here if left out.")] = Path(),
) -> None:
    """Write the configurations and texts that come with polyreme into a folder; nothing that is there is changed.

    Example: polyreme examples first && cd first && polyreme pretrain configs/gpt_kjv.yaml
    """
    from polyreme.recipes.pictures import has_matplotlib
    from polyreme.recipes.shipped import copy_examples

    written = copy_examples(folder)
    for path in written:
        typer.echo(path)
    if not has_matplotlib():
        typer.echo(
            "these runs draw their loss: pip install 'polyreme[logs]', or add log.plot=false log.tensorboard=false"
        )
    prefix = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"{len(written)} files written; next: {prefix}polyreme pretrain configs/gpt_kjv.yaml")
