"""Counts the programs that a block of code has compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """Seconds that each program took which was compiled, or loaded from the compile cache, inside the block."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
