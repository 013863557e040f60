"""The end of a rank that fails: it reports first, so that the other ranks end with it and name it.

Replaces sys.excepthook, threading.excepthook and sys.exit, and registers an exit function that runs before
jax's own, which would wait minutes for ranks that will never come.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn

from polyreme.distributed.job.verdict import FINE
from polyreme.errors import EXIT_CODES, EXIT_INTERNAL

_EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's custom
_LONGEST_TRACEBACK = 20_000  # characters


class Failure(NamedTuple):
    """The failure of this rank: an exception, or (error None) sys.exit with an error's code."""

    line: str
    code: int
    error: BaseException | None = None
    traceback: str = ""


ReportError = Callable[[Failure], bool]
"""Tells the others; whether this rank is the first to have failed."""


class LastWords:
    """Hooks that report how this process ends: report_error for errors, report_leaving for a normal end."""

    def __init__(self, rank: int, report_error: ReportError, report_leaving: Callable[[], None]) -> None:
        self._rank = rank
        self._report_error, self._report_leaving = report_error, report_leaving
        self._pid = os.getpid()
        self._status: object = None
        self._show, self._show_in_thread, self._exit = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook = self._raised
        threading.excepthook = self._raised_in_thread
        sys.exit = self._note_exit
        atexit.register(self._leave)

    def forget_exit(self) -> None:
        """The program goes on: an earlier sys.exit was caught."""
        self._status = None

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a forked child
            self._show(kind, error, trace)
            return
        code = exit_code(error)
        text = "".join(traceback.format_exception(kind, error, trace))[-_LONGEST_TRACEBACK:]
        if self._report_error(Failure(one_line(error), code, error, text)):
            print_error(f"rank {self._rank} raised:")
            self._show(kind, error, trace)
        leave_now(code)

    def _raised_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is None or issubclass(arguments.exc_type, SystemExit):
            self._show_in_thread(arguments)
            return
        self._raised(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _note_exit(self, status: object = None, /) -> NoReturn:
        self._status = status
        raise SystemExit(status)

    def _leave(self) -> None:
        if os.getpid() != self._pid:
            return
        status = self._status
        code = status if isinstance(status, int) else 0 if status is None else 1
        if code in FINE:
            self._report_leaving()
            return
        self._report_error(Failure(f"sys.exit({status!r})", code))
        leave_now(code)


def exit_code(error: BaseException) -> int:
    """The exit code an exception ends a rank with: of the nearest class in errors.EXIT_CODES, else 70."""
    if isinstance(error, KeyboardInterrupt):
        return _EXIT_INTERRUPTED
    codes = (EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
    return next(codes, EXIT_INTERNAL)


def one_line(error: BaseException) -> str:
    """Class and message, cut to a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def print_error(text: str) -> None:
    """To standard error, past Python's buffers: another thread may hold their locks for ever."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def leave_now(code: int) -> NoReturn:
    """End the process without Python's exit functions; what was printed gets half a second to be written out."""
    flushing = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started any more
        flushing.start()
        flushing.join(0.5)
    os._exit(code)


def hold_aborts() -> None:
    """Delay abort() in this process by six seconds, in which the watchdog may learn why, say so and leave.

    jax aborts a rank as soon as it loses rank 0, a few milliseconds before or after the watchdog hears of it. The
    handler is sleep(3) of the C library itself, called with the signal's number: it needs neither Python nor memory.
    """
    if sys.platform == "linux" and not faulthandler.is_enabled():
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
