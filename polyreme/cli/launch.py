"""`polyreme launch`: hands its words to the launcher, which knows where those of the script begin."""

from collections.abc import Sequence

import typer


def register(app: typer.Typer, panel: str) -> None:
    """Add the command to the list that --help shows, under a heading."""
    app.command(
        "launch",
        add_help_option=False,
        rich_help_panel=panel,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Start a script in several processes, on one node or several, and watch over them.",
    )(_launch)


def run(words: Sequence[str]) -> int:
    """Launch what the words after `polyreme launch` say; returns the exit code."""
    from polyreme.distributed import launch

    return launch.main(words)


def _launch(context: typer.Context) -> None:
    raise typer.Exit(run(context.args))
