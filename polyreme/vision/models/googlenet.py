"""GoogLeNet (Inception v1).

Source: Szegedy et al., 2014, arXiv:1409.4842, table 1, without local response normalization; ReLU stands
after each inception module only, as in Paddle's. Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyreme.nn import AdaptiveAvgPool2D, AvgPool2D, Conv2D, Dropout, Layer, Linear, MaxPool2D
from polyreme.nn import functional as F
from polyreme.nn.initializer import Uniform
from polyreme.ops.manipulation import concat
from polyreme.vision.models.weights import maker

# module: its input channels, 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, pool projected; None: max pooling
_MODULES: dict[str, tuple[int, ...] | None] = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "pool3": None,
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "pool4": None,
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


class _SameConv(Layer):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self._conv = Conv2D(inputs, outputs, size, stride, (size - 1) // 2, bias_attr=False)

    def forward(self, x: Any) -> Any:
        return self._conv(x)


class _Inception(Layer):
    def __init__(self, inputs: int, one: int, three_in: int, three: int, five_in: int, five: int, pool: int) -> None:
        super().__init__()
        self._conv1 = _SameConv(inputs, one, 1)
        self._conv3r, self._conv3 = _SameConv(inputs, three_in, 1), _SameConv(three_in, three, 3)
        self._conv5r, self._conv5 = _SameConv(inputs, five_in, 1), _SameConv(five_in, five, 5)
        self._pool, self._convprj = MaxPool2D(3, 1, 1), _SameConv(inputs, pool, 1)

    def forward(self, x: Any) -> Any:
        parts = [
            self._conv1(x),
            self._conv3(self._conv3r(x)),
            self._conv5(self._conv5r(x)),
            self._convprj(self._pool(x)),
        ]
        return F.relu(concat(parts, axis=1))


class GoogLeNet(Layer):
    """Images [batch, 3, 224, 224] -> three scores [batch, num_classes]: of the end, of module 4a and of module 4d.

    num_classes=0 leaves the linear layers out and gives what they would read; with_pool=False the pooling before them,
    which they need.
    """

    num_classes: int
    with_pool: bool

    def __init__(self, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        self.num_classes, self.with_pool = num_classes, with_pool
        self._conv, self._pool = _SameConv(3, 64, 7, 2), MaxPool2D(3, 2)
        self._conv_1, self._conv_2 = _SameConv(64, 64, 1), _SameConv(64, 192, 3)
        for name, widths in _MODULES.items():
            if widths is not None:
                setattr(self, f"_ince{name}", _Inception(*widths))
        if with_pool:
            self._pool_5 = AdaptiveAvgPool2D(1)
            self._pool_o1, self._pool_o2 = AvgPool2D(5, 3), AvgPool2D(5, 3)
        if num_classes > 0:
            self._drop, self._fc_out = Dropout(0.4, mode="downscale_in_infer"), _linear(1024, num_classes, 1024)
            for at, channels in ((1, 512), (2, 528)):
                setattr(self, f"_conv_o{at}", _SameConv(channels, 128, 1))
                setattr(self, f"_fc_o{at}", _linear(1152, 1024, 2048))
                setattr(self, f"_drop_o{at}", Dropout(0.7, mode="downscale_in_infer"))
                setattr(self, f"_out{at}", _linear(1024, num_classes, 1024))

    def forward(self, inputs: Any) -> tuple[Any, Any, Any]:
        x = self._pool(self._conv_2(self._conv_1(self._pool(self._conv(inputs)))))
        seen = {}
        for name, widths in _MODULES.items():
            x = seen[name] = self._pool(x) if widths is None else getattr(self, f"_ince{name}")(x)
        sides = [seen["4a"], seen["4d"]]
        if self.with_pool:
            x, sides = self._pool_5(x), [self._pool_o1(sides[0]), self._pool_o2(sides[1])]
        if self.num_classes > 0:
            x = self._fc_out(self._drop(x).squeeze([2, 3]))
            sides = [self._side(at, side) for at, side in enumerate(sides, 1)]
        return x, sides[0], sides[1]

    def _side(self, index: int, x: Any) -> Any:
        x = getattr(self, f"_conv_o{index}")(x).flatten(1)
        x = getattr(self, f"_fc_o{index}")(x)
        # the second has no ReLU in Paddle, whose weights are made for it
        x = F.relu(x) if index == 1 else x
        return getattr(self, f"_out{index}")(getattr(self, f"_drop_o{index}")(x))


def _linear(inputs: int, outputs: int, fan: int) -> Linear:
    # Glorot's spread; the first layers of the side heads have that of the 2,048 inputs they have in Caffe's network
    spread = Uniform(-math.sqrt(3 / fan), math.sqrt(3 / fan))
    return Linear(inputs, outputs, weight_attr=spread)


googlenet: Callable[..., GoogLeNet] = maker("googlenet", GoogLeNet, "GoogLeNet")
