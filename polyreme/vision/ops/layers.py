"""Layers over the ops of detectors: deformable convolution and pooling over regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.nn.layers.conv import sizes_of
from polyreme.nn.parameter import Parameter
from polyreme.ops.detection.regions import psroi_pool, roi_align, roi_pool
from polyreme.ops.windows.deformable import deform_conv2d


class DeformConv2D(Layer):
    """deform_conv2d with a learned kernel: x [N, in_channels, H, W], offset, mask=None -> [N, out_channels, H', W'].

    The weight is at first Normal(0, sqrt(2 / (in_channels * kernel elements))), the bias 0; bias_attr=False leaves it
    out.
    """

    weight: Parameter
    bias: Parameter | None

    stride: int | Sequence[int]
    padding: int | Sequence[int]
    dilation: int | Sequence[int]
    deformable_groups: int
    groups: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        deformable_groups: int = 1,
        groups: int = 1,
        weight_attr: Any = None,
        bias_attr: Any = None,
    ) -> None:
        super().__init__()
        for name, count in (("deformable_groups", deformable_groups), ("groups", groups)):
            if count < 1 or in_channels % count:
                raise ConfigError(f"DeformConv2D: {name}={count} must divide in_channels={in_channels}")
        if out_channels % groups or weight_attr is False:
            raise ConfigError(
                f"DeformConv2D: groups={groups} must divide out_channels={out_channels}, {weight_attr=} "
                "must leave a kernel"
            )
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.deformable_groups, self.groups = deformable_groups, groups
        kernel = sizes_of(kernel_size, 2, "DeformConv2D: kernel_size")
        spread = Normal(0.0, math.sqrt(2.0 / (in_channels * math.prod(kernel))))
        shape = [out_channels, in_channels // groups, *kernel]
        self.weight = self.create_parameter(shape, weight_attr, default_initializer=spread)
        self.bias = self.create_parameter([out_channels], bias_attr, is_bias=True)

    def forward(self, x: Any, offset: Any, mask: Any = None) -> Any:
        return deform_conv2d(
            x, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, self.deformable_groups,
            self.groups, mask,
        )  # fmt: skip


class _RegionPool(Layer):
    _function: ClassVar[Callable[..., Any]]

    def __init__(self, output_size: int | Sequence[int], spatial_scale: float = 1.0) -> None:
        super().__init__()
        self.output_size, self.spatial_scale = output_size, spatial_scale

    def forward(self, x: Any, boxes: Any, boxes_num: Any) -> Any:
        return self._function(x, boxes, boxes_num, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"


class RoIPool(_RegionPool):
    """See roi_pool."""

    _function = staticmethod(roi_pool)


class PSRoIPool(_RegionPool):
    """See psroi_pool."""

    _function = staticmethod(psroi_pool)


class RoIAlign(_RegionPool):
    """See roi_align, with its default sampling_ratio; forward takes aligned=True too."""

    _function = staticmethod(roi_align)

    def forward(self, x: Any, boxes: Any, boxes_num: Any, aligned: bool = True) -> Any:
        return roi_align(x, boxes, boxes_num, self.output_size, self.spatial_scale, aligned=aligned)
