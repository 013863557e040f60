"""The plan in force and the device mesh it runs on: what turns logical dims into layouts over devices.

One plan is in force at a time; without one everything lives on one device and dims are names only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.backend import Device  # backend configures jax before devices are listed
from polyreme.mesh import Plan


class Layout:
    """A plan bound to devices.

    Raises PlacementError if the plan's mesh needs another number of devices than given (all of them by default).
    stages: under a pipeline, the Layout of each stage, over its own devices and without a `pp` axis; else itself alone.
    zigzag: the ways of the zigzag order (kernels/zigzag.py) that the tokens of activations lie in; 1: their own order.
    """

    def __init__(self, plan: Plan, devices: Sequence[Device] | None = None) -> None:
        available = list(devices) if devices is not None else jax.devices()
        plan.mesh.check_devices(len(available))
        names = plan.mesh.order
        sizes = [plan.mesh.degree(a) for a in names]
        self.plan = plan
        self.mesh = Mesh(np.asarray(available).reshape(sizes), names)
        self.zigzag = 1
        self._reordered: dict[int, Layout] = {}
        self.stages = [self] if plan.mesh.pp == 1 else [self._stage(s) for s in range(plan.mesh.pp)]

    def _stage(self, stage: int) -> Layout:
        inner = copy.copy(self)
        at = self.mesh.axis_names.index("pp")
        names = tuple(axis for axis in self.mesh.axis_names if axis != "pp")
        inner.mesh = Mesh(np.take(self.mesh.devices, stage, at), names)
        inner.stages = [inner]
        inner._reordered = {}
        return inner

    def in_zigzag(self, ways: int) -> Layout:
        """This layout for code whose activations have their tokens in the zigzag order of so many ways."""
        if ways not in self._reordered:
            self._reordered[ways] = copy.copy(self)
            self._reordered[ways].zigzag = ways
        return self._reordered[ways]

    def sharding(self, kind: str, dims: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where a tensor of this kind and these logical dims goes.

        kind: "param", "grad", "state", "act", or "use", which is a parameter while an op reads it.
        """
        spec = getattr(self.plan.strategy, f"{kind}_spec")(tuple(dims), tuple(shape), self.plan.mesh)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def activation(self, dims: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where an activation goes; a dim that its axes do not divide (a batch of one, say) is left whole."""
        fitting = [d if d and self.ways(d, size) > 1 else None for d, size in zip(dims, shape, strict=True)]
        return self.sharding("act", fitting, shape)

    def ways(self, dim: str, size: int) -> int:
        """Equal parts that an activation's dim of this size is split in; 1 if its axes do not divide it."""
        ways = math.prod(self.plan.mesh.degree(a) for a in self.plan.strategy.rule("act").get(dim, ()))
        return ways if size % ways == 0 else 1

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices have different rows of a batch, or different positions: outermost first."""
        act = self.plan.strategy.rule("act")
        axes = dict.fromkeys((*act.get("batch", ()), *act.get("block_seq", ())))
        return tuple(axis for axis in axes if self.mesh.shape.get(axis, 1) > 1)

    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


class _LayoutInForce:
    """The layout in force, None on one device."""

    __slots__ = ("layout",)

    def __init__(self) -> None:
        self.layout: Layout | None = None


active = _LayoutInForce()


@contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """Put a layout in force inside the block."""
    outer, active.layout = active.layout, layout
    try:
        yield
    finally:
        active.layout = outer
