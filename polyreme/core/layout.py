"""The plan in force and the device mesh it runs on: what turns logical dims into layouts over devices.

One plan is in force at a time; without one everything lives on one device and dims are names only.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.engine.backend import Device  # backend configures jax before devices are listed
from polyreme.core.engine.plugins import kind_of
from polyreme.errors import PlacementError
from polyreme.mesh import Plan


class Layout:
    """A plan bound to devices.

    devices: all of them by default; where the plan says stage_devices, those of these kinds, of which each stage takes
    the next. Raises PlacementError if the plan's mesh needs another number of devices than given, or of a kind more
    than there are, and for devices of several kinds that no stage keeps apart.
    stages: under a pipeline, the Layout of each stage, over its own devices and without a `pp` axis; else itself alone.
    zigzag: the ways of the zigzag order (kernels/zigzag.py) that the tokens of activations lie in; 1: their own order.
    """

    is_mixed: bool

    def __init__(self, plan: Plan, devices: Sequence[Device] | None = None) -> None:
        self.plan = plan
        self.mesh: Mesh = Mesh(_arranged(plan, devices), plan.mesh.order)
        self.zigzag = 1
        self._reordered: dict[int, Layout] = {}
        # no array lies on devices of two kinds, and a program is for one
        self.is_mixed = len({device.client for device in self.mesh.devices.flat}) > 1
        self.stages: list[Layout] = [self] if plan.mesh.pp == 1 else [self._stage(s) for s in range(plan.mesh.pp)]
        for stage in self.stages if self.is_mixed else ():
            kinds = {kind_of(device) for device in stage.mesh.devices.flat}
            if len(kinds) > 1:
                raise PlacementError(
                    f"mesh {plan.mesh} has devices of {' and '.join(sorted(kinds))} in one program; give each stage "
                    "devices of one kind (pp and stage_devices), or all of one kind"
                )

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
        """The sharding of a tensor of this kind and these logical dims.

        kind: "param", "grad", "state", "act", or "use", which is a parameter while an op reads it.
        """
        spec = getattr(self.plan.strategy, f"{kind}_spec")(tuple(dims), tuple(shape), self.plan.mesh)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def activation(self, dims: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """The sharding of an activation; a dim that its axes do not divide (a batch of one, say) is left whole."""
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

    def stageless(self) -> NamedSharding:
        """The sharding of arrays that belong to no stage, such as the random key, whole: on every device, or on those
        of the first stage where stages have several kinds."""
        return (self.stages[0] if self.is_mixed else self).replicated()

    def tracing(self) -> AbstractContextManager[Any]:
        """A context: programs traced inside are for this stage's kind of devices, where others have another."""
        return jax.default_device(self.mesh.devices.flat[0]) if self.is_mixed else nullcontext()


def check_devices(plan: Plan) -> None:
    """Raises PlacementError where the devices there are do not fit the plan's mesh."""
    _arranged(plan, None)


def _arranged(plan: Plan, devices: Sequence[Device] | None) -> np.ndarray:
    """The devices of the plan's mesh, in its shape."""
    names, pp = plan.mesh.order, plan.mesh.pp
    sizes = [plan.mesh.degree(a) for a in names]
    if not plan.stage_devices:
        available = list(devices) if devices is not None else jax.devices()
        plan.mesh.check_devices(len(available), here=True)
        return np.asarray(available).reshape(sizes)
    width = plan.mesh.size // pp  # devices of a stage
    wanted = Counter(plan.stage_devices)
    pools = {kind: _of_kind(kind, devices) for kind in wanted}
    for kind, count in wanted.items():
        if len(pools[kind]) < count * width:
            raise PlacementError(
                f"stage_devices={list(plan.stage_devices)} of plan on mesh {plan.mesh} needs {count * width} devices "
                f"of {kind!r}, {len(pools[kind])} are there; have fewer stages on them, or fewer devices a stage"
            )
    taken = {kind: iter(pool) for kind, pool in pools.items()}
    stages = [np.asarray([next(taken[kind]) for _ in range(width)]) for kind in plan.stage_devices]
    inner = [size for axis, size in zip(names, sizes, strict=True) if axis != "pp"]
    return np.stack([stage.reshape(inner) for stage in stages], names.index("pp"))


def _of_kind(kind: str, devices: Sequence[Device] | None) -> list[Device]:
    if devices is not None:
        return [device for device in devices if kind_of(device) == kind]
    try:
        return jax.devices(kind)
    except RuntimeError:  # jax knows no such kind
        return []


class _LayoutInForce:
    """The layout in force, None on one device."""

    __slots__ = ("layout",)

    def __init__(self) -> None:
        self.layout: Layout | None = None


active: _LayoutInForce = _LayoutInForce()


@contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """Put a layout in force inside the block."""
    outer, active.layout = active.layout, layout
    try:
        yield
    finally:
        active.layout = outer
