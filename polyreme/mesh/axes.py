"""The six mesh axes and the shape of a device mesh: degrees, order, strides and coordinates.

Devices are whole numbers here; nothing touches one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from polyreme.errors import ConfigError, PlacementError, did_you_mean

AXES = ("dp", "pp", "sharding", "sep", "mp", "ep")
"""Data, pipeline, parameter sharding, segment (sequence), tensor (model) and expert parallelism; outermost first."""


def check_axis(axis: object) -> str:
    """The axis itself; raises PlacementError with the closest valid name if there is no such mesh axis."""
    if axis not in AXES:
        raise PlacementError(f"unknown mesh axis {axis!r}{did_you_mean(axis, AXES)}")
    return str(axis)


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many devices lie along each mesh axis, and which axis varies slowest over device indexes.

    A degree is a number of devices. `order` runs from the outermost axis (largest stride) to the innermost (stride 1):
    neighbours on the innermost axis are neighbours in the device list, so the axis that talks most goes last.
    Raises ConfigError for a degree below 1 or an order that is not a permutation of AXES.

    >>> mesh = MeshShape(dp=2, mp=4)
    >>> print(mesh, mesh.size, mesh.coordinates(6)["dp"], mesh.coordinates(6)["mp"])
    dp2 mp4 8 1 2
    """

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    sep: int = 1
    mp: int = 1
    ep: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ConfigError(f"mesh axis {axis!r} has degree {degree!r}; give a whole number of at least 1")
        object.__setattr__(self, "order", _full_order(self.order))

    def __str__(self) -> str:
        text = " ".join(f"{axis}{n}" for axis, n in self.degrees.items() if n > 1) or "dp1"
        return text if self.order == AXES else f"{text} order={','.join(self.order)}"

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, outermost axis first."""
        return {axis: self.degree(axis) for axis in self.order}

    @property
    def size(self) -> int:
        """Number of devices: the product of all degrees."""
        return math.prod(self.degrees.values())

    @property
    def strides(self) -> dict[str, int]:
        """Axis -> distance in device index between neighbours along it, outermost axis first."""
        strides, step = {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= self.degree(axis)
        return {axis: strides[axis] for axis in self.order}

    def degree(self, axis: str) -> int:
        """Number of devices along the axis; raises PlacementError for an unknown axis."""
        return int(getattr(self, check_axis(axis)))

    def coordinates(self, device: int) -> dict[str, int]:
        """Where a device index lies on every axis; raises PlacementError outside [0, size)."""
        if not 0 <= device < self.size:
            raise PlacementError(
                f"device index {device} is not on mesh {self} of {self.size} devices; give 0 .. size-1"
            )
        return {axis: device // stride % self.degree(axis) for axis, stride in self.strides.items()}

    def device(self, **coordinates: int) -> int:
        """The device index at these coordinates (an axis not named is 0); the inverse of `coordinates`."""
        for axis, at in coordinates.items():
            if not 0 <= at < self.degree(axis):
                raise PlacementError(f"coordinate {axis}={at} is not on mesh {self}; give 0 .. {self.degree(axis) - 1}")
        return sum(self.strides[axis] * at for axis, at in coordinates.items())

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The device indexes that differ only along these axes, one tuple a group: who talks in a collective.

        >>> MeshShape(dp=2, mp=2).groups("dp")
        [(0, 2), (1, 3)]
        """
        inside = [axis for axis in self.order if axis in {check_axis(a) for a in axes}]
        outside = [axis for axis in self.order if axis not in inside]
        return [tuple(self.device(**fixed, **moving) for moving in self._walk(inside)) for fixed in self._walk(outside)]

    def check_devices(self, count: int, *, here: bool = False) -> None:
        """Raises PlacementError, naming each axis and the degree that would fit, unless size is `count` devices.

        here: they are those of this process, which may be virtual ones.
        """
        if self.size != count:
            more = f"; CPU_NUM={self.size} gives so many virtual ones" if here and self.size > count else ""
            raise PlacementError(
                f"mesh {self} needs {self.size} devices, {count} given; "
                f"the nearest that use {count}: {self._nearest(count)}{more}"
            )

    def grow(self, axis: str, count: int) -> MeshShape:
        """This mesh with the one axis set so that all `count` devices are used.

        Raises PlacementError, with the degrees that would do, if the other axes do not divide the count.

        >>> print(MeshShape(mp=2).grow("dp", 8))
        dp4 mp2
        """
        others = self.size // self.degree(axis)
        if count < 1 or count % others:
            rest = replace(self, **{axis: 1})
            raise PlacementError(
                f"mesh axis {axis!r} cannot be sized: the other axes ({rest}) take {others} devices, which does not "
                f"divide {count}; the nearest that use {count}: {rest._nearest(count)}"
            )
        return replace(self, **{axis: count // others})

    @classmethod
    def parse(cls, value: MeshShape | Mapping[str, object] | str) -> MeshShape:
        """A MeshShape from itself, from a dict of degrees, or from text as `str` prints it.

        Raises ConfigError for a key or a word it does not know.

        >>> MeshShape.parse("dp2 sharding2 mp2") == MeshShape.parse({"dp": 2, "sharding": 2, "mp": 2})
        True
        """
        if isinstance(value, cls):
            return value
        fields = _fields_of_text(value) if isinstance(value, str) else value
        if not isinstance(fields, Mapping):
            raise ConfigError(f"a mesh cannot be made from {value!r}; give a dict or text such as 'dp2 mp4'")
        for key in fields:
            if key not in (*AXES, "order"):
                raise ConfigError(f"unknown mesh axis {key!r} in {value!r}{did_you_mean(key, (*AXES, 'order'))}")
        return cls(**fields)  # type: ignore[arg-type]  # __post_init__ checks the values

    def to_dict(self) -> dict[str, object]:
        """Degrees above 1, and the order if it is not the usual one: what `parse` takes."""
        fields: dict[str, object] = {axis: self.degree(axis) for axis in AXES if self.degree(axis) > 1}
        return fields if self.order == AXES else {**fields, "order": list(self.order)}

    def _walk(self, axes: list[str]) -> Iterator[dict[str, int]]:
        for at in product(*[range(self.degree(axis)) for axis in axes]):
            yield dict(zip(axes, at, strict=True))

    def _nearest(self, count: int) -> str:
        # One axis changed at a time first: that is the edit a person makes. Else the meshes with nearest degrees.
        used = [axis for axis in self.order if self.degree(axis) > 1] or ["dp"]
        rest = {axis: self.size // self.degree(axis) for axis in used}
        one = [replace(self, **{axis: count // rest[axis]}) for axis in used if count > 0 and count % rest[axis] == 0]
        return " or ".join(f"'{mesh}'" for mesh in one or [self._shrunk(used, count)])

    def _shrunk(self, used: list[str], count: int) -> MeshShape:
        # Keep what fits from the innermost axis out; the outermost used axis takes what is left.
        degrees, left = {}, max(count, 1)
        for axis in reversed(used[1:]):
            degrees[axis] = nearest_divisor(left, self.degree(axis))
            left //= degrees[axis]
        return replace(self, **degrees, **{used[0]: left})


def nearest_divisor(number: int, target: int) -> int:
    """The divisor of `number` closest to `target`; the smaller one on a tie.

    >>> nearest_divisor(12, 5)
    4
    """
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - target), d))


def nearest_multiples(size: int, ways: int) -> str:
    """The multiples of `ways` around `size`, as text for an error message.

    >>> nearest_multiples(10, 4), nearest_multiples(2, 4)
    ('8 or 12', '4')
    """
    below = size // ways * ways
    return f"{below} or {below + ways}" if below else f"{ways}"


def _full_order(order: object) -> tuple[str, ...]:
    names = tuple(map(str, order)) if isinstance(order, (list, tuple)) else (str(order),)
    for axis in names:
        if axis not in AXES:
            raise ConfigError(f"unknown mesh axis {axis!r} in order {order!r}{did_you_mean(axis, AXES)}")
    if len(set(names)) != len(names):
        raise ConfigError(f"mesh order {order!r} names an axis twice; name each of {', '.join(AXES)} at most once")
    # Expert parallelism is seldom written in an order; what is left out goes innermost, in the usual order.
    return names + tuple(axis for axis in AXES if axis not in names)


def _fields_of_text(text: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    for word in text.replace(" x ", " ").split():
        key, _, value = word.partition("=")
        if key == "order" and value:
            parsed: object = tuple(value.split(","))
        else:
            match = re.fullmatch(r"([a-z]+)=?(\d+)", word)
            if not match:
                raise ConfigError(f"mesh text {text!r}: {word!r} is not an axis and its degree; write 'dp2 mp4'")
            key, parsed = match[1], int(match[2])
        if key in fields:
            raise ConfigError(f"mesh text {text!r} gives {key!r} twice; give it once")
        fields[key] = parsed
    return fields
