"""Profiling by 1.7's names: what runs between start and stop, its tables printed and its events written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polyreme.errors import ConfigError, did_you_mean
from polyreme.fluid.absent import refusing
from polyreme.profiler import Profiler, SortedKeys

__all__ = ["cuda_profiler", "profiler", "reset_profiler", "start_profiler", "stop_profiler"]

_STATES = ("CPU", "GPU", "All")
_OPTIONS = ("Default", "OpDetail", "AllOpDetail")
_KEYS = {
    None: SortedKeys.CPUTotal,
    "default": SortedKeys.CPUTotal,
    "total": SortedKeys.CPUTotal,
    "max": SortedKeys.CPUMax,
    "min": SortedKeys.CPUMin,
    "ave": SortedKeys.CPUAvg,
}


class _ProfilerSlot:
    """The Profiler that records, one at a time, and whether its tables have details."""

    def __init__(self) -> None:
        self.profiler: Profiler | None = None
        self.has_details = False

    def start(self) -> None:
        self.profiler = Profiler(on_trace_ready=lambda _: None)
        self.profiler.start()


_slot = _ProfilerSlot()


def start_profiler(state: str, tracer_option: str = "Default") -> None:
    """Record from here on. state: CPU, GPU or All, which are one here: jax sees the host and all its devices.
    tracer_option: with OpDetail or AllOpDetail the tables say what each call is made of on the devices. Raises
    ConfigError for another word, or where it has started."""
    _check("state", state, _STATES)
    _check("tracer_option", tracer_option, _OPTIONS)
    if _slot.profiler is not None:
        raise ConfigError("start_profiler: it has started; call stop_profiler first")
    _slot.has_details = tracer_option != "Default"
    _slot.start()


def stop_profiler(sorted_key: str | None = None, profile_path: str = "/tmp/profile") -> None:
    """Print the tables of what was recorded, and write it to a file that paddle.profiler.load_profiler_result reads.
    sorted_key: default and total by time on the host, max, min or ave. Raises ConfigError for another key, "calls"
    among them, or where it has not started."""
    _check("sorted_key", sorted_key, tuple(_KEYS))
    recorded = _stop("stop_profiler")
    recorded.summary(_KEYS[sorted_key], op_detail=_slot.has_details)
    Path(profile_path).parent.mkdir(parents=True, exist_ok=True)
    recorded.export(profile_path, "pb")


def reset_profiler() -> None:
    """Forget what was recorded so far, and go on. Raises ConfigError where it has not started."""
    _stop("reset_profiler")
    _slot.start()


@contextmanager
def profiler(
    state: str,
    sorted_key: str | None = None,
    profile_path: str = "/tmp/profile",
    tracer_option: str = "Default",
) -> Iterator[None]:
    """Inside the block, start_profiler and then stop_profiler."""
    _check("sorted_key", sorted_key, tuple(_KEYS))
    start_profiler(state, tracer_option)
    try:
        yield
    finally:
        stop_profiler(sorted_key, profile_path)


@contextmanager
def cuda_profiler(
    output_file: str, output_mode: str | None = None, config: Sequence[str] | None = None
) -> Iterator[None]:
    """Inside the block, record what runs on the devices, and write it to output_file as profiler() does.

    Raises ConfigError for config, which chose counters of nvprof, and for output_mode other than None and "kvp".
    """
    _check("output_mode", output_mode, (None, "kvp"))
    if config is not None:
        raise ConfigError("cuda_profiler: config chose counters of nvprof; leave it out")
    with profiler("GPU", None, output_file):
        yield


def _stop(asked: str) -> Profiler:
    recorded, _slot.profiler = _slot.profiler, None
    if recorded is None:
        raise ConfigError(f"{asked}: it has not started; call start_profiler first")
    recorded.stop()
    return recorded


def _check(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        words = [choice for choice in choices if choice is not None]
        raise ConfigError(f"profiler: {name}={value!r}; give one of {', '.join(words)}{did_you_mean(value, words)}")


__getattr__ = refusing("fluid.profiler", __name__)
