"""Swin: a vision transformer whose patches attend within windows that every other block shifts.

Source: arXiv:2103.14030. Same functions as transformers' SwinModel and SwinForImageClassification, whose values are the
fixtures of tests/models/test_encoders.py. Logical dims of parameters: embed, heads, ffn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models.families import architecture
from polyreme.models.files.published import Conversion, PublishedFamily, WeightRule
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    LABEL_KEYS,
    SelfAttention,
    TwoLayers,
    check_activation,
    check_label_names,
    linear,
    linear_rules,
    read_labels,
    same_rules,
    write_labels,
)
from polyreme.models.pretrained import Pretrained
from polyreme.models.vision.mean_classifier import MeanClassifier
from polyreme.nn import Conv2D, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat, roll

_OUTSIDE = -100.0
"""Added to scores of patches that are neighbours in a shifted window alone, as of the weights' training."""


@dataclass(frozen=True)
class SwinConfig:
    """Dimensions of a Swin.

    embed_dim: the width of the first stage; every other has twice the one before, and half its sides. depths,
    num_heads: blocks and heads of each stage. window_size: patches along a side of a window. ffn_factor: the width of
    the feed-forward over a stage's. patch_size: pixels; image_size: pixels, of the images of training, which says
    nothing of others. activation: one of models.parts.encoder.ACTIVATIONS. dropout, attention_dropout: probabilities,
    while training; drop_path: that an image goes without the attention of the last block, in even steps from 0 at the
    first. num_labels: what the classifier scores; label_names: what they are called.
    """

    embed_dim: int = 96
    depths: Sequence[int] = (2, 2, 6, 2)
    num_heads: Sequence[int] = (3, 6, 12, 24)
    window_size: int = 7
    ffn_factor: float = 4.0
    image_size: int = 224
    patch_size: int = 4
    num_channels: int = 3
    activation: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.1
    layer_norm_epsilon: float = 1e-5
    num_labels: int = 2
    label_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_dimensions(self)
        check_activation("SwinConfig", self.activation)
        check_label_names(self)
        for name in ("depths", "num_heads"):
            numbers = getattr(self, name)
            is_listed = isinstance(numbers, Sequence) and all(type(number) is int and number > 0 for number in numbers)
            if not is_listed or len(numbers) != len(self.depths) or not numbers:
                raise ConfigError(
                    f"SwinConfig: {name} {numbers!r}; give a whole number of 1 or more for each stage, as depths and "
                    "num_heads have"
                )
            object.__setattr__(self, name, tuple(numbers))
        for width, heads in zip(self.hidden_sizes, self.num_heads, strict=True):
            if width % heads:
                raise ConfigError(
                    f"SwinConfig: a stage's width {width}, of embed_dim {self.embed_dim}, is not a multiple of its "
                    f"{heads} heads; make it {nearest_multiples(width, heads)}"
                )

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """The width of each stage."""
        return tuple(self.embed_dim * 2**number for number in range(len(self.depths)))

    @property
    def least_side(self) -> int:
        """Pixels along a side of an image, of which the last stage still has a window."""
        return (self.window_size - 1) * 2 ** (len(self.depths) - 1) * self.patch_size + 1


def _offsets(side: int) -> np.ndarray:
    """The row of a table of (2 side - 1)^2 offsets for each two patches of a window, int64 [side^2, side^2]."""
    rows, columns = (place.reshape(-1) for place in np.indices((side, side)))
    down, right = (place[:, None] - place[None] + side - 1 for place in (rows, columns))
    return down * (2 * side - 1) + right


def _regions(rows: int, columns: int, side: int, shift: int) -> np.ndarray:
    """Of shifted patches the number of the part of the image that they were in, by windows: int64 [windows, side^2]."""

    def parts(count: int) -> np.ndarray:
        return np.digitize(np.arange(count), [count - side, count - shift])

    numbers = 3 * parts(rows)[:, None] + parts(columns)
    return numbers.reshape(rows // side, side, columns // side, side).transpose(0, 2, 1, 3).reshape(-1, side * side)


def _padded(x_bhwe: Any, multiple: int) -> Any:
    """x with rows and columns of zeros at the end, to this multiple of both."""
    down, right = (-size % multiple for size in x_bhwe.shape[1:3])
    return F.pad(x_bhwe, [0, 0, 0, down, 0, right, 0, 0]) if down or right else x_bhwe


class WindowAttention(Layer):
    """Attention of images [batch, rows, columns, embed] within windows, to whose scores each head adds what it has
    learned of two patches' offset. shift: patches by which the windows begin later, where there is more than one."""

    attention: SelfAttention
    offsets: Parameter

    def __init__(self, config: SwinConfig, stage: int, shift: int) -> None:
        super().__init__()
        self.side, self.shift = config.window_size, shift
        heads = config.num_heads[stage]
        self.attention = SelfAttention(config.hidden_sizes[stage], heads, config.attention_dropout)
        # whole on every device: first stages have few heads, which a mesh axis need not divide
        self.offsets = self.create_parameter([(2 * self.side - 1) ** 2, heads], default_initializer=Constant(0.0))

    def forward(self, x_bhwe: Any) -> Any:
        rows, columns = x_bhwe.shape[1:3]
        shift = self.shift if min(rows, columns) > self.side else 0
        x_bhwe = _padded(x_bhwe, self.side)
        batch, padded_rows, padded_columns, width = x_bhwe.shape
        down, right = padded_rows // self.side, padded_columns // self.side
        if shift:
            x_bhwe = roll(x_bhwe, [-shift, -shift], [1, 2])
        windows = x_bhwe.reshape([batch, down, self.side, right, self.side, width]).transpose([0, 1, 3, 2, 4, 5])
        mixed = self.attention(
            windows.reshape([-1, self.side**2, width]), self.scores_mask(batch, padded_rows, padded_columns, shift)
        )
        mixed = mixed.reshape([batch, down, right, self.side, self.side, width]).transpose([0, 1, 3, 2, 4, 5])
        x_bhwe = mixed.reshape([batch, padded_rows, padded_columns, width])
        if shift:
            x_bhwe = roll(x_bhwe, [shift, shift], [1, 2])
        return x_bhwe[:, :rows, :columns]

    def scores_mask(self, batch: int, rows: int, columns: int, shift: int) -> Any:
        """What is added to the scores of windows, [1 or batch * windows, heads, side^2, side^2]."""
        places, heads = self.side**2, self.offsets.shape[1]
        added = self.offsets[to_tensor(_offsets(self.side).reshape(-1))].reshape([1, places, places, heads])
        added = added.transpose([0, 3, 1, 2])
        if not shift:
            return added
        regions = to_tensor(_regions(rows, columns, self.side, shift))
        is_outside = (regions.unsqueeze(1) != regions.unsqueeze(2)).unsqueeze(1)
        added = where(is_outside, added + _OUTSIDE, added).unsqueeze(0)
        return added.expand([batch, *added.shape[1:]]).reshape([-1, heads, places, places])


class SwinBlock(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). drop_path: the probability that an image goes without the
    attention, while training."""

    attention_norm: LayerNorm
    attention: WindowAttention
    ffn_norm: LayerNorm
    ffn: TwoLayers

    def __init__(self, config: SwinConfig, stage: int, shift: int, drop_path: float) -> None:
        super().__init__()
        width, epsilon = config.hidden_sizes[stage], config.layer_norm_epsilon
        self.dropout, self.attention_dropout, self.drop_path = config.dropout, config.attention_dropout, drop_path
        self.attention_norm = LayerNorm(width, epsilon=epsilon)
        self.attention = WindowAttention(config, stage, shift)
        self.ffn_norm = LayerNorm(width, epsilon=epsilon)
        self.ffn = TwoLayers(width, int(config.ffn_factor * width), config.activation)

    def forward(self, x_bhwe: Any) -> Any:
        mixed = F.dropout(self.attention(self.attention_norm(x_bhwe)), self.attention_dropout, training=self.training)
        x_bhwe = x_bhwe + F.dropout(mixed, self.drop_path, axis=0, training=self.training)
        return x_bhwe + F.dropout(self.ffn(self.ffn_norm(x_bhwe)), self.dropout, training=self.training)


class PatchMerging(Layer):
    """Images [batch, rows, columns, embed] -> [batch, rows / 2, columns / 2, 2 embed]: a linear map of each four."""

    norm: LayerNorm
    down: Linear

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * width)
        self.down = linear(4 * width, 2 * width, (None, "embed"), bias=False)

    def forward(self, x_bhwe: Any) -> Any:
        x_bhwe = _padded(x_bhwe, 2)
        four = [x_bhwe[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.down(self.norm(concat(four, -1)))


class SwinStage(Layer):
    """Blocks, every other of which shifts its windows by half; before them, but in the first stage, the merging."""

    merging: PatchMerging | None
    blocks: LayerList

    def __init__(self, config: SwinConfig, number: int) -> None:
        super().__init__()
        self.merging = PatchMerging(config.hidden_sizes[number - 1]) if number else None
        first, depth = sum(config.depths[:number]), config.depths[number]
        drop_paths = np.linspace(0, config.drop_path, sum(config.depths))[first : first + depth]
        self.blocks = LayerList(
            [
                SwinBlock(config, number, config.window_size // 2 * (place % 2), float(drop_path))
                for place, drop_path in enumerate(drop_paths)
            ]
        )

    def forward(self, x_bhwe: Any) -> Any:
        if self.merging is not None:
            x_bhwe = self.merging(x_bhwe)
        for block in self.blocks:
            x_bhwe = constrain(block(x_bhwe), "batch", None, None, "embed")
        return x_bhwe


class Swin(Pretrained, Layer):
    """Images [batch, channels, height, width] -> (hidden [batch, patches, embed], pooled [batch, embed]).

    embed: the width of the last stage, whose patches go row by row. pooled: their mean. Sides that patches and windows
    do not fit are filled up with zeros.

    >>> from polyreme.ops.creation import zeros
    >>> config = SwinConfig(embed_dim=4, depths=(1, 2), num_heads=(1, 2), window_size=2)
    >>> Swin(config)(zeros([1, 3, 16, 24]))[0].shape
    paddle.Size([1, 6, 8])
    """

    patches: Conv2D
    patch_norm: LayerNorm
    stages: LayerList
    norm: LayerNorm

    family: Any = architecture("swin", "base")

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        side, last = config.patch_size, config.hidden_sizes[-1]
        self.patches = Conv2D(config.num_channels, config.embed_dim, side, stride=side, data_format="NHWC")
        self.patch_norm = LayerNorm(config.embed_dim)
        self.stages = LayerList([SwinStage(config, number) for number in range(len(config.depths))])
        self.norm = LayerNorm(last, epsilon=config.layer_norm_epsilon)

    def forward(self, pixel_values: Any) -> Any:
        shape, least = list(pixel_values.shape), self.config.least_side
        if len(shape) != 4 or shape[1] != self.config.num_channels or min(shape[2:]) < least:
            raise ShapeError(
                f"{type(self).__name__}: images have shape {shape}; give [batch, {self.config.num_channels}, height, "
                f"width], both of {least} or more, of which the last stage has a window of {self.config.window_size}"
            )
        x_bhwe = self.patch_norm(self.patches(_padded(pixel_values.transpose([0, 2, 3, 1]), self.config.patch_size)))
        x_bhwe = F.dropout(x_bhwe, self.config.dropout, training=self.training)
        for stage in self.stages:
            x_bhwe = stage(x_bhwe)
        hidden = self.norm(x_bhwe.flatten(1, 2))
        return hidden, hidden.mean(1)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: an image."""
        side = self.config.image_size
        return (rng.standard_normal((1, self.config.num_channels, side, side), "float32"),)


class SwinForImageClassification(MeanClassifier):
    """As MeanClassifier, of a Swin."""

    encoder_class: type[Any] = Swin
    family: Any = architecture("swin", "image_classification")


# as published

_OFFSETS = Conversion(lambda sources, config: sources[0], lambda array, config: [array, _offsets(config.window_size)])
"""Files hold the places in the table too, which the size of a window says."""


def _rules(config: SwinConfig, ours: str) -> list[WeightRule]:
    rules = [
        *same_rules("swin.embeddings.patch_embeddings.projection", f"{ours}patches"),
        *same_rules("swin.embeddings.norm", f"{ours}patch_norm"),
        *same_rules("swin.layernorm", f"{ours}norm"),
    ]
    for number in range(len(config.depths)):
        merging, our_merging = f"swin.encoder.layers.{number - 1}.downsample", f"{ours}stages.{number}.merging"
        there, here = f"swin.encoder.layers.{number}.blocks.{{n}}", f"{ours}stages.{number}.blocks.{{n}}"
        table = f"{there}.attention.self.relative_position_{{bias_table,index}}"
        rules += [
            *same_rules(f"{merging}.norm", f"{our_merging}.norm"),
            WeightRule(f"{merging}.reduction.weight", f"{our_merging}.down.weight"),
            *same_rules(f"{there}.layernorm_before", f"{here}.attention_norm"),
            WeightRule(table, f"{here}.attention.offsets", _OFFSETS),
            *(
                rule
                for name in ("query", "key", "value")
                for rule in linear_rules(f"{there}.attention.self.{name}", f"{here}.attention.attention.{name[0]}")
            ),
            *linear_rules(f"{there}.attention.output.dense", f"{here}.attention.attention.out"),
            *same_rules(f"{there}.layernorm_after", f"{here}.ffn_norm"),
            *linear_rules(f"{there}.intermediate.dense", f"{here}.ffn.up"),
            *linear_rules(f"{there}.output.dense", f"{here}.ffn.down"),
        ]
    return rules


def _write(config: SwinConfig) -> dict[str, Any]:
    lists = {"depths": [*config.depths], "num_heads": [*config.num_heads], "num_layers": len(config.depths)}
    return write_labels(config) | lists | {"hidden_size": config.hidden_sizes[-1]}


PUBLISHED_BASE = PublishedFamily(
    architecture="SwinModel",
    model_type="swin",
    keys={
        "embed_dim": "embed_dim",
        "depths": "depths",
        "num_heads": "num_heads",
        "window_size": "window_size",
        "mlp_ratio": "ffn_factor",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "num_channels",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "drop_path_rate": "drop_path",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    weights=lambda config: _rules(config, ""),
    fixed={"qkv_bias": (True,), "use_absolute_embeddings": (False,)},
    prefix="swin.",
    bare=True,
    heads=("classifier.",),
    read=read_labels,
    # hidden_size and num_layers are said by embed_dim and depths, path_norm by nothing that reads it; encoder_stride is
    # of a decoder of masked patches, the others of who takes outputs of several stages
    read_keys=(
        *LABEL_KEYS,
        *("hidden_size", "num_layers", "path_norm", "encoder_stride", "stage_names", "out_features", "out_indices"),
    ),
    write=_write,
)
PUBLISHED_IMAGE_CLASSIFICATION = replace(
    PUBLISHED_BASE,
    architecture="SwinForImageClassification",
    bare=False,
    weights=lambda config: [*_rules(config, "encoder."), *linear_rules("classifier", "classifier")],
)
