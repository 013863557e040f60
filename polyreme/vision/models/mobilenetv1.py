"""MobileNet V1.

Source: Howard et al., 2017, arXiv:1704.04861, table 1. Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

from typing import Any

from polyreme.nn import AdaptiveAvgPool2D, Layer, Linear
from polyreme.vision.models.blocks import ConvNorm
from polyreme.vision.models.weights import maker

# block: (output channels, stride)
_BLOCKS = {
    "conv2_1": (64, 1), "conv2_2": (128, 2), "conv3_1": (128, 1), "conv3_2": (256, 2), "conv4_1": (256, 1),
    "conv4_2": (512, 2), **{f"conv5_{at}": (512, 1) for at in range(1, 6)}, "conv5_6": (1024, 2), "conv6": (1024, 1),
}  # fmt: skip


class _Separable(Layer):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._depthwise_conv = ConvNorm(inputs, inputs, 3, stride, groups=inputs)
        self._pointwise_conv = ConvNorm(inputs, outputs, 1)

    def forward(self, x: Any) -> Any:
        return self._pointwise_conv(self._depthwise_conv(x))


class MobileNetV1(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    scale: of all widths. num_classes=0 leaves the linear layer out, with_pool=False the pooling before it.
    """

    scale: float
    num_classes: int
    with_pool: bool
    conv1: ConvNorm
    pool2d_avg: AdaptiveAvgPool2D
    fc: Linear

    def __init__(self, scale: float = 1.0, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        self.scale, self.num_classes, self.with_pool = scale, num_classes, with_pool
        channels = int(32 * scale)
        self.conv1 = ConvNorm(3, channels, 3, 2)
        for name, (width, stride) in _BLOCKS.items():
            setattr(self, name, _Separable(channels, int(width * scale), stride))
            channels = int(width * scale)
        if with_pool:
            self.pool2d_avg = AdaptiveAvgPool2D(1)
        if num_classes > 0:
            self.fc = Linear(channels, num_classes)

    def forward(self, x: Any) -> Any:
        x = self.conv1(x)
        for name in _BLOCKS:
            x = getattr(self, name)(x)
        if self.with_pool:
            x = self.pool2d_avg(x)
        return self.fc(x.flatten(1)) if self.num_classes > 0 else x


def mobilenet_v1(pretrained: bool = False, scale: float = 1.0, **kwargs: Any) -> MobileNetV1:
    """MobileNet V1; kwargs are those of MobileNetV1. pretrained: see weights_file, of a file mobilenetv1_SCALE."""
    return maker(f"mobilenetv1_{scale}", MobileNetV1, "MobileNet V1", scale=scale)(pretrained, **kwargs)
