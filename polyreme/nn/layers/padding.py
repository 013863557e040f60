"""Padding layers, of 1 to 3 spatial dims.

padding: elements before and after each spatial dim, the last dim first; one number for all of them. A list of one
number is padding before the last dim: in constant mode a number that is missing after it is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer


class _Pad(Layer):
    padding: list[int]
    value: float

    spatial: ClassVar[int]

    def __init__(
        self, padding: int | Sequence[int], mode: str, value: float, data_format: str, name: str | None
    ) -> None:
        super().__init__()
        self._name = name
        sizes = [padding] * (2 * self.spatial) if isinstance(padding, int) else list(padding)
        if len(sizes) % 2 and mode != "constant":
            raise ConfigError(
                f"{type(self).__name__}: padding is a number or {2 * self.spatial} of them, two a dim from the last "
                f"on, got {padding!r}"
            )
        self.padding, self._mode, self.value, self._data_format = sizes, mode, value, data_format

    def forward(self, x: Any) -> Any:
        return F.pad(x, self.padding, mode=self._mode, value=self.value, data_format=self._data_format)

    def extra_repr(self) -> str:
        return f"padding={self.padding}, mode={self._mode}, value={self.value}, data_format={self._data_format}"


class Pad1D(_Pad):
    """[batch, channel, length] padded; mode: constant (value), reflect, replicate or circular."""

    spatial = 1

    def __init__(
        self,
        padding: int | Sequence[int],
        mode: str = "constant",
        value: float = 0.0,
        data_format: str = "NCL",
        name: str | None = None,
    ) -> None:
        super().__init__(padding, mode, value, data_format, name)


class Pad2D(_Pad):
    """[batch, channel, height, width] padded; mode: constant (value), reflect, replicate or circular."""

    spatial = 2

    def __init__(
        self,
        padding: int | Sequence[int],
        mode: str = "constant",
        value: float = 0.0,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(padding, mode, value, data_format, name)


class Pad3D(_Pad):
    """[batch, channel, depth, height, width] padded; mode: constant (value), reflect, replicate or circular."""

    spatial = 3

    def __init__(
        self,
        padding: int | Sequence[int],
        mode: str = "constant",
        value: float = 0.0,
        data_format: str = "NCDHW",
        name: str | None = None,
    ) -> None:
        super().__init__(padding, mode, value, data_format, name)


class ZeroPad1D(_Pad):
    """[batch, channel, length] padded with zeros."""

    spatial = 1

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCL", name: str | None = None) -> None:
        super().__init__(padding, "constant", 0.0, data_format, name)


class ZeroPad2D(_Pad):
    """[batch, channel, height, width] padded with zeros."""

    spatial = 2

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(padding, "constant", 0.0, data_format, name)


class ZeroPad3D(_Pad):
    """[batch, channel, depth, height, width] padded with zeros."""

    spatial = 3

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCDHW", name: str | None = None) -> None:
        super().__init__(padding, "constant", 0.0, data_format, name)


class ConstantPad1D(_Pad):
    """[batch, channel, length] padded with a value."""

    spatial = 1

    def __init__(
        self, padding: int | Sequence[int], value: float, data_format: str = "NCL", name: str | None = None
    ) -> None:
        super().__init__(padding, "constant", value, data_format, name)


class ConstantPad2D(_Pad):
    """[batch, channel, height, width] padded with a value."""

    spatial = 2

    def __init__(
        self, padding: int | Sequence[int], value: float, data_format: str = "NCHW", name: str | None = None
    ) -> None:
        super().__init__(padding, "constant", value, data_format, name)


class ConstantPad3D(_Pad):
    """[batch, channel, depth, height, width] padded with a value."""

    spatial = 3

    def __init__(
        self, padding: int | Sequence[int], value: float, data_format: str = "NCDHW", name: str | None = None
    ) -> None:
        super().__init__(padding, "constant", value, data_format, name)


class ReflectionPad1D(_Pad):
    """[batch, channel, length] mirrored at its borders, which are not repeated."""

    spatial = 1

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCL", name: str | None = None) -> None:
        super().__init__(padding, "reflect", 0.0, data_format, name)


class ReflectionPad2D(_Pad):
    """[batch, channel, height, width] mirrored at its borders, which are not repeated."""

    spatial = 2

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(padding, "reflect", 0.0, data_format, name)


class ReflectionPad3D(_Pad):
    """[batch, channel, depth, height, width] mirrored at its borders, which are not repeated."""

    spatial = 3

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCDHW", name: str | None = None) -> None:
        super().__init__(padding, "reflect", 0.0, data_format, name)


class ReplicationPad1D(_Pad):
    """[batch, channel, length] with its border elements repeated."""

    spatial = 1

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCL", name: str | None = None) -> None:
        super().__init__(padding, "replicate", 0.0, data_format, name)


class ReplicationPad2D(_Pad):
    """[batch, channel, height, width] with its border elements repeated."""

    spatial = 2

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(padding, "replicate", 0.0, data_format, name)


class ReplicationPad3D(_Pad):
    """[batch, channel, depth, height, width] with its border elements repeated."""

    spatial = 3

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCDHW", name: str | None = None) -> None:
        super().__init__(padding, "replicate", 0.0, data_format, name)


class CircularPad1D(_Pad):
    """[batch, channel, length] continued from its other end."""

    spatial = 1

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCL", name: str | None = None) -> None:
        super().__init__(padding, "circular", 0.0, data_format, name)


class CircularPad2D(_Pad):
    """[batch, channel, height, width] continued from its other end."""

    spatial = 2

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(padding, "circular", 0.0, data_format, name)


class CircularPad3D(_Pad):
    """[batch, channel, depth, height, width] continued from its other end."""

    spatial = 3

    def __init__(self, padding: int | Sequence[int], data_format: str = "NCDHW", name: str | None = None) -> None:
        super().__init__(padding, "circular", 0.0, data_format, name)
