"""AlexNet.

Source: Krizhevsky, 2014, arXiv:1404.5997 ("one weird trick": one column of the network of 2012). Parameters
have the names and shapes of Paddle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyreme.nn import Conv2D, Dropout, Layer, Linear, MaxPool2D
from polyreme.nn import functional as F
from polyreme.nn.initializer import Uniform
from polyreme.vision.models.weights import maker

_FEATURES = 256 * 6 * 6


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> Conv2D:
    spread = Uniform(-1 / math.sqrt(inputs * size**2), 1 / math.sqrt(inputs * size**2))
    return Conv2D(inputs, outputs, size, stride, 2 if size > 3 else 1, weight_attr=spread, bias_attr=spread)


class _ConvPool(Layer):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self._conv = _conv(inputs, outputs, size, stride)
        self._pool = MaxPool2D(3, 2)

    def forward(self, x: Any) -> Any:
        return self._pool(F.relu(self._conv(x)))


class AlexNet(Layer):
    """Images [batch, 3, 224, 224] -> scores [batch, num_classes]; with num_classes=0, features [batch, 256, 6, 6]."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.num_classes = num_classes
        self._conv1 = _ConvPool(3, 64, 11, 4)
        self._conv2 = _ConvPool(64, 192, 5)
        self._conv3 = _conv(192, 384, 3)
        self._conv4 = _conv(384, 256, 3)
        self._conv5 = _ConvPool(256, 256, 3)
        if num_classes > 0:
            self._drop1 = Dropout(0.5, mode="downscale_in_infer")
            # one spread for all three, that of the first
            spread = Uniform(-1 / math.sqrt(_FEATURES), 1 / math.sqrt(_FEATURES))
            self._fc6 = Linear(_FEATURES, 4096, weight_attr=spread, bias_attr=spread)
            self._drop2 = Dropout(0.5, mode="downscale_in_infer")
            self._fc7 = Linear(4096, 4096, weight_attr=spread, bias_attr=spread)
            self._fc8 = Linear(4096, num_classes, weight_attr=spread, bias_attr=spread)

    def forward(self, inputs: Any) -> Any:
        x = self._conv2(self._conv1(inputs))
        x = self._conv5(F.relu(self._conv4(F.relu(self._conv3(x)))))
        if self.num_classes <= 0:
            return x
        x = F.relu(self._fc6(self._drop1(x.flatten(1))))
        return self._fc8(F.relu(self._fc7(self._drop2(x))))


alexnet: Callable[..., AlexNet] = maker("alexnet", AlexNet, "AlexNet")
