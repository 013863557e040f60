"""DenseNet with 121 to 264 layers.

Source: Huang et al., 2016, arXiv:1608.06993, table 1. Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import AdaptiveAvgPool2D, AvgPool2D, BatchNorm2D, Conv2D, Dropout, Layer, Linear, MaxPool2D
from polyreme.nn import functional as F
from polyreme.nn.initializer import Uniform
from polyreme.ops.manipulation import concat
from polyreme.vision.models.weights import maker

# (channels of the first convolution, channels each layer adds, layers of the four blocks), by depth
_DEPTHS = {
    121: (64, 32, (6, 12, 24, 16)),
    161: (96, 48, (6, 12, 36, 24)),
    169: (64, 32, (6, 12, 32, 32)),
    201: (64, 32, (6, 12, 48, 32)),
    264: (64, 32, (6, 12, 64, 48)),
}


class _NormConv(Layer):
    """Normalization, ReLU and a convolution, in this order; or after it (norm_last)."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, norm_last: bool = False) -> None:
        super().__init__()
        self.norm_last = norm_last
        self._batch_norm = BatchNorm2D(outputs if norm_last else inputs)
        self._conv = Conv2D(inputs, outputs, size, stride, size // 2, bias_attr=False)

    def forward(self, x: Any) -> Any:
        if self.norm_last:
            return F.relu(self._batch_norm(self._conv(x)))
        return self._conv(F.relu(self._batch_norm(x)))


class _DenseLayer(Layer):
    def __init__(self, inputs: int, growth: int, bn_size: int, dropout: float) -> None:
        super().__init__()
        self.bn_ac_func1 = _NormConv(inputs, bn_size * growth, 1)
        self.bn_ac_func2 = _NormConv(bn_size * growth, growth, 3)
        self.dropout_func = Dropout(dropout, mode="downscale_in_infer") if dropout else None

    def forward(self, x: Any) -> Any:
        new = self.bn_ac_func2(self.bn_ac_func1(x))
        return concat([x, new if self.dropout_func is None else self.dropout_func(new)], axis=1)


class _DenseBlock(Layer):
    def __init__(self, inputs: int, growth: int, count: int, bn_size: int, dropout: float, stage: int) -> None:
        super().__init__()
        self.names = [f"conv{stage}_{index + 1}" for index in range(count)]
        for index, name in enumerate(self.names):
            setattr(self, name, _DenseLayer(inputs + index * growth, growth, bn_size, dropout))

    def forward(self, x: Any) -> Any:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class _Transition(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_ac_func = _NormConv(channels, channels // 2, 1)
        self.pool2d_avg = AvgPool2D(2, 2)

    def forward(self, x: Any) -> Any:
        return self.pool2d_avg(self.conv_ac_func(x))


class DenseNet(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    layers: 121, 161, 169, 201 or 264. bn_size: channels of a layer's 1 x 1 convolution, in units of what it adds.
    num_classes=0 leaves the last linear layer out, with_pool=False the pooling before it.
    """

    num_classes: int
    with_pool: bool
    conv1_func: _NormConv
    pool2d_max: MaxPool2D
    blocks: list[Any]
    batch_norm: BatchNorm2D
    pool2d_avg: AdaptiveAvgPool2D
    out: Linear

    def __init__(
        self,
        layers: int = 121,
        bn_size: int = 4,
        dropout: float = 0.0,
        num_classes: int = 1000,
        with_pool: bool = True,
    ) -> None:
        super().__init__()
        if layers not in _DEPTHS:
            raise ConfigError(f"DenseNet: layers={layers}; give one of {', '.join(map(str, _DEPTHS))}")
        self.num_classes, self.with_pool = num_classes, with_pool
        channels, growth, counts = _DEPTHS[layers]
        self.conv1_func = _NormConv(3, channels, 7, 2, norm_last=True)
        self.pool2d_max = MaxPool2D(3, 2, 1)
        self.blocks = []
        for stage, count in enumerate(counts, 2):
            if stage > 2:
                self._add(f"tr_conv{stage - 1}_blk", _Transition(channels))
                channels //= 2
            self._add(f"db_conv_{stage}", _DenseBlock(channels, growth, count, bn_size, dropout, stage))
            channels += count * growth
        self.batch_norm = BatchNorm2D(channels)
        if with_pool:
            self.pool2d_avg = AdaptiveAvgPool2D(1)
        if num_classes > 0:
            spread = Uniform(-1 / math.sqrt(channels), 1 / math.sqrt(channels))
            self.out = Linear(channels, num_classes, weight_attr=spread)

    def _add(self, name: str, block: Layer) -> None:
        self.blocks.append(name)
        setattr(self, name, block)

    def forward(self, inputs: Any) -> Any:
        x = self.pool2d_max(self.conv1_func(inputs))
        for name in self.blocks:
            x = getattr(self, name)(x)
        x = F.relu(self.batch_norm(x))
        if self.with_pool:
            x = self.pool2d_avg(x)
        return self.out(x.flatten(1)) if self.num_classes > 0 else x


densenet121: Callable[..., DenseNet] = maker("densenet121", DenseNet, "DenseNet with 121 layers", layers=121)
densenet161: Callable[..., DenseNet] = maker("densenet161", DenseNet, "DenseNet with 161 layers", layers=161)
densenet169: Callable[..., DenseNet] = maker("densenet169", DenseNet, "DenseNet with 169 layers", layers=169)
densenet201: Callable[..., DenseNet] = maker("densenet201", DenseNet, "DenseNet with 201 layers", layers=201)
densenet264: Callable[..., DenseNet] = maker("densenet264", DenseNet, "DenseNet with 264 layers", layers=264)
