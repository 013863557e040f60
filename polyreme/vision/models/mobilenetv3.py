"""MobileNet V3, small and large.

Source: Howard et al., 2019, arXiv:1905.02244, tables 1 and 2. Parameters have the names and shapes of
Paddle's.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from polyreme.nn import (
    AdaptiveAvgPool2D,
    BatchNorm2D,
    Conv2D,
    Dropout,
    Hardsigmoid,
    Hardswish,
    Layer,
    Linear,
    ReLU,
    Sequential,
)
from polyreme.vision.models.blocks import ConvNorm, divisible
from polyreme.vision.models.weights import maker

# (kernel, width inside, output channels, squeeze and excite, hard swish instead of ReLU, stride); the paper's tables
_SMALL = (
    (3, 16, 16, True, False, 2), (3, 72, 24, False, False, 2), (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2), (5, 240, 40, True, True, 1), (5, 240, 40, True, True, 1), (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1), (5, 288, 96, True, True, 2), (5, 576, 96, True, True, 1), (5, 576, 96, True, True, 1),
)  # fmt: skip
_LARGE = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip
# section 6.1 of the paper
_norm = functools.partial(BatchNorm2D, momentum=0.99, epsilon=0.001)


class _SqueezeExcitation(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.avgpool, self.activation, self.scale_activation = AdaptiveAvgPool2D(1), ReLU(), Hardsigmoid()
        squeezed = divisible(channels // 4)
        self.fc1, self.fc2 = Conv2D(channels, squeezed, 1), Conv2D(squeezed, channels, 1)

    def forward(self, x: Any) -> Any:
        return x * self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))


class _ExcitedResidual(Layer):
    def __init__(
        self, inputs: int, size: int, width: int, outputs: int, excite: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        self.adds = stride == 1 and inputs == outputs
        activation = Hardswish if swish else ReLU
        wider = width != inputs
        self.expand_conv = ConvNorm(inputs, width, 1, norm=_norm, activation=activation) if wider else None
        self.bottleneck_conv = ConvNorm(width, width, size, stride, None, width, _norm, activation)
        self.mid_se = _SqueezeExcitation(width) if excite else None
        self.linear_conv = ConvNorm(width, outputs, 1, norm=_norm, activation=None)

    def forward(self, x: Any) -> Any:
        y = x if self.expand_conv is None else self.expand_conv(x)
        y = self.bottleneck_conv(y)
        y = self.linear_conv(y if self.mid_se is None else self.mid_se(y))
        return x + y if self.adds else y


class _MobileNetV3(Layer):
    BLOCKS: ClassVar[tuple[Any, ...]]
    LAST: ClassVar[int]
    """Channels between the two linear layers."""

    def __init__(self, scale: float = 1.0, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        self.scale, self.num_classes, self.with_pool = scale, num_classes, with_pool
        channels = divisible(16 * scale)
        self.conv = ConvNorm(3, channels, 3, 2, norm=_norm, activation=Hardswish)
        blocks = []
        for size, width, outputs, excite, swish, stride in self.BLOCKS:
            outputs = divisible(outputs * scale)
            blocks.append(_ExcitedResidual(channels, size, divisible(width * scale), outputs, excite, swish, stride))
            channels = outputs
        self.blocks = Sequential(*blocks)
        self.lastconv = ConvNorm(channels, channels * 6, 1, norm=_norm, activation=Hardswish)
        if with_pool:
            self.avgpool = AdaptiveAvgPool2D(1)
        if num_classes > 0:
            last = divisible(self.LAST * scale)
            self.classifier = Sequential(
                Linear(channels * 6, last), Hardswish(), Dropout(0.2), Linear(last, num_classes)
            )

    def forward(self, x: Any) -> Any:
        x = self.lastconv(self.blocks(self.conv(x)))
        if self.with_pool:
            x = self.avgpool(x)
        return self.classifier(x.flatten(1)) if self.num_classes > 0 else x


class MobileNetV3Small(_MobileNetV3):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    scale: of all widths, rounded to multiples of 8. num_classes=0 leaves the linear layers out, with_pool=False the
    pooling before them.
    """

    BLOCKS: ClassVar[tuple[Any, ...]] = _SMALL
    LAST: ClassVar[int] = 1024


class MobileNetV3Large(_MobileNetV3):
    """The larger one; see MobileNetV3Small."""

    BLOCKS: ClassVar[tuple[Any, ...]] = _LARGE
    LAST: ClassVar[int] = 1280


def mobilenet_v3_small(pretrained: bool = False, scale: float = 1.0, **kwargs: Any) -> MobileNetV3Small:
    """MobileNet V3 small; kwargs as for its class. pretrained: see weights_file, file mobilenet_v3_small_xSCALE."""
    return maker(f"mobilenet_v3_small_x{scale}", MobileNetV3Small, "MobileNet V3", scale=scale)(pretrained, **kwargs)


def mobilenet_v3_large(pretrained: bool = False, scale: float = 1.0, **kwargs: Any) -> MobileNetV3Large:
    """MobileNet V3 large; kwargs as for its class. pretrained: see weights_file, file mobilenet_v3_large_xSCALE."""
    return maker(f"mobilenet_v3_large_x{scale}", MobileNetV3Large, "MobileNet V3", scale=scale)(pretrained, **kwargs)
