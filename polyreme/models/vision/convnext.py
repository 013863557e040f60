"""ConvNeXt: convolutions of each channel by itself, each followed by a feed-forward at every pixel.

Source: arXiv:2201.03545. Same functions as transformers' ConvNextModel and ConvNextForImageClassification, whose values
are the fixtures of tests/models/test_encoders.py. Logical dims of parameters: embed and ffn, of the feed-forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    LABEL_KEYS,
    TwoLayers,
    check_activation,
    check_label_names,
    linear_rules,
    read_labels,
    same_rules,
    write_labels,
)
from polyreme.models.pretrained import Pretrained
from polyreme.models.vision.mean_classifier import MeanClassifier
from polyreme.nn import Conv2D, Layer, LayerList, LayerNorm
from polyreme.nn.initializer import Constant
from polyreme.nn.parameter import Parameter

_STEM_EPSILON = 1e-6
"""Of norms of the stem, between stages and within blocks, whatever the last norm's is."""


@dataclass(frozen=True)
class ConvNextConfig:
    """Dimensions of a ConvNeXt.

    hidden_sizes: channels of each stage. depths: blocks of each. patch_size: pixels, of the stem; every stage but the
    first halves both sides. image_size: pixels, of the images of training, which says nothing of others. activation:
    one of models.parts.encoder.ACTIVATIONS. scale: what blocks are multiplied by at the beginning; 0 for no such
    numbers. num_labels: what the classifier scores; label_names: what they are called.
    """

    hidden_sizes: Sequence[int] = (96, 192, 384, 768)
    depths: Sequence[int] = (3, 3, 9, 3)
    patch_size: int = 4
    image_size: int = 224
    num_channels: int = 3
    activation: str = "gelu"
    scale: float = 1e-6
    layer_norm_epsilon: float = 1e-12
    num_labels: int = 2
    label_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_dimensions(self)
        check_activation("ConvNextConfig", self.activation)
        check_label_names(self)
        for name in ("hidden_sizes", "depths"):
            sizes = getattr(self, name)
            is_listed = isinstance(sizes, Sequence) and all(type(size) is int and size > 0 for size in sizes)
            if not is_listed or len(sizes) != len(self.hidden_sizes) or not sizes:
                raise ConfigError(
                    f"ConvNextConfig: {name} {sizes!r}; give a whole number of 1 or more for each stage, as "
                    "hidden_sizes and depths have"
                )
            object.__setattr__(self, name, tuple(sizes))


class ConvNextBlock(Layer):
    """x + scale * feed_forward(norm(convolution(x))), images as [batch, height, width, channels]."""

    convolution: Conv2D
    norm: LayerNorm
    ffn: TwoLayers
    scale: Parameter | None

    def __init__(self, config: ConvNextConfig, width: int) -> None:
        super().__init__()
        self.convolution = Conv2D(width, width, 7, padding=3, groups=width, data_format="NHWC")
        self.norm = LayerNorm(width, epsilon=_STEM_EPSILON)
        self.ffn = TwoLayers(width, 4 * width, config.activation)
        has_scale = config.scale > 0
        self.scale = self.create_parameter([width], default_initializer=Constant(config.scale)) if has_scale else None

    def forward(self, x_bhwc: Any) -> Any:
        mixed = self.ffn(self.norm(self.convolution(x_bhwc)))
        return x_bhwc + (mixed if self.scale is None else mixed * self.scale)


class ConvNextStage(Layer):
    """Blocks, after a norm and a convolution that halves the sides where widths are two."""

    norm: LayerNorm | None
    down: Conv2D | None
    blocks: LayerList

    def __init__(self, config: ConvNextConfig, number: int) -> None:
        super().__init__()
        width = config.hidden_sizes[number]
        before = config.hidden_sizes[number - 1] if number else 0
        self.norm = LayerNorm(before, epsilon=_STEM_EPSILON) if number else None
        self.down = Conv2D(before, width, 2, stride=2, data_format="NHWC") if number else None
        self.blocks = LayerList([ConvNextBlock(config, width) for _ in range(config.depths[number])])

    def forward(self, x_bhwc: Any) -> Any:
        if self.norm is not None and self.down is not None:
            x_bhwc = self.down(self.norm(x_bhwc))
        for block in self.blocks:
            x_bhwc = block(x_bhwc)
        return x_bhwc


class ConvNext(Pretrained, Layer):
    """Images [batch, channels, height, width] -> (hidden [batch, embed, rows, columns], pooled [batch, embed]).

    embed: channels of the last stage. pooled: the norm of the mean over rows and columns.

    >>> from polyreme.ops.creation import zeros
    >>> ConvNext(ConvNextConfig((4, 8), (1, 1)))(zeros([1, 3, 16, 24]))[0].shape
    paddle.Size([1, 8, 2, 3])
    """

    patches: Conv2D
    patch_norm: LayerNorm
    stages: LayerList
    norm: LayerNorm

    family: Any = architecture("convnext", "base")

    def __init__(self, config: ConvNextConfig) -> None:
        super().__init__()
        self.config = config
        side, first, last = config.patch_size, config.hidden_sizes[0], config.hidden_sizes[-1]
        self.patches = Conv2D(config.num_channels, first, side, stride=side, data_format="NHWC")
        self.patch_norm = LayerNorm(first, epsilon=_STEM_EPSILON)
        self.stages = LayerList([ConvNextStage(config, number) for number in range(len(config.depths))])
        self.norm = LayerNorm(last, epsilon=config.layer_norm_epsilon)

    def forward(self, pixel_values: Any) -> Any:
        shape, least = list(pixel_values.shape), self.config.patch_size * 2 ** (len(self.config.depths) - 1)
        if len(shape) != 4 or shape[1] != self.config.num_channels or min(shape[2:]) < least:
            raise ShapeError(
                f"{type(self).__name__}: images have shape {shape}; give [batch, {self.config.num_channels}, height, "
                f"width], both of {least} or more"
            )
        x_bhwc = self.patch_norm(self.patches(pixel_values.transpose([0, 2, 3, 1])))
        for stage in self.stages:
            x_bhwc = stage(x_bhwc)
        return x_bhwc.transpose([0, 3, 1, 2]), self.norm(x_bhwc.mean([1, 2]))

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: an image."""
        side = self.config.image_size
        return (rng.standard_normal((1, self.config.num_channels, side, side), "float32"),)


class ConvNextForImageClassification(MeanClassifier):
    """As MeanClassifier, of a ConvNext."""

    encoder_class: type[Any] = ConvNext
    family: Any = architecture("convnext", "image_classification")


# as published


def _rules(config: ConvNextConfig, ours: str) -> list[WeightRule]:
    rules = [
        *same_rules("convnext.embeddings.patch_embeddings", f"{ours}patches"),
        *same_rules("convnext.embeddings.layernorm", f"{ours}patch_norm"),
        *same_rules("convnext.layernorm", f"{ours}norm"),
    ]
    for number in range(len(config.depths)):
        there, here = f"convnext.encoder.stages.{number}", f"{ours}stages.{number}"
        block, our_block = f"{there}.layers.{{n}}", f"{here}.blocks.{{n}}"
        rules += [
            *same_rules(f"{there}.downsampling_layer.0", f"{here}.norm"),
            *same_rules(f"{there}.downsampling_layer.1", f"{here}.down"),
            *same_rules(f"{block}.dwconv", f"{our_block}.convolution"),
            *same_rules(f"{block}.layernorm", f"{our_block}.norm"),
            *linear_rules(f"{block}.pwconv1", f"{our_block}.ffn.up"),
            *linear_rules(f"{block}.pwconv2", f"{our_block}.ffn.down"),
            WeightRule(f"{block}.layer_scale_parameter", f"{our_block}.scale", SAME),
        ]
    return rules


def _write(config: ConvNextConfig) -> dict[str, Any]:
    lists = {"hidden_sizes": [*config.hidden_sizes], "depths": [*config.depths], "num_stages": len(config.depths)}
    return write_labels(config) | lists


PUBLISHED_BASE = PublishedFamily(
    architecture="ConvNextModel",
    model_type="convnext",
    keys={
        "hidden_sizes": "hidden_sizes",
        "depths": "depths",
        "patch_size": "patch_size",
        "image_size": "image_size",
        "num_channels": "num_channels",
        "hidden_act": "activation",
        "layer_scale_init_value": "scale",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    weights=lambda config: _rules(config, ""),
    fixed={"drop_path_rate": (0.0,)},
    prefix="convnext.",
    bare=True,
    heads=("classifier.",),
    read=read_labels,
    # num_stages is the length of the lists; the others are of who takes outputs of several stages
    read_keys=(*LABEL_KEYS, "num_stages", "stage_names", "out_features", "out_indices"),
    write=_write,
)
PUBLISHED_IMAGE_CLASSIFICATION = replace(
    PUBLISHED_BASE,
    architecture="ConvNextForImageClassification",
    bare=False,
    weights=lambda config: [*_rules(config, "encoder."), *linear_rules("classifier", "classifier")],
)
