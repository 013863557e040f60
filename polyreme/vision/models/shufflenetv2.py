"""ShuffleNet V2 in six widths.

Source: Ma et al., 2018, arXiv:1807.11164, table 5. Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import AdaptiveAvgPool2D, Layer, Linear, MaxPool2D, ReLU, Swish
from polyreme.nn import functional as F
from polyreme.ops.manipulation import concat
from polyreme.vision.models.blocks import ConvNorm
from polyreme.vision.models.weights import maker

# channels of the three stages and of the last convolution, by scale; the first convolution has 24
_WIDTHS = {
    0.25: (24, 48, 96, 512),
    0.33: (32, 64, 128, 512),
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (224, 488, 976, 2048),
}
_ACTIVATIONS = {"relu": ReLU, "swish": Swish, None: None}


class _Residual(Layer):
    """Half of the channels pass; the others go through three convolutions."""

    def __init__(self, channels: int, activation: Any) -> None:
        super().__init__()
        half = channels // 2
        self._conv_pw = ConvNorm(half, half, 1, activation=activation)
        self._conv_dw = ConvNorm(half, half, 3, groups=half, activation=None)
        self._conv_linear = ConvNorm(half, half, 1, activation=activation)

    def forward(self, x: Any) -> Any:
        left, right = x.chunk(2, 1)
        return F.channel_shuffle(concat([left, self._conv_linear(self._conv_dw(self._conv_pw(right)))], axis=1), 2)


class _Downsampling(Layer):
    """Two branches of convolutions, both of stride 2."""

    def __init__(self, inputs: int, outputs: int, activation: Any) -> None:
        super().__init__()
        half = outputs // 2
        self._conv_dw_1 = ConvNorm(inputs, inputs, 3, 2, groups=inputs, activation=None)
        self._conv_linear_1 = ConvNorm(inputs, half, 1, activation=activation)
        self._conv_pw_2 = ConvNorm(inputs, half, 1, activation=activation)
        self._conv_dw_2 = ConvNorm(half, half, 3, 2, groups=half, activation=None)
        self._conv_linear_2 = ConvNorm(half, half, 1, activation=activation)

    def forward(self, x: Any) -> Any:
        left = self._conv_linear_1(self._conv_dw_1(x))
        right = self._conv_linear_2(self._conv_dw_2(self._conv_pw_2(x)))
        return F.channel_shuffle(concat([left, right], axis=1), 2)


class ShuffleNetV2(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    scale: 0.25, 0.33, 0.5, 1.0, 1.5 or 2.0; act: "relu", "swish" or None. num_classes=0 leaves the linear layer out,
    with_pool=False the pooling before it.
    """

    scale: float
    num_classes: int
    with_pool: bool
    blocks: list[Any]

    def __init__(
        self, scale: float = 1.0, act: str | None = "relu", num_classes: int = 1000, with_pool: bool = True
    ) -> None:
        super().__init__()
        if scale not in _WIDTHS or act not in _ACTIVATIONS:
            raise ConfigError(
                f"ShuffleNetV2: scale={scale}, act={act!r}; give one of {', '.join(map(str, _WIDTHS))}, and 'relu', "
                "'swish' or None"
            )
        self.scale, self.num_classes, self.with_pool = scale, num_classes, with_pool
        activation, channels, last = _ACTIVATIONS[act], 24, _WIDTHS[scale][3]
        self._conv1 = ConvNorm(3, channels, 3, 2, activation=activation)
        self._max_pool = MaxPool2D(3, 2, 1)
        self.blocks = []
        for stage, (count, width) in enumerate(zip((4, 8, 4), _WIDTHS[scale], strict=False), 2):
            for at in range(1, count + 1):
                block = _Downsampling(channels, width, activation) if at == 1 else _Residual(width, activation)
                self.blocks.append(f"{stage}_{at}")
                setattr(self, self.blocks[-1], block)
            channels = width
        self._last_conv = ConvNorm(channels, last, 1, activation=activation)
        if with_pool:
            self._pool2d_avg = AdaptiveAvgPool2D(1)
        if num_classes > 0:
            self._fc = Linear(last, num_classes)

    def forward(self, inputs: Any) -> Any:
        x = self._max_pool(self._conv1(inputs))
        for name in self.blocks:
            x = getattr(self, name)(x)
        x = self._last_conv(x)
        if self.with_pool:
            x = self._pool2d_avg(x)
        return self._fc(x.flatten(1)) if self.num_classes > 0 else x


_ABOUT = "ShuffleNet V2"
shufflenet_v2_x0_25: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_x0_25", ShuffleNetV2, f"{_ABOUT} of width 0.25", scale=0.25
)
shufflenet_v2_x0_33: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_x0_33", ShuffleNetV2, f"{_ABOUT} of width 0.33", scale=0.33
)
shufflenet_v2_x0_5: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_x0_5", ShuffleNetV2, f"{_ABOUT} of width 0.5", scale=0.5
)
shufflenet_v2_x1_0: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_x1_0", ShuffleNetV2, f"{_ABOUT} of width 1", scale=1.0
)
shufflenet_v2_x1_5: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_x1_5", ShuffleNetV2, f"{_ABOUT} of width 1.5", scale=1.5
)
shufflenet_v2_x2_0: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_x2_0", ShuffleNetV2, f"{_ABOUT} of width 2", scale=2.0
)
shufflenet_v2_swish: Callable[..., ShuffleNetV2] = maker(
    "shufflenet_v2_swish", ShuffleNetV2, f"{_ABOUT} with swish", scale=1.0, act="swish"
)
