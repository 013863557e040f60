"""MobileNet V2.

Source: Sandler et al., 2018, arXiv:1801.04381, table 2. Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

from typing import Any

from polyreme.nn import AdaptiveAvgPool2D, BatchNorm2D, Conv2D, Dropout, Layer, Linear, ReLU6, Sequential
from polyreme.vision.models.blocks import ConvNorm, divisible
from polyreme.vision.models.weights import maker

# (how much wider inside, output channels, blocks, stride of the first) of the seven stages
_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


class _InvertedResidual(Layer):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        self.adds = stride == 1 and inputs == outputs
        width = inputs * expand
        wider = [] if expand == 1 else [ConvNorm(inputs, width, 1, activation=ReLU6)]
        self.conv = Sequential(
            *wider,
            ConvNorm(width, width, 3, stride, groups=width, activation=ReLU6),
            Conv2D(width, outputs, 1, bias_attr=False),
            BatchNorm2D(outputs),
        )

    def forward(self, x: Any) -> Any:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    scale: of all widths, rounded to multiples of 8. num_classes=0 leaves the linear layer out, with_pool=False the
    pooling before it.
    """

    num_classes: int
    with_pool: bool
    features: Sequential
    pool2d_avg: AdaptiveAvgPool2D
    classifier: Sequential

    def __init__(self, scale: float = 1.0, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        self.num_classes, self.with_pool = num_classes, with_pool
        channels = divisible(32 * scale)
        layers: list[Layer] = [ConvNorm(3, channels, 3, 2, activation=ReLU6)]
        for expand, width, count, stride in _STAGES:
            outputs = divisible(width * scale)
            for at in range(count):
                layers.append(_InvertedResidual(channels, outputs, stride if at == 0 else 1, expand))
                channels = outputs
        last = divisible(1280 * max(1.0, scale))
        self.features = Sequential(*layers, ConvNorm(channels, last, 1, activation=ReLU6))
        if with_pool:
            self.pool2d_avg = AdaptiveAvgPool2D(1)
        if num_classes > 0:
            self.classifier = Sequential(Dropout(0.2), Linear(last, num_classes))

    def forward(self, x: Any) -> Any:
        x = self.features(x)
        if self.with_pool:
            x = self.pool2d_avg(x)
        return self.classifier(x.flatten(1)) if self.num_classes > 0 else x


def mobilenet_v2(pretrained: bool = False, scale: float = 1.0, **kwargs: Any) -> MobileNetV2:
    """MobileNet V2; kwargs are those of MobileNetV2. pretrained: see weights_file, of a file mobilenetv2_SCALE."""
    return maker(f"mobilenetv2_{scale}", MobileNetV2, "MobileNet V2", scale=scale)(pretrained, **kwargs)
