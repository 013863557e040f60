"""VGG with 11 to 19 layers.

Source: Simonyan and Zisserman, 2014, arXiv:1409.1556, table 1; batch normalization is of 2015. Parameters
have the names and shapes of Paddle's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import AdaptiveAvgPool2D, BatchNorm2D, Conv2D, Dropout, Layer, Linear, MaxPool2D, ReLU, Sequential
from polyreme.vision.models.weights import maker

# convolutions in each of the five stages, by depth (with the three linear layers)
_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def make_layers(cfg: Sequence[int | str], batch_norm: bool = False) -> Sequential:
    """3 x 3 convolutions of the widths in cfg, each with ReLU; "M" stands for max pooling that halves the image."""
    layers: list[Layer] = []
    channels = 3
    for width in cfg:
        if isinstance(width, str):
            if width != "M":
                raise ConfigError(f"make_layers: cfg holds {width!r}; give widths and 'M'")
            layers.append(MaxPool2D(2, 2))
            continue
        layers += [Conv2D(channels, width, 3, padding=1), *([BatchNorm2D(width)] if batch_norm else []), ReLU()]
        channels = width
    return Sequential(*layers)


class VGG(Layer):
    """Images [batch, 3, height, width] -> scores [batch, num_classes].

    features: layers that give 512 channels, such as make_layers. num_classes=0 leaves the linear layers out,
    with_pool=False the pooling to 7 x 7 before them.
    """

    features: Layer
    num_classes: int
    with_pool: bool
    avgpool: AdaptiveAvgPool2D
    classifier: Sequential

    def __init__(self, features: Layer, num_classes: int = 1000, with_pool: bool = True) -> None:
        super().__init__()
        self.features, self.num_classes, self.with_pool = features, num_classes, with_pool
        if with_pool:
            self.avgpool = AdaptiveAvgPool2D((7, 7))
        if num_classes > 0:
            self.classifier = Sequential(
                Linear(512 * 7 * 7, 4096), ReLU(), Dropout(), Linear(4096, 4096), ReLU(), Dropout(),
                Linear(4096, num_classes),
            )  # fmt: skip

    def forward(self, x: Any) -> Any:
        x = self.features(x)
        if self.with_pool:
            x = self.avgpool(x)
        return self.classifier(x.flatten(1)) if self.num_classes > 0 else x


def _vgg(depth: int, pretrained: bool, batch_norm: bool, **kwargs: Any) -> VGG:
    widths = (64, 128, 256, 512, 512)
    cfg = [c for width, count in zip(widths, _STAGES[depth], strict=True) for c in [*[width] * count, "M"]]
    name = f"vgg{depth}{'_bn' if batch_norm else ''}"
    return maker(name, VGG, "VGG", features=make_layers(cfg, batch_norm))(pretrained, **kwargs)


def vgg11(pretrained: bool = False, batch_norm: bool = False, **kwargs: Any) -> VGG:
    """VGG with 11 layers; kwargs are those of VGG. pretrained: see weights_file, of a file vgg11 or vgg11_bn."""
    return _vgg(11, pretrained, batch_norm, **kwargs)


def vgg13(pretrained: bool = False, batch_norm: bool = False, **kwargs: Any) -> VGG:
    """VGG with 13 layers; see vgg11."""
    return _vgg(13, pretrained, batch_norm, **kwargs)


def vgg16(pretrained: bool = False, batch_norm: bool = False, **kwargs: Any) -> VGG:
    """VGG with 16 layers; see vgg11."""
    return _vgg(16, pretrained, batch_norm, **kwargs)


def vgg19(pretrained: bool = False, batch_norm: bool = False, **kwargs: Any) -> VGG:
    """VGG with 19 layers; see vgg11."""
    return _vgg(19, pretrained, batch_norm, **kwargs)
