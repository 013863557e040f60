"""The function that runs on each device's own part of a Tensor just now, if one does: distributed.local_map's.

Inside it a rank is a device of the mesh, collectives run on local values, and get_rank() is a Tensor, as one
program serves all devices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from polyreme.eager.tensor import Tensor


@dataclass(frozen=True)
class LocalBody:
    """mesh: the jax mesh that the function is mapped over, all of whose axes it is inside. ids: process id of each of
    its devices, an ndarray of its shape. group: all of them."""

    mesh: Any
    ids: Any
    group: Any

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes."""
        return tuple(self.mesh.axis_names)

    def rank(self, axes: tuple[str, ...] = ()) -> Tensor:
        """Process id of the device that runs, or its position along some axes, as a 0-D Tensor."""
        if axes:
            return Tensor(jax.lax.axis_index(axes))
        return Tensor(jnp.asarray(self.ids.reshape(-1))[jax.lax.axis_index(self.axes)])


class _Running(threading.local):
    """The innermost such function in this thread, None outside."""

    def __init__(self) -> None:
        self.body: LocalBody | None = None


running: _Running = _Running()


@contextmanager
def inside(body: LocalBody) -> Iterator[None]:
    """Say in the block that body's function runs."""
    outer, running.body = running.body, body
    try:
        yield
    finally:
        running.body = outer
