"""`polyreme dash`: runs in a browser."""

from pathlib import Path
from typing import Annotated

import typer


def dash(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Output folders of runs, or folders that hold some.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 6006,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines look without a key.")] = False,
) -> None:
    """Show runs side by side while they train: curves, samples, faults, checkpoints, pictures. Reads only.

    Example: polyreme dash runs
    """
    from polyreme.dashboard import server
    from polyreme.errors import ConfigError
    from polyreme.serving.guard import Access, is_local

    if not insecure and not is_local(host):
        raise ConfigError(
            f"--host {host} is reached from other machines, which could read every run; give --insecure if they may, "
            "or leave --host out and use ssh -L"
        )
    access = Access.of(host, is_insecure=insecure)
    server.serve(runs, typer.echo, host=host, port=port, access=access)
