"""A process forked from one that has used a device: XLA's threads are not in it, and what waits for them never ends.

There a Refusal watches the Tensors of every thread, in the place where a capture would, so that what asks the watcher
meets it and nothing else pays for it.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from polyreme.core.engine import backend
from polyreme.errors import DeviceError


class _Fork:
    """The state of this process as a fork: whether its parent had used a device, and the watcher that then refuses
    calls."""

    def __init__(self) -> None:
        self.was_used = False
        self.refusal: Any = None

    def before(self) -> None:
        """Look whether this process, about to be forked, has used a device: asked in the child, jax might wait."""
        self.was_used = backend.is_started()

    def in_child(self) -> None:
        """Refuse from now on, if the parent had used one."""
        if self.was_used:
            self.refusal = Refusal()


class Refusal:
    """A watcher of Tensors that refuses all but reading what is on the host already."""

    def host_read(self, tensor: Any, what: str) -> None:
        """Check an array that the host is to read: raises DeviceError in a fork unless it is finished and in the host's
        memory."""
        array = tensor._array
        if not (array.is_ready() and all(device.platform == "cpu" for device in array.devices())):
            refuse(what)

    def sizes_of(self, tensor: Any) -> None:
        """None: nothing is captured."""

    def __getattr__(self, name: str) -> NoReturn:
        refuse("an operation")


def refuse(what: str) -> NoReturn:
    """Raise the DeviceError of a process that was forked too late."""
    raise DeviceError(
        f"{what} in process {os.getpid()}, which was forked from one that had used a device: XLA's threads are not in "
        "it, so it would wait for ever; start it with multiprocessing.get_context('spawn') or 'forkserver', fork "
        "before the first operation, or keep to NumPy in it"
    )


def check(what: str) -> None:
    """Raise DeviceError where devices cannot be used, for what does not ask the watcher of Tensors."""
    if fork.refusal is not None:
        refuse(what)


fork: _Fork = _Fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=fork.before, after_in_child=fork.in_child)
