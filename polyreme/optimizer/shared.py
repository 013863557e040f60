"""Parameters by the devices that hold them, and a copy on each set of devices of what all parameters share.

Under a pipeline every stage holds its parameters on devices of its own, and a compiled update takes arrays
of one set of devices only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from polyreme.core import state
from polyreme.core.devices.transfer import from_host
from polyreme.core.meshes import Devices, beside, devices_of, everywhere
from polyreme.core.state import Tracer
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor


@dataclass(frozen=True, eq=False)
class MeshGroup:
    """Parameters that one set of devices holds: those of a pipeline stage, or all of them.

    devices: () if they were never put anywhere.
    """

    devices: Devices
    parameters: tuple[Any, ...]

    def tracing(self) -> Any:
        """A context: programs traced inside are for this group's kind of devices."""
        return jax.default_device(next(iter(self.parameters[0]._array.sharding.device_set)))

    def here(self, tensor: Tensor) -> Tensor:
        """tensor, or a copy of it on each of this group's devices."""
        have = state.read(tensor)
        array = beside(have, self.parameters[0]._array)
        return tensor if array is have else Tensor(array)


def by_devices(parameters: Iterable[Any], array_of: Callable[[Any], jax.Array]) -> list[MeshGroup]:
    """The parameters in groups, in the order of each group's first.

    Those that were never put anywhere go with the first group that was.
    """
    listed = [(p, devices_of(array_of(p))) for p in parameters]
    free = next((devices for _, devices in listed if devices), ())
    found: dict[Devices, list[Any]] = {}
    for p, devices in listed:
        found.setdefault(devices or free, []).append(p)
    return [MeshGroup(devices, tuple(held)) for devices, held in found.items()]


class Shared:
    """One set of devices' copy: the learning rate, and an array over all parameters for each number kept per parameter.

    Only the places of parameters that these devices hold count. where: how a copy lies, None before it matters.
    """

    rate: Tensor
    scalars: dict[str, Tensor]
    where: Any

    __slots__ = ("rate", "scalars", "where")

    def __init__(self, rate: Tensor, scalars: dict[str, Tensor], where: Any = None) -> None:
        self.rate = rate
        self.scalars = scalars
        self.where = where

    def __deepcopy__(self, memo: dict[Any, Any]) -> Shared:
        return Shared(copy.deepcopy(self.rate, memo), copy.deepcopy(self.scalars, memo), self.where)

    @property
    def is_elsewhere(self) -> bool:
        """True if only other processes have devices of the set."""
        return self.where is not None and not self.where.addressable_devices

    def place(self) -> None:
        """Move what lies elsewhere, or nowhere in particular, to where it belongs.

        A copy that belongs to devices of other processes stays here: it is what this process knows of theirs.
        """
        if self.is_elsewhere:
            return
        for tensor in (self.rate, *self.scalars.values()):
            array = tensor._array
            if not isinstance(array, Tracer) and (not array.committed or array.sharding != self.where):
                state.write(tensor, put(array, self.where))


class SharedState:
    """All copies. Tensors stay the same ones once made: captured programs hold on to them.

    home: which copy counts, by place of the parameter, None for one that has not been updated yet: any copy is right.
    """

    def __init__(self, rate: Tensor, count: int) -> None:
        self.copies: dict[Devices, Shared] = {(): Shared(rate, {})}
        self.home: list[Devices | None] = [None] * count

    @property
    def first(self) -> Shared:
        """Some copy: for what is the same in all of them."""
        return next(iter(self.copies.values()))

    def rates(self) -> list[Tensor]:
        """The learning rate, on each set of devices."""
        return [copy.rate for copy in self.copies.values()]

    def start(self, values: dict[str, np.ndarray]) -> None:
        """Begin with these numbers: name -> one for each parameter."""
        for held in self.copies.values():
            held.scalars = {n: Tensor(from_host(v)) for n, v in values.items()}

    def extend(self, count: int, starts: Mapping[str, float]) -> None:
        """Make room for the numbers of more parameters: name -> where it starts."""
        self.home += [None] * count
        with state.outside_capture():
            for name in self.first.scalars:
                longer = np.append(self.values(name), np.full(count, starts[name], np.float32))
                for held in self.copies.values():
                    held.scalars[name] = Tensor(from_host(longer))
            for held in self.copies.values():
                if held.where is not None:
                    held.place()

    def values(self, name: str, what: str = "the optimizer's state") -> np.ndarray:
        """A number per parameter, each from the copy that counts. what: who asks, for the message in a capture."""
        arrays = {d: state.host(copy.scalars[name], what) for d, copy in self.copies.items()}
        found = np.array(next(iter(arrays.values())))
        for at, devices in enumerate(self.home):
            if devices in arrays:
                found[at] = arrays[devices][at]
        return found

    def set_values(self, name: str, values: np.ndarray) -> None:
        """Write a number per parameter into every copy."""
        for held in self.copies.values():
            held.scalars[name].set_value(values)

    def settle(self, groups: Sequence[MeshGroup], position: dict[int, int], array_of: Callable[[Any], Any]) -> None:
        """Make sure that each group has its copy, and that the numbers of parameters which moved have moved along."""
        moved = [
            (position[id(p)], g.devices)
            for g in groups
            for p in g.parameters
            if self.home[position[id(p)]] != g.devices
        ]
        if not moved:
            return
        places = {g.devices: everywhere(array_of(g.parameters[0]).sharding) for g in groups}
        with state.outside_capture():
            have_moved = any(self.home[at] is not None for at, _ in moved)
            values = {n: self.values(n) for n in self.first.scalars} if have_moved else {}
            for at, devices in moved:
                self.home[at] = devices
            for devices, where in places.items():
                if devices not in self.copies:
                    self._add(devices)
                self.copies[devices].where = where
            for name, array in values.items():
                self.set_values(name, array)
            for devices, copy in self.copies.items():
                # alone on one device, arrays that lie nowhere in particular will do
                if copy.where is not None and devices and (len(self.copies) > 1 or len(devices) > 1):
                    copy.place()

    def _add(self, devices: Devices) -> None:
        idle = next((d for d in self.copies if d not in self.home), None)
        if idle is not None:
            self.copies[devices] = self.copies.pop(idle)
            return
        like = self.first
        scalars = {n: Tensor(from_host(self.values(n))) for n in like.scalars}
        self.copies[devices] = Shared(Tensor(from_host(np.asarray(like.rate._array))), scalars)
