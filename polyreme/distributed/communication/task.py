"""Task: a communication under way."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyreme.core.state import Tracer


class CollectiveTask:
    """The result of a collective call: `wait()` blocks until its values are there.

    finish: what is left to do once they are, such as writing what a rank received into its Tensor.
    """

    def __init__(self, arrays: Sequence[Any], finish: Callable[[], None] | None = None) -> None:
        self._arrays: list[Any] = [a for a in arrays if not isinstance(a, Tracer)]
        self._finish = finish

    def is_completed(self) -> bool:
        """True if wait() would not block."""
        return all(a.is_ready() for a in self._arrays)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the values are there; returns True. timeout is there for the signature: the watchdog's holds."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        jax.block_until_ready(self._arrays)
        return True

    def synchronize(self) -> None:
        """wait()."""
        self.wait()
