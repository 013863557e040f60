"""SqueezeNet 1.0 and 1.1.

Source: Iandola et al., 2016, arXiv:1602.07360, table 1; 1.1 is its authors' version with less to compute.
Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import AdaptiveAvgPool2D, Conv2D, Dropout, Layer, MaxPool2D
from polyreme.nn import functional as F
from polyreme.ops.manipulation import concat
from polyreme.vision.models.weights import maker

# (channels of the first convolution, its size, the fire modules a max pooling stands before)
_VERSIONS = {"1.0": (96, 7, (1, 4, 8)), "1.1": (64, 3, (1, 3, 5))}
# channels of the squeezing convolution of the eight fire modules; each of the expanding two has four times as many
_SQUEEZE = (16, 16, 32, 32, 48, 48, 64, 64)


class _ConvReLU(Layer):
    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self._conv = Conv2D(inputs, outputs, size, padding=size // 2)

    def forward(self, x: Any) -> Any:
        return F.relu(self._conv(x))


class _Fire(Layer):
    def __init__(self, inputs: int, squeeze: int) -> None:
        super().__init__()
        self._conv = _ConvReLU(inputs, squeeze, 1)
        self._conv_path1 = _ConvReLU(squeeze, 4 * squeeze, 1)
        self._conv_path2 = _ConvReLU(squeeze, 4 * squeeze, 3)

    def forward(self, x: Any) -> Any:
        x = self._conv(x)
        return concat([self._conv_path1(x), self._conv_path2(x)], axis=1)


class SqueezeNet(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    version: "1.0" or "1.1". num_classes=0 leaves the last convolution out, with_pool=False the pooling after it.
    """

    version: str
    num_classes: int
    with_pool: bool

    def __init__(self, version: str, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        if version not in _VERSIONS:
            raise ConfigError(f"SqueezeNet: version={version!r}; give {' or '.join(_VERSIONS)}")
        self.version, self.num_classes, self.with_pool = version, num_classes, with_pool
        channels, size, self._pooled = _VERSIONS[version]
        self._conv = Conv2D(3, channels, size, stride=2, padding=1 if version == "1.1" else 0)
        self._pool = MaxPool2D(3, 2)
        for at, squeeze in enumerate(_SQUEEZE, 1):
            setattr(self, f"_conv{at}", _Fire(channels, squeeze))
            channels = 8 * squeeze
        self._drop = Dropout(0.5, mode="downscale_in_infer")
        if num_classes > 0:
            self._conv9 = Conv2D(channels, num_classes, 1)
        if with_pool:
            self._avg_pool = AdaptiveAvgPool2D(1)

    def forward(self, inputs: Any) -> Any:
        x = F.relu(self._conv(inputs))
        for at in range(1, 9):
            if at in self._pooled:
                x = self._pool(x)
            x = getattr(self, f"_conv{at}")(x)
        if self.num_classes > 0:
            x = F.relu(self._conv9(self._drop(x)))
        if self.with_pool:
            x = self._avg_pool(x).squeeze([2, 3])
        return x


squeezenet1_0: Callable[..., SqueezeNet] = maker("squeezenet1_0", SqueezeNet, "SqueezeNet 1.0", version="1.0")
squeezenet1_1: Callable[..., SqueezeNet] = maker("squeezenet1_1", SqueezeNet, "SqueezeNet 1.1", version="1.1")
