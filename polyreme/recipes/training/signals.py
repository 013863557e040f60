"""Stopping a run politely: the first SIGTERM or Ctrl-C asks the loop to save and leave, the second leaves at once."""

import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn, Self

from polyreme.errors import EXIT_PREEMPTED

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context in which SIGTERM and SIGINT set `requested` instead of ending the process.

    The loop reads `requested` between steps, saves, and calls `leave`. Signals are read by a thread of their own, so
    the second one ends the process (exit 128 + signal number) even while the main thread sits inside a compiled step.
    Enter it in the main thread, after jax.distributed.initialize, which takes SIGTERM for itself.

    >>> with StopRequest() as stop:
    ...     stop.requested
    False
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = {number: signal.signal(number, _let_the_thread_see_it) for number in _SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="polyreme-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()  # the thread reads the end of the stream and returns
        self._thread.join()
        self._reader.close()

    def leave(self, step: int, resume: Sequence[str]) -> NoReturn:
        """Say how to go on from the step just saved and exit 75; resume is the command line that does.

        Empty in one of several processes, which are started again by what started them.
        """
        name = self.signal.name if self.signal else "request"
        how = f"Resume with:\n  {shlex.join(resume)}" if resume else "Start all processes again as before to go on."
        _say(f"stopped by {name} after step {step}; state is saved. {how}")
        raise SystemExit(EXIT_PREEMPTED)

    def _listen(self) -> None:
        while data := self._reader.recv(16):
            for byte in data:
                if byte in _SIGNALS:
                    self._receive(signal.Signals(byte))

    def _receive(self, number: signal.Signals) -> None:
        if self.requested:
            _say(f"{number.name} again: leaving now, without saving")
            os._exit(128 + number)  # sys.exit would only end this thread
        self.signal = number
        _say(f"{number.name}: finishing this step, then saving; once more to leave at once")


def _let_the_thread_see_it(number: int, frame: object) -> None:
    """A handler must be installed for Python to write the number to the wake-up descriptor; it has nothing to add."""


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever read our messages may be gone already
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
