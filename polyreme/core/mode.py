"""What happens when an op is called: run it now, or record it. One interpreter is current at a time.

Floor: 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Mode(Protocol):
    """Interprets op calls."""

    def run(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of calling op on user arguments."""
        ...


class _Current:
    """The mode in force; one attribute, so that reading it costs one lookup."""

    __slots__ = ("mode",)
    mode: Mode


current = _Current()


@contextmanager
def using(mode: Mode) -> Iterator[Mode]:
    """Interpret op calls with mode inside the block."""
    outer = current.mode
    current.mode = mode
    try:
        yield mode
    finally:
        current.mode = outer
