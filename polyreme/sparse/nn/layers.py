"""Layers over sparse Tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyreme.eager.sparse.elementwise import need_sparse
from polyreme.errors import ConfigError
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.nn.layers import batch_norm
from polyreme.nn.layers.conv import sizes_of
from polyreme.sparse.nn import functional as F


class ReLU(Layer):
    """max(value, 0) of each stored element."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def forward(self, x: Any) -> Any:
        return F.relu(x)


class ReLU6(Layer):
    """min(max(value, 0), 6) of each stored element."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def forward(self, x: Any) -> Any:
        return F.relu6(x)


class LeakyReLU(Layer):
    """Of each stored element, value where it is positive, else negative_slope * value."""

    def __init__(self, negative_slope: float = 0.01, name: str | None = None) -> None:
        super().__init__(name)
        self.negative_slope = negative_slope

    def forward(self, x: Any) -> Any:
        return F.leaky_relu(x, self.negative_slope)

    def extra_repr(self) -> str:
        return f"negative_slope={self.negative_slope}"


class Softmax(Layer):
    """softmax over the stored elements along axis."""

    def __init__(self, axis: int = -1, name: str | None = None) -> None:
        super().__init__(name)
        self.axis = axis

    def forward(self, x: Any) -> Any:
        return F.softmax(x, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


class BatchNorm(batch_norm.BatchNorm1D):
    """Batch normalization of the stored elements [n, channels] of a sparse image, channel by channel.

    What is not stored counts for nothing. Parameters and training are those of nn.BatchNorm1D.

    >>> sorted(BatchNorm(3).state_dict())
    ['_mean', '_variance', 'bias', 'weight']
    """

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NDHWC",
        use_global_stats: bool | None = None,
        name: str | None = None,
    ) -> None:
        if data_format not in ("NDHWC", "NHWC"):
            raise ConfigError(f"sparse.BatchNorm: data_format={data_format!r}; a sparse image is NDHWC or NHWC")
        super().__init__(num_features, momentum, epsilon, weight_attr, bias_attr, "NC", use_global_stats, name)

    def forward(self, input: Any) -> Any:
        need_sparse("sparse.BatchNorm", "input", input)
        return input.with_values(super().forward(input.values()))


class SyncBatchNorm(BatchNorm):
    """BatchNorm over the whole batch of all devices: here the same as BatchNorm, because a Tensor is global."""

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        # "NCHW" is the public default, of a layer that takes sparse images, whose channels are always last
        data_format = "NDHWC" if data_format == "NCHW" else data_format
        super().__init__(num_features, momentum, epsilon, weight_attr, bias_attr, data_format, None, name)

    @classmethod
    def convert_sync_batchnorm(cls, layer: Layer) -> Layer:
        """layer with every sparse BatchNorm in it replaced by a SyncBatchNorm that shares its parameters."""
        return batch_norm.with_twins(layer, BatchNorm, cls)


class _SparseConv(Layer):
    """A convolution with a learned kernel [*kernel, in / groups, out], at first Gaussian as that of nn.Conv2D."""

    spatial: ClassVar[int]
    _function: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        padding_mode: str,
        weight_attr: Any,
        bias_attr: Any,
        data_format: str,
    ) -> None:
        super().__init__()
        what = f"sparse.{type(self).__name__}"
        if padding_mode != "zeros" or weight_attr is False:
            raise ConfigError(
                f"{what}: padding_mode={padding_mode!r}, weight_attr={weight_attr!r}; only 'zeros' and a learned kernel"
            )
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ConfigError(f"{what}: channels {in_channels} and {out_channels} must be multiples of groups={groups}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = sizes_of(kernel_size, self.spatial, f"{what}: kernel_size")
        self.stride, self.padding, self.dilation, self.data_format = stride, padding, dilation, data_format
        std = math.sqrt(2.0 / (in_channels * math.prod(self.kernel_size)))
        self.weight = self.create_parameter(
            [*self.kernel_size, in_channels // groups, out_channels], weight_attr, default_initializer=Normal(0.0, std)
        )
        self.bias = self.create_parameter([out_channels], bias_attr, is_bias=True)

    def forward(self, x: Any) -> Any:
        return self._function(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.data_format
        )

    def extra_repr(self) -> str:
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)):
            if getattr(self, name) != default:
                shown += f", {name}={getattr(self, name)}"
        return f"{shown}, data_format={self.data_format}"


class Conv3D(_SparseConv):
    """Convolution of a sparse [batch, depth, height, width, channels], stored wherever a window holds an element.

    >>> Conv3D(4, 6, 3, groups=2).weight.shape
    paddle.Size([3, 3, 3, 2, 6])
    """

    spatial = 3
    _function = staticmethod(F.conv3d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NDHWC",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode, weight_attr,
            bias_attr, data_format,
        )  # fmt: skip


class Conv2D(_SparseConv):
    """Convolution of a sparse [batch, height, width, channels], stored wherever a window holds an element."""

    spatial = 2
    _function = staticmethod(F.conv2d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NHWC",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode, weight_attr,
            bias_attr, data_format,
        )  # fmt: skip


class _SubmConv(_SparseConv):
    """A convolution whose outputs are where the elements are. Source: arXiv:1706.01307.

    key names a table of windows to share, and backend a way to compute; the result depends on neither.
    """

    def _check_backend(self, backend: str | None) -> None:
        if backend not in (None, "igemm"):
            raise ConfigError(f"sparse.{type(self).__name__}: backend={backend!r}; choose None or 'igemm'")


class SubmConv3D(_SubmConv):
    """Submanifold convolution of a sparse [batch, depth, height, width, channels]."""

    spatial = 3
    _function = staticmethod(F.subm_conv3d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        key: str | None = None,
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NDHWC",
        backend: str | None = None,
    ) -> None:
        self._check_backend(backend)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode, weight_attr,
            bias_attr, data_format,
        )  # fmt: skip
        self.key = key


class SubmConv2D(_SubmConv):
    """Submanifold convolution of a sparse [batch, height, width, channels]."""

    spatial = 2
    _function = staticmethod(F.subm_conv2d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        key: str | None = None,
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NHWC",
        backend: str | None = None,
    ) -> None:
        self._check_backend(backend)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode, weight_attr,
            bias_attr, data_format,
        )  # fmt: skip
        self.key = key


class MaxPool3D(Layer):
    """The largest stored element of each window that holds one. return_mask has no counterpart: ConfigError."""

    kernel_size: Any
    stride: Any
    padding: Any
    ceil_mode: bool
    data_format: str

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        return_mask: bool = False,
        ceil_mode: bool = False,
        data_format: str = "NDHWC",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if return_mask:
            raise ConfigError("sparse.MaxPool3D: return_mask=True is not supported; leave it out")
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.data_format = ceil_mode, data_format

    def forward(self, x: Any) -> Any:
        return F.max_pool3d(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.data_format)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
