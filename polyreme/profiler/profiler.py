"""Profiler and RecordEvent: jax's profiler around steps, with calls of ops and what users name in its trace."""

from __future__ import annotations

import enum
import functools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from polyreme.errors import ConfigError
from polyreme.profiler import summary as tables
from polyreme.profiler.benchmark import StepTimer
from polyreme.profiler.schedule import ProfilerState, Scheduler, scheduler_of
from polyreme.profiler.summary import SortedKeys, SummaryView
from polyreme.profiler.trace import STEP, TraceResult, read_trace


class ProfilerTarget(enum.Enum):
    """The devices that a Profiler records. jax sees the host and all devices that it computes on, so that each target
    is the same trace; one whose devices are not there is refused."""

    CPU = 0
    GPU = 1
    XPU = 2
    CUSTOM_DEVICE = 3


class RecordEvent:
    """A name for what is done between begin() and end(), or inside the block, in the trace of a Profiler that records.

    event_type: taken and told with the event; it changes nothing.

    >>> with RecordEvent("forward"):
    ...     pass
    """

    name: str
    event_type: Any

    def __init__(self, name: str, event_type: Any = "PythonUserDefined") -> None:
        self.name, self.event_type = name, event_type
        self._open: Any = None

    def begin(self) -> None:
        """It begins now."""
        kind = getattr(self.event_type, "name", str(self.event_type))
        self._open = jax.profiler.TraceAnnotation(self.name, polyreme=kind)
        self._open.__enter__()

    def end(self) -> None:
        """It is over. Raises ConfigError where it has not begun."""
        if self._open is None:
            raise ConfigError(f"RecordEvent({self.name!r}).end() without begin(); begin first, or use it in `with`")
        self._open.__exit__(None, None, None)
        self._open = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As a decorator: each call of the function."""

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with RecordEvent(self.name, self.event_type):
                return fn(*args, **kwargs)

        return call


class Profiler:
    """Records steps of a program: what calls of ops and captured functions take on the host, and what they are made of
    on the devices.

    targets: ProfilerTargets, all there are if None. scheduler: a function of the step's number (make_scheduler),
    (first, end) for the steps first to end - 1, or None for all. on_trace_ready: called with the Profiler after the
    last step of a recording; export_chrome_tracing("./profiler_log") if None. profile_memory: also a table of what is
    in use on the devices. timer_only: no trace, step_info() alone. record_shapes, with_flops, emit_nvtx,
    custom_device_types: refused where they ask for what jax's trace does not have.

    step() ends a step, and waits for the devices where a recording begins or ends. Recording costs some microseconds an
    event on the host. One Profiler records at a time.

    >>> import polyreme as paddle
    >>> with Profiler(timer_only=True) as profiler:
    ...     for _ in range(3):
    ...         _ = paddle.ones([2, 2]) + 1
    ...         profiler.step(num_samples=2)
    >>> profiler.step_info(unit="rows").endswith("rows/s")
    True
    """

    targets: tuple[ProfilerTarget, ...]
    scheduler: Scheduler
    profile_memory: bool
    timer_only: bool
    step_num: int
    current_state: ProfilerState

    def __init__(
        self,
        *,
        targets: Iterable[ProfilerTarget] | None = None,
        scheduler: Scheduler | tuple[int, int] | None = None,
        on_trace_ready: Callable[[Profiler], None] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        timer_only: bool = False,
        emit_nvtx: bool = False,
        custom_device_types: Sequence[str] = (),
        with_flops: bool = False,
    ) -> None:
        self.targets = _check_targets(targets, custom_device_types)
        for name, asked in (("record_shapes", record_shapes), ("with_flops", with_flops), ("emit_nvtx", emit_nvtx)):
            if asked:
                raise ConfigError(
                    f"Profiler: {name}=True, which jax's trace does not have; leave it out (`polyreme profile` tells "
                    "FLOP of a configuration's step, paddle.flops those of a model)"
                )
        self.scheduler = scheduler_of(scheduler)
        self.on_trace_ready = on_trace_ready if on_trace_ready is not None else export_chrome_tracing("./profiler_log/")
        self.profile_memory, self.timer_only = profile_memory, timer_only
        self.step_num = 0
        self.current_state = ProfilerState.CLOSED
        self.result: TraceResult | None = None
        """Of the last recording that is over."""
        self._timer = StepTimer()
        self._folder: str | None = None
        self._open_step: Any = None
        self._is_running = False

    def start(self) -> None:
        """The first step begins."""
        if self._is_running:
            raise ConfigError("Profiler.start: it has started; stop() it first")
        self._is_running = True
        self._timer.begin()
        if not self.timer_only:
            self.current_state = self.scheduler(self.step_num)
            self._settle(ProfilerState.CLOSED)

    def step(self, num_samples: int | None = None) -> None:
        """A step is over, of num_samples samples, and the next begins."""
        if not self._is_running:
            raise ConfigError("Profiler.step: it has not started; call start(), or use it in `with`")
        self._timer.step(num_samples)
        before = self.current_state
        self.step_num += 1
        if not self.timer_only:
            self._end_step()
            self.current_state = self.scheduler(self.step_num)
            self._settle(before)

    def stop(self) -> None:
        """The last step was over; what is recorded is given to on_trace_ready."""
        if not self._is_running:
            raise ConfigError("Profiler.stop: it has not started; call start(), or use it in `with`")
        self._is_running = False
        if not self.timer_only:
            self._end_step()
            if self._folder is not None:
                self._finish()
            self.current_state = ProfilerState.CLOSED

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step_info(self, unit: str | None = None) -> str:
        """What the steps since the last call took: reader_cost (seconds a step waited for a DataLoader), batch_cost,
        and ips, samples a second under the name `unit`; "" if there was no step."""
        return self._timer.told(unit)

    def export(self, path: str = "", format: str = "json") -> None:
        """Write the last recording: "json" for Chrome and Perfetto, "pb" for what jax's profiler wrote. Raises
        ConfigError where nothing was recorded."""
        self._recorded("export").save(path, format)

    def summary(
        self,
        sorted_by: SortedKeys = SortedKeys.CPUTotal,
        op_detail: bool = True,
        thread_sep: bool = False,
        time_unit: str = "ms",
        views: SummaryView | Sequence[SummaryView] | None = None,
    ) -> None:
        """Print tables of the last recording. op_detail: what each call is made of on the devices, below it.
        thread_sep: a table for each thread that calls. views: which tables, all if None."""
        if self.timer_only:
            print(self._timer.summary())  # noqa: T201  (what is asked for)
            return
        recorded = self._recorded("summary")
        text = tables.text_of(recorded.events, sorted_by, op_detail, thread_sep, time_unit, views, self.profile_memory)
        print(text)  # noqa: T201

    def _recorded(self, what: str) -> TraceResult:
        if self.result is None:
            raise ConfigError(
                f"Profiler.{what}: nothing was recorded yet (after {self.step_num} steps); end a step that the "
                "scheduler records, or stop()"
            )
        return self.result

    def _settle(self, before: ProfilerState) -> None:
        """Begin, end or go on with a recording, as the state of the step that begins says."""
        records = self.current_state in (ProfilerState.RECORD, ProfilerState.RECORD_AND_RETURN)
        if self._folder is not None and (not records or before is ProfilerState.RECORD_AND_RETURN):
            self._finish()
        if records:
            if self._folder is None:
                self._begin()
            self._open_step = jax.profiler.StepTraceAnnotation(STEP, step_num=self.step_num)
            self._open_step.__enter__()

    def _end_step(self) -> None:
        if self._open_step is not None:
            self._open_step.__exit__(None, None, None)
            self._open_step = None

    def _begin(self) -> None:
        _wait()
        folder = tempfile.mkdtemp(prefix="polyreme-trace-")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each Python call otherwise, which takes more time than what is measured
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(
                f"Profiler: jax's profiler does not start ({error}); stop the one that records, one at a time does"
            ) from None
        self._folder = folder

    def _finish(self) -> None:
        assert self._folder is not None
        folder, self._folder = Path(self._folder), None
        _wait()
        jax.profiler.stop_trace()
        try:
            (path,) = folder.glob("**/*.xplane.pb")
            self.result = TraceResult(read_trace(path), path.read_bytes(), _facts())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.on_trace_ready(self)


def export_chrome_tracing(dir_name: str, worker_name: str | None = None) -> Callable[[Profiler], None]:
    """An on_trace_ready that writes each recording into a folder for Chrome and Perfetto, as
    WORKER_time_DATE.paddle_trace.json; worker_name: host_HOSTpid_PID if None."""
    return _exporter(dir_name, worker_name, "json", "paddle_trace.json")


def export_protobuf(dir_name: str, worker_name: str | None = None) -> Callable[[Profiler], None]:
    """An on_trace_ready as export_chrome_tracing, which writes the protobuf that jax's profiler wrote."""
    return _exporter(dir_name, worker_name, "pb", "paddle_trace.pb")


def _exporter(dir_name: str, worker_name: str | None, format: str, ending: str) -> Callable[[Profiler], None]:
    def export(profiler: Profiler) -> None:
        worker = worker_name or f"host_{socket.gethostname()}pid_{os.getpid()}"
        at = time.strftime("%Y_%m_%d_%H_%M_%S") + f"_{time.time_ns() // 10**6 % 1000:03d}"
        Path(dir_name).mkdir(parents=True, exist_ok=True)
        profiler.export(str(Path(dir_name) / f"{worker}_time_{at}.{ending}"), format)

    return export


def _check_targets(targets: Iterable[ProfilerTarget] | None, custom: Sequence[str]) -> tuple[ProfilerTarget, ...]:
    platforms = {device.platform for device in jax.devices()}
    known = {ProfilerTarget.GPU: {"gpu", "cuda", "rocm"}, ProfilerTarget.XPU: {"xpu"}}
    chosen = tuple(ProfilerTarget) if targets is None else tuple(targets)
    for target in chosen if targets is not None else ():
        if not isinstance(target, ProfilerTarget):
            raise ConfigError(f"Profiler: targets have {target!r}; give ProfilerTargets")
        if target in known and not known[target] & platforms:
            raise ConfigError(
                f"Profiler: {target} and devices of {', '.join(sorted(platforms))}; leave targets out, or give CPU"
            )
    for name in custom:
        if name not in platforms:
            raise ConfigError(f"Profiler: custom_device_types has {name!r}; the devices are of {sorted(platforms)}")
    return chosen


def _wait() -> None:
    """Until all devices have done what they were given."""
    for device in jax.local_devices():
        jax.device_put(0, device).block_until_ready()
    jax.effects_barrier()


def _facts() -> dict[str, Any]:
    return {"devices": [str(device) for device in jax.devices()], "jax": jax.__version__}
