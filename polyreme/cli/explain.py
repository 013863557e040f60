"""`polyreme explain`: what an error means, when it comes and what helps."""

import json
from typing import Annotated

import typer

from polyreme.errors import EXIT_CODES, Explained, error_classes, explanation


def explain(
    code: Annotated[str, typer.Argument(metavar="[CODE]", help="PR101, or a class; all if left out.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of lines.")] = False,
) -> None:
    """Say what an error means, when it is raised and what helps.

    Example: polyreme explain PR101
    """
    kinds = [explanation(code)] if code else error_classes()
    if as_json:
        typer.echo(json.dumps([facts(kind) for kind in kinds], indent=2))
    elif code:
        typer.echo(_describe(kinds[0]))
    else:
        typer.echo("\n".join(f"{kind.code}  {kind.__name__:<18}  {_meaning(kind)}" for kind in kinds))


def facts(kind: type[Explained]) -> dict[str, object]:
    """What there is to say of an error class, as plain values."""
    exit_code = next((EXIT_CODES[base] for base in kind.__mro__ if base in EXIT_CODES), None)
    builtin = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
    return {
        "code": kind.code,
        "name": kind.__name__,
        "is_a": builtin,
        "exit_code": exit_code,
        "meaning": _meaning(kind),
        "cause": kind.cause,
        "cure": kind.cure,
    }


def _meaning(kind: type[Explained]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _describe(kind: type[Explained]) -> str:
    return f"{kind.code} {kind.__name__}: {_meaning(kind)}\n\nCause: {kind.cause}\n\nCure: {kind.cure}"
