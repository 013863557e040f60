"""paddle.distributed.fleet.utils.timer_helper: named stopwatches, in seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import jax

from polyreme.errors import ConfigError, NotReadyError

_log = logging.getLogger("polyreme.fleet")


class Timer:
    """A stopwatch that adds up; start and stop wait for what the device was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.elapsed_ = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start; ConfigError if it runs."""
        if self._since is not None:
            raise ConfigError(f"timer {self.name!r} runs already; stop it first")
        jax.effects_barrier()
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop and add up; ConfigError unless it runs."""
        if self._since is None:
            raise ConfigError(f"timer {self.name!r} does not run; start it first")
        jax.effects_barrier()
        self.elapsed_ += time.perf_counter() - self._since
        self._since = None

    def reset(self) -> None:
        """Begin again from zero."""
        self.elapsed_, self._since = 0.0, None

    def elapsed(self, reset: bool = True) -> float:
        """Seconds so far, of a run that goes on too; back to zero if reset."""
        running = self._since is not None
        if running:
            self.stop()
        seconds = self.elapsed_
        if reset:
            self.reset()
        if running:
            self.start()
        return seconds


class Timers:
    """Stopwatches by name: timers("forward").start()."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str, use_event: bool = False) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Log the milliseconds of these stopwatches, over normalizer."""
        shown = [f"{n}: {self.timers[n].elapsed(reset) * 1000 / normalizer:.2f}" for n in names if n in self.timers]
        _log.info("time (ms) %s", " | ".join(shown))

    def info(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The milliseconds of these stopwatches, over normalizer, by name."""
        return {n: self.timers[n].elapsed(reset) * 1000 / normalizer for n in names if n in self.timers}


class _Global:
    """The stopwatches that set_timers made for the process."""

    timers: Timers | None = None


def is_timer_initialized() -> bool:
    """Whether set_timers was called."""
    return _Global.timers is not None


def set_timers() -> None:
    """Make the stopwatches that get_timers gives; again changes nothing."""
    if _Global.timers is None:
        _Global.timers = Timers()


class _NoTimersError(NotReadyError, AssertionError):
    """What trainers that print stopwatches catch where there are none."""


def get_timers() -> Timers:
    """The stopwatches of the process; an AssertionError before set_timers, as there."""
    if _Global.timers is None:
        raise _NoTimersError("timer_helper.get_timers: there are no stopwatches yet; call set_timers first")
    return _Global.timers
