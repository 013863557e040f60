"""ResNet, wide ResNet and ResNeXt.

Sources: He et al., 2015, arXiv:1512.03385 (table 1), with the stride in the 3 x 3 convolution of a
bottleneck ("v1.5"); Zagoruyko and Komodakis, 2016, arXiv:1605.07146; Xie et al., 2016, arXiv:1611.05431 (table 1).
Parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import AdaptiveAvgPool2D, BatchNorm2D, Conv2D, Layer, Linear, MaxPool2D, ReLU, Sequential
from polyreme.vision.models.weights import maker

# how many blocks each of the four stages has, by depth
_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> Conv2D:
    padding = dilation * (size // 2)
    return Conv2D(
        inputs, outputs, size, stride=stride, padding=padding, dilation=dilation, groups=groups, bias_attr=False
    )


class BasicBlock(Layer):
    """Two 3 x 3 convolutions and the identity (or downsample) added: [n, inplanes, h, w] -> [n, planes, h/s, w/s]."""

    conv1: Conv2D
    bn1: BatchNorm2D | Layer
    relu: ReLU
    conv2: Conv2D
    bn2: BatchNorm2D | Layer

    expansion: ClassVar[int] = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: Layer | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: Callable[[int], Layer] | None = None,
    ) -> None:
        super().__init__()
        if dilation != 1:
            raise ConfigError(f"BasicBlock: dilation={dilation}; only a BottleneckBlock can be dilated")
        if groups != 1 or base_width != 64:
            raise ConfigError(
                f"BasicBlock: groups={groups}, width={base_width}; only a BottleneckBlock can be grouped or wide"
            )
        norm = norm_layer or BatchNorm2D
        self.conv1 = _conv(inplanes, planes, 3, stride)
        self.bn1 = norm(planes)
        self.relu = ReLU()
        self.conv2 = _conv(planes, planes, 3)
        self.bn2 = norm(planes)
        self.downsample = downsample

    def forward(self, x: Any) -> Callable[..., ResNet]:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class BottleneckBlock(Layer):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and the identity (or downsample) added: -> [n, 4 planes, h/s, w/s]."""

    conv1: Conv2D
    bn1: BatchNorm2D | Layer
    conv2: Conv2D
    bn2: BatchNorm2D | Layer
    conv3: Conv2D
    bn3: BatchNorm2D | Layer
    relu: ReLU

    expansion: ClassVar[int] = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: Layer | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: Callable[[int], Layer] | None = None,
    ) -> None:
        super().__init__()
        norm = norm_layer or BatchNorm2D
        width = planes * base_width // 64 * groups
        self.conv1 = _conv(inplanes, width, 1)
        self.bn1 = norm(width)
        self.conv2 = _conv(width, width, 3, stride, groups, dilation)
        self.bn2 = norm(width)
        self.conv3 = _conv(width, planes * self.expansion, 1)
        self.bn3 = norm(planes * self.expansion)
        self.relu = ReLU()
        self.downsample = downsample

    def forward(self, x: Any) -> Callable[..., ResNet]:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    block: BasicBlock or BottleneckBlock; depth: 18, 34, 50, 101 or 152; width: of a bottleneck's 3 x 3 convolution in
    the first stage, per group. num_classes=0 leaves the last linear layer out, with_pool=False the pooling before it.

    >>> ResNet(BasicBlock, 18, num_classes=0, with_pool=False).training
    True
    """

    dilation: int
    num_classes: int
    with_pool: bool
    groups: int
    base_width: int
    inplanes: Any
    conv1: Conv2D
    bn1: BatchNorm2D
    relu: ReLU
    maxpool: MaxPool2D
    avgpool: AdaptiveAvgPool2D
    fc: Linear

    def __init__(
        self,
        block: type[BasicBlock] | type[BottleneckBlock],
        depth: int = 50,
        width: int = 64,
        num_classes: int = 1000,
        with_pool: bool = True,
        groups: int = 1,
    ) -> None:
        super().__init__()
        if isinstance(num_classes, bool):  # the order of releases without width: block, depth, num_classes, with_pool
            width, num_classes, with_pool = 64, width, num_classes
        if depth not in _STAGES:
            raise ConfigError(f"ResNet: depth={depth!r}{did_you_mean(depth, map(str, _STAGES))}")
        self.num_classes, self.with_pool, self.groups, self.base_width = num_classes, with_pool, groups, width
        self.inplanes, self.dilation = 64, 1
        self._norm_layer: Callable[[int], Layer] = BatchNorm2D
        self.conv1 = _conv(3, 64, 7, stride=2)
        self.bn1 = BatchNorm2D(64)
        self.relu = ReLU()
        self.maxpool = MaxPool2D(kernel_size=3, stride=2, padding=1)
        for at, blocks in enumerate(_STAGES[depth]):
            setattr(self, f"layer{at + 1}", self._make_layer(block, 64 * 2**at, blocks, 1 if at == 0 else 2))
        if with_pool:
            self.avgpool = AdaptiveAvgPool2D((1, 1))
        if num_classes > 0:
            self.fc = Linear(512 * block.expansion, num_classes)

    def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> Sequential:
        """A stage, which subclasses make of other blocks; dilate: dilated by its stride instead, as in segmentation."""
        before = self.dilation
        if dilate:
            self.dilation, stride = self.dilation * stride, 1
        norm, outputs = self._norm_layer, planes * block.expansion
        downsample = None
        if stride != 1 or self.inplanes != outputs:
            downsample = Sequential(_conv(self.inplanes, outputs, 1, stride), norm(outputs))
        first = block(self.inplanes, planes, stride, downsample, self.groups, self.base_width, before, norm)
        self.inplanes = outputs
        wide = {"groups": self.groups, "base_width": self.base_width, "norm_layer": norm}
        return Sequential(first, *[block(outputs, planes, **wide) for _ in range(blocks - 1)])

    def forward(self, x: Any) -> Callable[..., ResNet]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        if self.with_pool:
            x = self.avgpool(x)
        return self.fc(x.flatten(1)) if self.num_classes > 0 else x


def _make(name: str, block: Any, depth: int, **fixed: Any) -> Callable[..., ResNet]:
    return maker(name, ResNet, f"The network called {name}", block=block, depth=depth, **fixed)


resnet18: Callable[..., ResNet] = _make("resnet18", BasicBlock, 18)
resnet34: Callable[..., ResNet] = _make("resnet34", BasicBlock, 34)
resnet50: Callable[..., ResNet] = _make("resnet50", BottleneckBlock, 50)
resnet101: Callable[..., ResNet] = _make("resnet101", BottleneckBlock, 101)
resnet152: Callable[..., ResNet] = _make("resnet152", BottleneckBlock, 152)
wide_resnet50_2: Callable[..., ResNet] = _make("wide_resnet50_2", BottleneckBlock, 50, width=128)
wide_resnet101_2: Callable[..., ResNet] = _make("wide_resnet101_2", BottleneckBlock, 101, width=128)
resnext50_32x4d: Callable[..., ResNet] = _make("resnext50_32x4d", BottleneckBlock, 50, width=4, groups=32)
resnext50_64x4d: Callable[..., ResNet] = _make("resnext50_64x4d", BottleneckBlock, 50, width=4, groups=64)
resnext101_32x4d: Callable[..., ResNet] = _make("resnext101_32x4d", BottleneckBlock, 101, width=4, groups=32)
resnext101_64x4d: Callable[..., ResNet] = _make("resnext101_64x4d", BottleneckBlock, 101, width=4, groups=64)
resnext152_32x4d: Callable[..., ResNet] = _make("resnext152_32x4d", BottleneckBlock, 152, width=4, groups=32)
resnext152_64x4d: Callable[..., ResNet] = _make("resnext152_64x4d", BottleneckBlock, 152, width=4, groups=64)
