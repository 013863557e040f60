"""`polyreme run`: hands its words to Python, with polyreme in place of PaddlePaddle."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from polyreme.cli.failure import report
from polyreme.errors import ConfigError


def register(app: typer.Typer, panel: str) -> None:
    """Add the command to the list that --help shows, under a heading."""
    app.command(
        "run",
        add_help_option=False,
        rich_help_panel=panel,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Run a script written for PaddlePaddle, with polyreme as paddle.",
    )(_run)


def run(words: Sequence[str]) -> int:
    """Run what the words after `polyreme run` say; returns only if it cannot: the exit code."""
    from polyreme.paddle_scripts import command

    if list(words[:1]) in (["--help"], ["-h"]):
        sys.stdout.write(command.HELP)
        return 0
    try:
        command.run(words)
    except ConfigError as error:
        return report(error, debug=False)
    return 0


def _run(context: typer.Context) -> None:
    raise typer.Exit(run(context.args))
