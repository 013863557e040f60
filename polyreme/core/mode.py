"""The interpreter of op calls, which runs an op now or records it. One is current at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Mode(Protocol):
    """Interprets op calls."""

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of calling op on user arguments."""
        ...


class _ModeInForce:
    """The mode in force; one attribute, so that reading it costs one lookup.

    plain: what runs ops where nothing else was asked for. around: a mode made around it, once there are Tensors that
    need one. usual: both together.
    """

    __slots__ = ("around", "mode", "plain", "usual")
    mode: Mode
    plain: Mode
    usual: Mode

    def __init__(self) -> None:
        self.around: Callable[[Mode], Mode] | None = None

    def settle(self, plain: Mode | None = None, around: Callable[[Mode], Mode] | None = None) -> None:
        """Change what usually runs ops, or what stands around it; a mode in use in a `using` block stays there."""
        before = getattr(self, "usual", None)
        self.plain = self.plain if plain is None else plain
        self.around = self.around if around is None else around
        self.usual = self.plain if self.around is None else self.around(self.plain)
        if getattr(self, "mode", None) is before:
            self.mode = self.usual


current: _ModeInForce = _ModeInForce()


@contextmanager
def using(mode: Mode) -> Iterator[Mode]:
    """Interpret op calls with mode inside the block."""
    outer = current.mode
    was_usual = outer is current.usual
    current.mode = mode
    try:
        yield mode
    finally:
        current.mode = current.usual if was_usual else outer
