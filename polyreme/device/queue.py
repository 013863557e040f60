"""Streams and events over the one queue that XLA keeps for a device.

XLA orders a device's work itself, by what needs what, so streams here order nothing: all of them are that
queue. What one asks of them is true: synchronize waits, query looks, events time.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import jax

from polyreme.core.devices.place import Place
from polyreme.device.chosen import device as chosen_device
from polyreme.device.chosen import place_of
from polyreme.errors import ConfigError, DeviceError


def _pending(place: Place) -> list[Any]:
    """Arrays on the device that are not computed yet."""
    device = place.device()
    return [a for a in jax.live_arrays() if not a.is_deleted() and device in a.devices() and not a.is_ready()]


def synchronize(device: Any = None) -> None:
    """Wait until everything sent to the device (the default one, if none is given) has run, host calls included."""
    place = place_of(device)
    jax.block_until_ready(_pending(place))
    # work whose results nobody holds any more
    jax.device_put(0, place.device()).block_until_ready()
    jax.effects_barrier()


class Event:
    """A point in a device's queue.

    enable_timing: record() waits for what was sent before and notes the time, which elapsed_time needs. blocking: how
    synchronize() waits; it always blocks without spinning. interprocess: raises ConfigError, there are no such events.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise ConfigError("Event: interprocess=True; events belong to one process here, leave it out")
        self.enable_timing = enable_timing
        self.blocking = blocking
        self._before: list[Any] = []
        self._seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Put the event at the end of the queue of a stream's device, by default the current one's."""
        place = (stream or current_stream()).place
        if self.enable_timing:
            synchronize(place)
            self._seconds = time.perf_counter()
        else:
            self._before = _pending(place)

    def query(self) -> bool:
        """Whether everything before the event has run; True before record()."""
        return all(a.is_deleted() or a.is_ready() for a in self._before)

    def synchronize(self) -> None:
        """Wait until everything before the event has run."""
        jax.block_until_ready([a for a in self._before if not a.is_deleted()])
        self._before = []

    def wait(self, stream: Stream | None = None) -> None:
        """Let what a stream is given from now on run after the event: it does, the queue is one."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to end_event. DeviceError unless both were recorded with enable_timing."""
        times = [e._seconds for e in (self, end_event)]
        if times[0] is None or times[1] is None:
            raise DeviceError("elapsed_time needs two events of Event(enable_timing=True) that were both recorded")
        return (times[1] - times[0]) * 1e3

    def __repr__(self) -> str:
        return f"Event(enable_timing={self.enable_timing})"


class Stream:
    """A device's queue. priority is kept, and orders nothing: XLA decides. stream_base: raises ConfigError."""

    place: Place

    def __init__(self, device: Any = None, priority: int = 2, stream_base: Any = None) -> None:
        if stream_base is not None:
            raise ConfigError("Stream: stream_base wraps a vendor's handle, and XLA runs on streams of its own")
        if priority not in (-1, 0, 1, 2):
            raise ConfigError(f"Stream: priority={priority}; give -1 or 1 (high), 0 or 2 (low)")
        self.place = place_of(device)
        self.place.device()
        self.priority = priority

    @property
    def device(self) -> Place:
        """Where the queue is."""
        return self.place

    def synchronize(self) -> None:
        """Wait until everything sent to the device has run."""
        synchronize(self.place)

    def query(self) -> bool:
        """Whether everything sent to the device has run."""
        return not _pending(self.place)

    def record_event(self, event: Event | None = None) -> Event:
        """An event, a new one by default, at the end of the queue."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Run what comes after event: it does, unless the event is of another device; then the host waits for it."""
        event.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """Run what comes after all that another stream has; between devices the host waits for it."""
        if stream.place != self.place:
            stream.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    def __repr__(self) -> str:
        return f"Stream({self.place})"


class _StreamOfThread(threading.local):
    """The stream set in this thread, None for that of the default device."""

    def __init__(self) -> None:
        self.stream: Stream | None = None


_current = _StreamOfThread()


def current_stream(device: Any = None) -> Stream:
    """The stream in force, or a device's."""
    if device is None and _current.stream is not None:
        return _current.stream
    return Stream(device)


def set_stream(stream: Stream) -> Stream:
    """Make a stream the current one; returns the one before."""
    if not isinstance(stream, Stream):
        raise TypeError(f"set_stream takes a Stream, got {type(stream).__name__}")
    before = current_stream()
    _current.stream = stream
    return before


class StreamContext:
    """A block with another current stream, and new Tensors on its device; None changes nothing."""

    def __init__(self, stream: Stream | None = None) -> None:
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"stream_guard takes a Stream, got {type(stream).__name__}")
        self.stream = stream
        self._outer: list[tuple[Stream | None, chosen_device]] = []

    def __enter__(self) -> Self:
        block = chosen_device(None if self.stream is None else self.stream.place)
        self._outer.append((_current.stream, block))
        block.__enter__()
        if self.stream is not None:
            _current.stream = self.stream
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream, block = self._outer.pop()
        block.__exit__()


stream_guard = StreamContext


def get_stream_from_external(data_ptr: int, device: Any = None) -> Stream:
    """Raises NotImplementedError: XLA runs on streams of its own."""
    raise NotImplementedError(
        f"get_stream_from_external({data_ptr:#x}): XLA runs programs on streams of its own and takes none; "
        "synchronize both sides, or exchange arrays by DLPack"
    )


def is_current_stream_capturing() -> bool:
    """False: no CUDA graph is ever captured by hand; XLA makes its own (to_static captures whole programs)."""
    return False
