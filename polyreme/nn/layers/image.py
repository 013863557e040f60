"""Layers that resize images, trade channels for pixels and cut windows.

Each is one function of polyreme.nn.functional with its settings.
"""

from __future__ import annotations

from typing import Any

from polyreme.core.alias import Alias
from polyreme.core.annotations import Padding, Sizes
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layers.functional_layer import FunctionalLayer


class Upsample(FunctionalLayer):
    """The input resized to size, or by scale_factor, in mode nearest, linear, bilinear, trilinear, bicubic or area."""

    _function = staticmethod(F.interpolate)

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool = False,
        align_mode: int = 0,
        data_format: str | None = None,
        recompute_scale_factor: bool | None = None,
        name: str | None = None,
    ) -> None:
        if recompute_scale_factor:
            raise ConfigError("Upsample: recompute_scale_factor=True is not supported; leave it out")
        super().__init__(
            name,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            align_mode=align_mode,
            data_format=data_format,
        )
        self.recompute_scale_factor = recompute_scale_factor


class UpsamplingNearest2D(FunctionalLayer):
    """[batch, channel, height, width] resized by repeating the nearest pixel."""

    _function = staticmethod(F.interpolate)

    def __init__(
        self, size: Any = None, scale_factor: Any = None, data_format: str = "NCHW", name: str | None = None
    ) -> None:
        super().__init__(name, size=size, scale_factor=scale_factor, mode="nearest", data_format=data_format)


class UpsamplingBilinear2D(FunctionalLayer):
    """[batch, channel, height, width] resized by bilinear interpolation with corners aligned."""

    _function = staticmethod(F.interpolate)

    def __init__(
        self, size: Any = None, scale_factor: Any = None, data_format: str = "NCHW", name: str | None = None
    ) -> None:
        super().__init__(
            name, size=size, scale_factor=scale_factor, mode="bilinear", align_corners=True, data_format=data_format
        )


class PixelShuffle(FunctionalLayer):
    """[batch, channel * f * f, height, width] -> [batch, channel, height * f, width * f]. Source: arXiv:1609.05158."""

    _function = staticmethod(F.pixel_shuffle)
    _attribute_prefix = "_"

    def __init__(self, upscale_factor: int, data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(name, upscale_factor=upscale_factor, data_format=data_format)


class PixelUnshuffle(FunctionalLayer):
    """The inverse of PixelShuffle."""

    _function = staticmethod(F.pixel_unshuffle)
    _attribute_prefix = "_"

    def __init__(self, downscale_factor: int, data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(name, downscale_factor=downscale_factor, data_format=data_format)


class ChannelShuffle(FunctionalLayer):
    """Channels dealt out over groups: [groups, n] of them read as [n, groups]. Source: arXiv:1707.01083."""

    _function = staticmethod(F.channel_shuffle)
    _attribute_prefix = "_"

    def __init__(self, groups: int, data_format: str = "NCHW", name: str | None = None) -> None:
        super().__init__(name, groups=groups, data_format=data_format)


class Unfold(FunctionalLayer):
    """Every window of an image as a column: [N, C, H, W] -> [N, C * kh * kw, windows]."""

    _function = staticmethod(F.unfold)

    def __init__(
        self, kernel_sizes: Any, dilations: Any = 1, paddings: Any = 0, strides: Any = 1, name: str | None = None
    ) -> None:
        super().__init__(name, kernel_sizes=kernel_sizes, dilations=dilations, paddings=paddings, strides=strides)


class Fold(FunctionalLayer):
    """Columns of windows added up into an image: [N, C * kh * kw, windows] -> [N, C, *output_sizes]."""

    _function = staticmethod(F.fold)
    output_size: Alias[Sizes] = Alias("output_sizes")
    kernel_size: Alias[Sizes] = Alias("kernel_sizes")
    dilation: Alias[Sizes] = Alias("dilations")
    padding: Alias[Padding] = Alias("paddings")
    stride: Alias[Sizes] = Alias("strides")

    def __init__(
        self,
        output_sizes: Any,
        kernel_sizes: Any,
        dilations: Any = 1,
        paddings: Any = 0,
        strides: Any = 1,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            output_sizes=output_sizes,
            kernel_sizes=kernel_sizes,
            dilations=dilations,
            paddings=paddings,
            strides=strides,
        )
