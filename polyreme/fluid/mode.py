"""Which code of a Fluid script is recorded: all of it, outside `dygraph.guard()`.

In 1.7 nobody calls enable_static: a Program is what code builds unless it is told otherwise. Here the first
call that builds one (any of fluid.layers, fluid.data, an optimizer) switches static mode on in its thread, as
enable_static() would, so that `x + y` of two Variables, outside any fluid call, is recorded as well. Importing
polyreme.fluid does nothing, and a function of fluid.layers that is called on Tensors with values, before a Program is
built, runs at once. `dygraph.guard()` runs what is inside as it is called, and disable_static() leaves static
mode until the next such call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyreme.core import state
from polyreme.core.devices import place as places
from polyreme.program.mode import disable_static, enable_static, in_dynamic_mode


class _Guards(threading.local):
    """Whether this thread is inside dygraph.guard(), or after enable_dygraph()."""

    def __init__(self) -> None:
        self.dygraph = False


_guards = _Guards()


def begin() -> None:
    """Record from here on, unless dygraph was asked for or a function is being captured.

    `if variable:` then asks whether there is a Variable, as in 1.x; of one number, or of truth values, it is an error.
    `x - y`, y with fewer dims of which the first is open: it stands under the first dim of x.
    """
    if state.watch.active is None and not _guards.dygraph:
        enable_static()
    recorder = state.recorder()
    if recorder is not None:
        recorder.as_in_1x = True


def in_dygraph_mode() -> bool:
    """Whether code runs as it is called: inside dygraph.guard()."""
    return _guards.dygraph and in_dynamic_mode()


def enable_dygraph(place: Any = None) -> None:
    """Run code as it is called from now on in this thread, on place if given."""
    disable_static(place)
    _guards.dygraph = True


def disable_dygraph() -> None:
    """Build Programs again."""
    _guards.dygraph = False
    begin()


@contextmanager
def guard(place: Any = None) -> Iterator[None]:
    """Run code as it is called inside the block, on place if given."""
    recorder, outer = state.watch.active, _guards.dygraph
    before = places.default_place()
    if place is not None:
        places.set_device(place)
    state.watch.active, _guards.dygraph = None, True
    try:
        yield
    finally:
        state.watch.active, _guards.dygraph = recorder, outer
        if place is not None:
            places.set_device(before)
