"""Convolution layers and their transposes, of 1 to 3 spatial dims.

The weight of a convolution is [out, in / groups, *kernel], of a transposed one [in, out / groups, *kernel].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyreme.core.alias import Alias
from polyreme.core.annotations import Padding, Sizes
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import functional as F
from polyreme.nn.argument_order import also_in_order
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttrLike, Parameter
from polyreme.ops.windows.geometry import is_channels_last

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def sizes_of(value: int | Sequence[int], count: int, what: str) -> list[int]:
    """One size for each of count dims, from an int or a sequence of count ints; raises ConfigError otherwise."""
    sizes = [value] * count if isinstance(value, int) else list(value)
    if len(sizes) != count or not all(isinstance(s, int) and s > 0 for s in sizes):
        raise ConfigError(f"{what} is a positive integer or {count} of them, got {value!r}")
    return sizes


class _ConvNd(Layer):
    weight: Parameter
    bias: Parameter | None

    in_channels: Alias[int] = Alias("_in_channels")
    out_channels: Alias[int] = Alias("_out_channels")
    kernel_size: Alias[Sizes] = Alias("_kernel_size")
    stride: Alias[Sizes] = Alias("_stride")
    padding: Alias[Padding] = Alias("_padding")
    dilation: Alias[Sizes] = Alias("_dilation")
    groups: Alias[int] = Alias("_groups")
    padding_mode: Alias[str] = Alias("_padding_mode")
    data_format: Alias[str] = Alias("_data_format")
    spatial: ClassVar[int]
    _function: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: Any,
        dilation: int | Sequence[int],
        groups: int,
        data_format: str,
        attrs: tuple[Any, Any],
        dtype: Any = None,
    ) -> None:
        super().__init__(dtype=dtype)
        what = type(self).__name__
        if in_channels < 1 or out_channels < 1 or groups < 1:
            raise ConfigError(
                f"{what}: channels and groups are at least 1, got {in_channels}, {out_channels}, {groups}"
            )
        for label, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ConfigError(f"{what}: {label} {channels} is not a multiple of groups {groups}")
        is_channels_last(data_format, self.spatial, what)
        self._in_channels, self._out_channels, self._groups = in_channels, out_channels, groups
        self._kernel_size = sizes_of(kernel_size, self.spatial, f"{what}: kernel_size")
        self._stride = sizes_of(stride, self.spatial, f"{what}: stride")
        self._dilation = sizes_of(dilation, self.spatial, f"{what}: dilation")
        self._padding, self._padding_mode, self._data_format = padding, "zeros", data_format
        self._param_attr, self._bias_attr = attrs
        self.output_padding: int | Sequence[int] = 0

    def extra_repr(self) -> str:
        shown = f"{self._in_channels}, {self._out_channels}, kernel_size={self._kernel_size}"
        ones = [1] * self.spatial
        settings = {
            "stride": (self._stride, ones), "padding": (self._padding, 0),
            "padding_mode": (self._padding_mode, "zeros"), "output_padding": (self.output_padding, 0),
            "dilation": (self._dilation, ones), "groups": (self._groups, 1),
        }  # fmt: skip
        shown += "".join(f", {name}={value}" for name, (value, default) in settings.items() if value != default)
        return f"{shown}, data_format={self._data_format}"


_also_in_earlier_order = also_in_order(7, ("padding_mode", "weight_attr", "bias_attr", "data_format"))


class _ConvForward(_ConvNd):
    """Cross-correlation with a learned kernel, at first Gaussian(0, sqrt(2 / (in_channels * kernel elements)))."""

    @_also_in_earlier_order
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
    ) -> None:
        attrs = (weight_attr, bias_attr if bias else False)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, data_format, attrs, dtype
        )
        what = type(self).__name__
        if not isinstance(bias, bool):
            raise ConfigError(f"{what}: bias is True or False, got {bias!r}; a kernel's own settings are weight_attr=")
        if padding_mode not in _PADDING_MODES:
            raise ConfigError(f"{what}: padding_mode {padding_mode!r}{did_you_mean(padding_mode, _PADDING_MODES)}")
        if weight_attr is False:
            raise ConfigError(f"{what}: weight_attr=False leaves no kernel; leave it out")
        self._padding_mode = padding_mode
        std = math.sqrt(2.0 / (in_channels * math.prod(self._kernel_size)))
        self.weight = self.create_parameter(
            [out_channels, in_channels // groups, *self._kernel_size], weight_attr, default_initializer=Normal(0.0, std)
        )
        self.bias = self.create_parameter([out_channels], bias_attr if bias else False, is_bias=True)
        if device is not None:
            self.to(device=device)

    def forward(self, x: Any) -> Any:
        padding = self._padding
        if self._padding_mode != "zeros":
            x = F.pad(x, self._borders(), mode=self._padding_mode, data_format=self._data_format)
            padding = 0
        return self._function(
            x, self.weight, self.bias, self._stride, padding, self._dilation, self._groups, self._data_format
        )

    def _borders(self) -> list[int]:
        """Padding before and after each spatial dim, the last dim first."""
        if not isinstance(self._padding, (int, list, tuple)):
            raise ConfigError(
                f"{type(self).__name__}: padding {self._padding!r} goes with padding_mode='zeros'; give sizes"
            )
        amounts = [self._padding] * self.spatial if isinstance(self._padding, int) else list(self._padding)
        if len(amounts) != self.spatial:
            raise ConfigError(
                f"{type(self).__name__}: padding_mode={self._padding_mode!r} takes {self.spatial} sizes, got {amounts}"
            )
        return [size for amount in reversed(amounts) for size in (amount, amount)]


class Conv1D(_ConvForward):
    """Convolution of [batch, channel, length]."""

    spatial = 1
    _function = staticmethod(F.conv1d)

    @_also_in_earlier_order
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCL",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype, weight_attr, bias_attr, data_format,
        )  # fmt: skip


class Conv2D(_ConvForward):
    """Convolution of [batch, channel, height, width].

    >>> Conv2D(4, 6, 3, groups=2).weight.shape
    paddle.Size([6, 2, 3, 3])
    """

    spatial = 2
    _function = staticmethod(F.conv2d)


class Conv3D(_ConvForward):
    """Convolution of [batch, channel, depth, height, width]."""

    spatial = 3
    _function = staticmethod(F.conv3d)

    @_also_in_earlier_order
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCDHW",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype, weight_attr, bias_attr, data_format,
        )  # fmt: skip


class _ConvTranspose(_ConvNd):
    """The gradient of a convolution with respect to its input, as a layer. Initial weights: XavierUniform."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCHW",
    ) -> None:
        attrs = (weight_attr, bias_attr)
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, data_format, attrs)
        if weight_attr is False:
            raise ConfigError(f"{type(self).__name__}: weight_attr=False leaves no kernel; leave it out")
        self.output_padding = output_padding
        self.weight = self.create_parameter([in_channels, out_channels // groups, *self._kernel_size], weight_attr)
        self.bias = self.create_parameter([out_channels], bias_attr, is_bias=True)

    def forward(self, x: Any, output_size: Any = None) -> Any:
        return self._function(
            x,
            self.weight,
            self.bias,
            stride=self._stride,
            padding=self._padding,
            output_padding=0 if output_size is not None else self.output_padding,
            dilation=self._dilation,
            groups=self._groups,
            output_size=output_size,
            data_format=self._data_format,
        )


class Conv1DTranspose(_ConvTranspose):
    """Transposed convolution of [batch, channel, length]."""

    spatial = 1
    _function = staticmethod(F.conv1d_transpose)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCL",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups, weight_attr,
            bias_attr, data_format,
        )  # fmt: skip


class Conv2DTranspose(_ConvTranspose):
    """Transposed convolution of [batch, channel, height, width]."""

    spatial = 2
    _function = staticmethod(F.conv2d_transpose)


class Conv3DTranspose(_ConvTranspose):
    """Transposed convolution of [batch, channel, depth, height, width]."""

    spatial = 3
    _function = staticmethod(F.conv3d_transpose)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        data_format: str = "NCDHW",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups, weight_attr,
            bias_attr, data_format,
        )  # fmt: skip
