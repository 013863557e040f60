"""Progress of a run: rates measured between reports, shown as a live line on a terminal and as plain lines
elsewhere."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.units import bytes_text

_WINDOW = 8  # reports a rate is averaged over: steady to read, yet it follows a change within a few


@dataclass(frozen=True)
class Reading:
    """One report of a run. Rates are None until a second report gives them a time span without the compilation."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    tokens_per_second: float | None
    utilisation: float | None
    memory_bytes: int
    eta_seconds: float | None
    elapsed_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as the log stores them."""
        return asdict(self)


class Meter:
    """Turns step numbers and the clock into rates.

    flops_per_token and peak_flops (per second, all devices) give the utilisation; leave peak_flops None where it is not
    known. The first report after the start holds the compilation and is never part of a rate.
    """

    total_steps: int
    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None

    def __init__(
        self,
        total_steps: int,
        tokens_per_step: int,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._clock, self._begin = clock, clock()
        self._points: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self._paused = 0.0

    def read(
        self, step: int, *, loss: float, learning_rate: float, grad_norm: float | None = None, memory_bytes: int = 0
    ) -> Reading:
        """Take a reading at the end of a step; memory_bytes of 0 means this process's resident memory."""
        now = self._clock()
        self._points.append((step, now - self._paused))
        rate = self._steps_per_second()
        tokens = rate * self.tokens_per_step if rate else None
        used = tokens * self.flops_per_token / self.peak_flops if tokens and self.peak_flops else None
        return Reading(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            tokens_per_second=tokens,
            utilisation=used,
            memory_bytes=memory_bytes or resident_bytes(),
            eta_seconds=(self.total_steps - step) / rate if rate else None,
            elapsed_seconds=now - self._begin,
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside (validation, a checkpoint) out of the rates."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    def _steps_per_second(self) -> float | None:
        (first_step, first), (last_step, last) = self._points[0], self._points[-1]
        return (last_step - first_step) / (last - first) if last > first and last_step > first_step else None


class ProgressDisplay:
    """Shows readings: two live lines at the bottom of a terminal, or one plain line each when output is not one.

    A reader that goes away (`| head -1`) or a full disk silences it; the run goes on. total_steps is where the run
    ends; label is what to call the utilisation ("MFU" against a data sheet); is_silent shows nothing, as all processes
    of a run but one do.
    """

    total_steps: int
    label: str

    def __init__(
        self, total_steps: int, *, label: str = "utilisation", file: TextIO | None = None, is_silent: bool = False
    ):
        self.total_steps, self.label = total_steps, label
        self._file = file or sys.stdout
        self._console = Console(file=self._file, highlight=False)
        # FORCE_COLOR, which notebooks set, asks for colours, not for a cursor that moves
        is_live = self._console.is_terminal and self._file.isatty() and not is_silent
        self._live = Live(console=self._console, refresh_per_second=8) if is_live else None
        self._is_silent = is_silent

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, reading: Reading) -> None:
        """Show one reading."""
        if self._live:
            self._live.update(self._picture(reading))
        else:
            self.note(" | ".join(self._parts(reading)))

    def note(self, text: str) -> None:
        """Print a line that stays: above the live lines, or in its turn among the plain ones."""
        if self._is_silent:
            return
        try:
            if self._live:
                self._console.print(Text(text))
            else:
                self._file.write(text + "\n")
                self._file.flush()
        except OSError:  # its reader is gone, or the disk it goes to is full
            self._is_silent = True
            silence(self._file)

    def _picture(self, reading: Reading) -> Group:
        first, *rest = self._parts(reading)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(Text(first, style="bold"), ProgressBar(total=self.total_steps, completed=reading.step, width=40))
        return Group(bar, Text("  ".join(rest)))

    def _parts(self, reading: Reading) -> list[str]:
        parts = [f"step {reading.step:>{len(str(self.total_steps))}}/{self.total_steps}", f"loss {reading.loss:.4f}"]
        parts.append(f"lr {reading.learning_rate:.2e}")
        if reading.grad_norm is not None:
            parts.append(f"grad-norm {reading.grad_norm:.3f}")
        rate = reading.tokens_per_second
        parts.append("tok/s -" if rate is None else f"tok/s {rate:,.0f}")
        if reading.utilisation is not None:
            parts.append(f"{self.label} {reading.utilisation:.1%}")
        parts.append(f"mem {bytes_text(reading.memory_bytes)}")
        parts.append("ETA -" if reading.eta_seconds is None else f"ETA {duration_text(reading.eta_seconds)}")
        return parts


@contextmanager
def told_if_slow(text: str, say: Callable[[str], None], seconds: float = 3.0) -> Iterator[None]:
    """Say what goes on inside the block, once, if that takes longer than so many seconds.

    >>> with told_if_slow("waiting", print, seconds=0.0):
    ...     time.sleep(0.1)
    waiting
    """
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def duration_text(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> duration_text(7), duration_text(75), duration_text(7384)
    ('7s', '1m15s', '2h03m')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def resident_bytes() -> int:
    """Memory this process holds now, bytes; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def silence(file: TextIO) -> None:
    """Point a stream that cannot be written at nothing, so that the interpreter's last flush does not fail."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, file.fileno())
    os.close(nothing)
