"""How a command ends: every exception as a line on standard error and an exit code; tracebacks only when asked for."""

import contextlib
import difflib
import errno
import sys
import traceback
from typing import Any

import typer

from polyreme.errors import EXIT_CODES, EXIT_INTERNAL, Explained, is_out_of_memory

EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's custom
# By version, Typer carries its own copy of click's classes or uses click's: the base is reached through a public one.
UsageProblem: type = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


# of the machine and what it was told, not of polyreme; with what to do about each
_MACHINE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a path that this user may use"),
    errno.ENAMETOOLONG: "give a shorter path",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    errno.EIO: "look at the disk and the system's log",
    errno.ESTALE: "the network's disk has gone: mount it again",
}


def exit_code(error: BaseException) -> int:
    """Exit code an exception ends the process with: of the nearest class in errors.EXIT_CODES, else 70.

    A full disk, a path that may not be used and memory that is not there are no faults of polyreme: 2.

    >>> exit_code(KeyError("x"))
    70
    """
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if (
        isinstance(error, (UsageProblem, MemoryError))
        or is_out_of_memory(error)
        or _of_machine(error)
        or _of_locale(error)
    ):
        return 2
    codes = (EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
    return next(codes, EXIT_INTERNAL)


def report(error: BaseException, debug: bool) -> int:
    """Print the error as one line, after its traceback if debug; below it what is noted on it, such as the layer, and
    last what tells more. Returns the exit code."""
    code = exit_code(error)
    if debug and not isinstance(error, UsageProblem):
        _tell("".join(traceback.format_exception(error)))
    _tell(f"error: {describe(error)}\n")
    if isinstance(error, Explained):
        _tell("".join(f"{note}\n" for note in getattr(error, "__notes__", ())))
    return code


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told: the exit code says it
        typer.echo(text, err=True, nl=False)


def describe(error: BaseException) -> str:
    """The one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UsageProblem):
        return _describe_usage(error)
    if is_out_of_memory(error):
        return f"out of device memory: {_one_line(error)[:200]}"
    if isinstance(error, MemoryError) and not isinstance(error, Explained):
        return f"out of memory: {_one_line(error)}; make the data, the model or the batch smaller"
    if isinstance(error, OSError) and _of_machine(error):
        where = "" if error.filename is None else f"{_shortened(str(error.filename))}: "
        return f"{where}{error.strerror}; {_MACHINE[error.errno or 0]}"
    if isinstance(error, UnicodeEncodeError) and _of_locale(error):
        return f"{_shortened(error.object)!r} cannot be a path in this locale ({error.encoding}); set LC_ALL=C.UTF-8"
    if exit_code(error) == EXIT_INTERNAL:
        kind, text = type(error).__name__, _one_line(error)
        return f"internal error: {kind}: {text}; run again with --debug for the traceback"
    return _one_line(error)


def _of_machine(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _MACHINE


def _of_locale(error: BaseException) -> bool:
    """Whether a path has characters that the encoding of paths has not."""
    return isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding()


def _shortened(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:200]}..."


def _describe_usage(error: Any) -> str:
    if not hasattr(error, "possibilities"):  # not an unknown option: no argument, an option without its value
        text = " ".join(error.format_message().split())
        text = text[:1].lower() + text[1:]
        is_unlike_any = text.startswith("no such command") and "Did you mean" not in text
        return f"{text.rstrip('.')}; {error.ctx.command_path} --help lists them" if is_unlike_any else text
    option, context = error.option_name, error.ctx
    known = [name for parameter in context.command.params for name in parameter.opts] if context else []
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    return f"unknown option {option}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
