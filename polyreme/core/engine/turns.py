"""Programs one at a time: on several virtual CPU devices a program has ended before the next is called.

Each device of a program takes a thread of XLA's pool, which has as many as there are devices, and a collective holds it
until all devices have come. Without asynchronous dispatch XLA still puts a program off whose inputs are being copied,
and with it all programs that take its results: a device may have 32 of them waiting, and the call of one more holds its
thread until one of them has ended, for which there is no thread. See
docs/decisions/0006-one-program-at-a-time-on-virtual-devices.md.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.core import Tracer

Results = TypeVar("Results")


class Turns:
    """are_taken: whether programs of this process wait for each other; set before the first array exists."""

    are_taken: bool

    __slots__ = ("are_taken",)

    def __init__(self) -> None:
        self.are_taken = False

    def end(self, results: Results) -> Results:
        """The results of a call, when its program has ended if turns are taken.

        Tracers stay as they are: one that is asked to wait searches all that was traced for the words of an error.
        """
        if self.are_taken:
            jax.block_until_ready([r for r in jax.tree.leaves(results) if not isinstance(r, Tracer)])
        return results


turns: Turns = Turns()
"""Of this process."""
