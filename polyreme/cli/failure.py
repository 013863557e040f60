"""How a command ends: every exception as a line on standard error and an exit code; tracebacks only when asked for."""

import difflib
import traceback
from typing import Any

import typer

from polyreme.errors import EXIT_CODES, EXIT_INTERNAL

EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's custom
# By version, Typer carries its own copy of click's classes or uses click's: the base is reached through a public one.
UsageProblem = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def exit_code(error: BaseException) -> int:
    """Exit code an exception ends the process with: of the nearest class in errors.EXIT_CODES, else 70.

    >>> exit_code(KeyError("x"))
    70
    """
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, UsageProblem) or is_out_of_memory(error):
        return 2
    codes = (EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
    return next(codes, EXIT_INTERNAL)


def report(error: BaseException, debug: bool) -> int:
    """Print the error as one line, after its traceback if debug; returns the exit code."""
    code = exit_code(error)
    if debug and not isinstance(error, UsageProblem):
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    typer.echo(f"error: {describe(error)}", err=True)
    return code


def describe(error: BaseException) -> str:
    """The one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UsageProblem):
        return _describe_usage(error)
    if is_out_of_memory(error):
        return (
            "out of device memory; the cheapest fixes, in order: plan.recompute=full, twice the train.accumulation, "
            f"plan.sharding=2 or more with plan.sharding_stage=3 ({_one_line(error)[:200]})"
        )
    if exit_code(error) == EXIT_INTERNAL:
        kind, text = type(error).__name__, _one_line(error)
        return f"internal error: {kind}: {text}; run again with --debug for the traceback"
    return _one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA could not allocate; recognised by name, so that jax need not be imported to ask."""
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)


def _describe_usage(error: Any) -> str:
    option = getattr(error, "option_name", None)
    if option is None:
        text = " ".join(error.format_message().split())
        return text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    known = [name for parameter in context.command.params for name in parameter.opts] if context else []
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    return f"unknown option {option}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
