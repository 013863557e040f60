"""Inception v3.

Source: Szegedy et al., 2015, arXiv:1512.00567, table 1 and figures 5 to 7. A block is parallel branches,
each a chain of convolutions; parameters have the names and shapes of Paddle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyreme.nn import AdaptiveAvgPool2D, AvgPool2D, Dropout, Layer, LayerList, Linear, MaxPool2D
from polyreme.nn.initializer import Uniform
from polyreme.ops.manipulation import concat
from polyreme.vision.models.blocks import ConvNorm
from polyreme.vision.models.weights import maker

# one convolution of a branch: (name, output channels, kernel, stride); stride 2 goes without padding
Step = tuple[str, int, Any, int]
_WIDE, _TALL = (1, 7), (7, 1)


def _chain(name: str, *steps: tuple[int, Any]) -> list[Step]:
    """Steps of (channels, kernel) called name_1, name_2, ...; name alone for one. Kernel "/3" is 3, by steps of 2."""
    names = [name] if len(steps) == 1 else [f"{name}_{at}" for at in range(1, len(steps) + 1)]
    return [
        (n, width, 3 if size == "/3" else size, 2 if size == "/3" else 1)
        for n, (width, size) in zip(names, steps, strict=True)
    ]


def _a(pool: int) -> dict[str, Any]:
    return {
        "branches": [
            _chain("branch1x1", (64, 1)),
            _chain("branch5x5", (48, 1), (64, 5)),
            _chain("branch3x3dbl", (64, 1), (96, 3), (96, 3)),
        ],
        "pool": pool,
    }


def _c(inner: int) -> dict[str, Any]:
    return {
        "branches": [
            _chain("branch1x1", (192, 1)),
            _chain("branch7x7", (inner, 1), (inner, _WIDE), (192, _TALL)),
            _chain("branch7x7dbl", (inner, 1), (inner, _TALL), (inner, _WIDE), (inner, _TALL), (192, _WIDE)),
        ],
        "pool": 192,
    }


_B = {"branches": [_chain("branch3x3", (384, "/3")), _chain("branch3x3dbl", (64, 1), (96, 3), (96, "/3"))], "pool": 0}
_D = {
    "branches": [
        _chain("branch3x3", (192, 1), (320, "/3")),
        _chain("branch7x7x3", (192, 1), (192, _WIDE), (192, _TALL), (192, "/3")),
    ],
    "pool": 0,
}
# a branch that ends in two convolutions side by side, (1, 3) and (3, 1), of the width in `split`
_E = {
    "branches": [
        _chain("branch1x1", (320, 1)),
        [("branch3x3_1", 384, 1, 1)],
        [("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 1)],
    ],
    "split": {1: "branch3x3_2", 2: "branch3x3dbl_3"},
    "pool": 192,
}
# (block, its input channels)
_BLOCKS = (
    (_a(32), 192), (_a(64), 256), (_a(64), 288), (_B, 288), (_c(128), 768), (_c(160), 768), (_c(160), 768),
    (_c(192), 768), (_D, 768), (_E, 1280), (_E, 2048),
)  # fmt: skip
_STEM = (
    ("conv_1a_3x3", 3, 32, 3, 2, 0), ("conv_2a_3x3", 32, 32, 3, 1, 0), ("conv_2b_3x3", 32, 64, 3, 1, 1), None,
    ("conv_3b_1x1", 64, 80, 1, 1, 0), ("conv_4a_3x3", 80, 192, 3, 1, 0), None,
)  # fmt: skip


class _Stem(Layer):
    def __init__(self) -> None:
        super().__init__()
        for step in _STEM:
            if step is not None:
                setattr(self, step[0], ConvNorm(*step[1:]))
        self.max_pool = MaxPool2D(3, 2)

    def forward(self, x: Any) -> Any:
        for step in _STEM:
            x = self.max_pool(x) if step is None else getattr(self, step[0])(x)
        return x


class _InceptionBlock(Layer):
    """Branches side by side, then pooling: averaged and projected to `pool` channels, or the maximum by steps of 2."""

    def __init__(self, inputs: int, branches: list[list[Step]], pool: int, split: dict[int, str] | None = None) -> None:
        super().__init__()
        self._branches, self._split = [[step[0] for step in b] for b in branches], split or {}
        for index, branch in enumerate(branches):
            channels = inputs
            for name, width, size, stride in branch:
                setattr(self, name, ConvNorm(channels, width, size, stride, 0 if stride == 2 else None))
                channels = width
            if index in self._split:
                for end, kernel in (("a", (1, 3)), ("b", (3, 1))):
                    setattr(self, self._split[index] + end, ConvNorm(channels, channels, kernel))
        self.branch_pool = AvgPool2D(3, 1, 1, exclusive=False) if pool else MaxPool2D(3, 2)
        self.branch_pool_conv = ConvNorm(inputs, pool, 1) if pool else None

    def forward(self, x: Any) -> Any:
        branches = []
        for at, names in enumerate(self._branches):
            y = x
            for name in names:
                y = getattr(self, name)(y)
            branches += [getattr(self, self._split[at] + end)(y) for end in "ab"] if at in self._split else [y]
        pooled = self.branch_pool(x)
        branches.append(pooled if self.branch_pool_conv is None else self.branch_pool_conv(pooled))
        return concat(branches, axis=1)


class InceptionV3(Layer):
    """Images [batch, 3, 299, 299] -> scores [batch, num_classes].

    num_classes=0 leaves the linear layer out, with_pool=False the pooling before it.
    """

    num_classes: int
    with_pool: bool
    inception_stem: _Stem
    inception_block_list: LayerList
    avg_pool: AdaptiveAvgPool2D
    dropout: Dropout
    fc: Linear

    def __init__(self, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        self.num_classes, self.with_pool = num_classes, with_pool
        self.inception_stem = _Stem()
        self.inception_block_list = LayerList([_InceptionBlock(inputs, **settings) for settings, inputs in _BLOCKS])
        if with_pool:
            self.avg_pool = AdaptiveAvgPool2D(1)
        if num_classes > 0:
            self.dropout = Dropout(0.2, mode="downscale_in_infer")
            self.fc = Linear(2048, num_classes, weight_attr=Uniform(-1 / math.sqrt(2048), 1 / math.sqrt(2048)))

    def forward(self, x: Any) -> Any:
        x = self.inception_stem(x)
        for block in self.inception_block_list:
            x = block(x)
        if self.with_pool:
            x = self.avg_pool(x)
        return self.fc(self.dropout(x.reshape([-1, 2048]))) if self.num_classes > 0 else x


inception_v3: Callable[..., InceptionV3] = maker("inception_v3", InceptionV3, "Inception v3")
