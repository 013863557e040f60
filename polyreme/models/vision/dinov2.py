"""DINOv2: a vision transformer trained without labels, whose parts are scaled before they are added.

Source: arXiv:2304.07193; scaled parts arXiv:2103.17239. Same functions as transformers' Dinov2Model and
Dinov2ForImageClassification, whose values are the fixtures of tests/models/test_encoders.py. Logical dims of
parameters: embed, heads, ffn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    LABEL_KEYS,
    SelfAttention,
    TwoLayers,
    check_activation,
    check_label_names,
    linear,
    linear_rules,
    normal,
    read_labels,
    same_rules,
    write_labels,
)
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Conv2D, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.indices.gather import where
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat


@dataclass(frozen=True)
class Dinov2Config:
    """Dimensions of a DINOv2.

    image_size, patch_size: pixels; positions are learned for images of the first, and are interpolated for others.
    ffn_factor: the width of the feed-forward over hidden_size. gated: the feed-forward is of silu(gate(x)) * up(x), of
    two thirds of that width. activation: one of models.parts.encoder.ACTIVATIONS. scale: what parts of blocks are
    multiplied by at the beginning. has_mask_token: whether there is one in place of masked patches. dropout,
    attention_dropout: probabilities, while training. num_labels: what the classifier scores; label_names: what they
    are called.
    """

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_factor: int = 4
    image_size: int = 224
    patch_size: int = 14
    num_channels: int = 3
    gated: bool = False
    activation: str = "gelu"
    scale: float = 1.0
    has_mask_token: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-6
    num_labels: int = 2
    label_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_dimensions(self)
        check_activation("Dinov2Config", self.activation)
        check_label_names(self)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"Dinov2Config: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; make "
                f"it {nearest_multiples(self.hidden_size, self.num_heads)}"
            )

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward: a multiple of 8 where it is gated."""
        width = self.hidden_size * self.ffn_factor
        return (width * 2 // 3 + 7) // 8 * 8 if self.gated else width

    @property
    def grid(self) -> int:
        """Patches along a side of an image of image_size."""
        return self.image_size // self.patch_size

    @property
    def seq_len(self) -> int:
        """Tokens of an image of image_size: patches, and the one before them."""
        return self.grid**2 + 1


class GatedTwoLayers(Layer):
    """down(silu(gate) * up) of the two halves of one linear map, the gate first. Source: arXiv:2002.05202."""

    joint: Linear
    down: Linear

    def __init__(self, width: int, ffn_size: int) -> None:
        super().__init__()
        self.joint = linear(width, 2 * ffn_size, ("embed", "ffn"))
        self.down = linear(ffn_size, width, ("ffn", "embed"))

    def forward(self, x_bse: Any) -> Any:
        gate, up = constrain(self.joint(x_bse), "batch", "block_seq", "ffn").chunk(2, -1)
        return self.down(F.silu(gate) * up)


class ScaledBlock(Layer):
    """x + scale * attention(norm(x)), then x + scale * feed_forward(norm(x)), each scale learned for each feature."""

    attention_norm: LayerNorm
    attention: SelfAttention
    attention_scale: Parameter
    ffn_norm: LayerNorm
    ffn: Layer
    ffn_scale: Parameter

    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.dropout = config.dropout
        self.attention_norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)
        self.attention = SelfAttention(width, config.num_heads, config.attention_dropout)
        self.ffn_norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)
        self.ffn = (
            GatedTwoLayers(width, config.ffn_size)
            if config.gated
            else TwoLayers(width, config.ffn_size, config.activation)
        )
        self.attention_scale, self.ffn_scale = (
            self.create_parameter([width], default_initializer=Constant(config.scale), dims=("embed",))
            for _ in range(2)
        )

    def forward(self, x_bse: Any) -> Any:
        mixed = F.dropout(self.attention(self.attention_norm(x_bse)), self.dropout, training=self.training)
        x_bse = x_bse + mixed * self.attention_scale
        return constrain(x_bse + self.ffn(self.ffn_norm(x_bse)) * self.ffn_scale, "batch", "seq", "embed")


class Dinov2(Pretrained, Layer):
    """Images [batch, channels, height, width] -> (hidden [batch, 1 + patches, embed], pooled [batch, embed]).

    height and width: multiples of patch_size; patches go row by row. pooled: the first token. bool_masked_pos
    [batch, patches]: True where the mask token stands in place of a patch.

    >>> from polyreme.ops.creation import zeros
    >>> config = Dinov2Config(hidden_size=8, num_layers=1, num_heads=2, image_size=8, patch_size=4)
    >>> Dinov2(config)(zeros([1, 3, 8, 12]))[0].shape
    paddle.Size([1, 7, 8])
    """

    first: Parameter
    mask: Parameter | None
    positions: Parameter
    patches: Conv2D
    blocks: LayerList
    norm: LayerNorm

    family: Any = architecture("dinov2", "base")

    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        self.config = config
        width, side = config.hidden_size, config.patch_size
        self.first = self.create_parameter([1, 1, width], normal(), dims=(None, None, "embed"))
        self.mask = (
            self.create_parameter([1, width], default_initializer=Constant(0.0), dims=(None, "embed"))
            if config.has_mask_token
            else None
        )
        self.positions = self.create_parameter([1, config.seq_len, width], normal(), dims=(None, None, "embed"))
        self.patches = Conv2D(config.num_channels, width, side, stride=side)
        self.blocks = LayerList([ScaledBlock(config) for _ in range(config.num_layers)])
        self.norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)

    def forward(self, pixel_values: Any, bool_masked_pos: Any = None) -> Any:
        hidden = self.encode(pixel_values, bool_masked_pos)
        return hidden, hidden[:, 0]

    def encode(self, pixel_values: Any, bool_masked_pos: Any = None) -> Any:
        """hidden, as of a call. Raises ShapeError for images of other channels or sides, ConfigError for masked
        patches of a model without a mask token."""
        shape, side = list(pixel_values.shape), self.config.patch_size
        if len(shape) != 4 or shape[1] != self.config.num_channels or shape[2] % side or shape[3] % side:
            raise ShapeError(
                f"{type(self).__name__}: images have shape {shape}; give [batch, {self.config.num_channels}, height, "
                f"width], both multiples of {side}"
            )
        x_bse = self.patches(pixel_values).flatten(2).transpose([0, 2, 1])
        if bool_masked_pos is not None:
            if self.mask is None:
                raise ConfigError(
                    f"{type(self).__name__}: bool_masked_pos of a model without a mask token; leave it out"
                )
            x_bse = where(bool_masked_pos.unsqueeze(-1), self.mask, x_bse)
        first = self.first.expand([shape[0], 1, self.config.hidden_size])
        x_bse = concat([first, x_bse], 1) + self.positions_of(shape[2] // side, shape[3] // side)
        x_bse = constrain(F.dropout(x_bse, self.config.dropout, training=self.training), "batch", "seq", "embed")
        for block in self.blocks:
            x_bse = block(x_bse)
        return self.norm(x_bse)

    def positions_of(self, rows: int, columns: int) -> Any:
        """What is added to the tokens of an image of so many patches, [1, 1 + rows * columns, embed]."""
        grid = self.config.grid
        if (rows, columns) == (grid, grid):
            return self.positions
        table = self.positions[:, 1:].reshape([1, grid, grid, -1]).transpose([0, 3, 1, 2])
        table = F.interpolate(table, size=[rows, columns], mode="bicubic", align_corners=False)
        return concat([self.positions[:, :1], table.flatten(2).transpose([0, 2, 1])], 1)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: an image."""
        side = self.config.grid * self.config.patch_size
        return (rng.standard_normal((1, self.config.num_channels, side, side), "float32"),)


class Dinov2ForImageClassification(Pretrained, Layer):
    """Images [batch, channels, height, width] -> scores [batch, num_labels], of the first token and the mean of the
    patches; with labels [batch], the mean cross-entropy (0-D)."""

    encoder: Dinov2
    classifier: Linear

    family: Any = architecture("dinov2", "image_classification")

    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        self.config = config
        self.encoder = Dinov2(config)
        self.classifier = linear(2 * config.hidden_size, config.num_labels, ("embed", None))

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        hidden = self.encoder.encode(pixel_values)
        scores = self.classifier(concat([hidden[:, 0], hidden[:, 1:].mean(1)], -1))
        return scores if labels is None else F.cross_entropy(scores, labels)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: an image."""
        return self.encoder.example_inputs(rng, length)


# as published


def _rules(ours: str) -> list[WeightRule]:
    outer, there, here = "dinov2.embeddings", "dinov2.encoder.layer.{n}", f"{ours}blocks.{{n}}"
    query = {"query": "q", "key": "k", "value": "v"}
    return [
        WeightRule(f"{outer}.cls_token", f"{ours}first", SAME),
        WeightRule(f"{outer}.mask_token", f"{ours}mask", SAME),
        WeightRule(f"{outer}.position_embeddings", f"{ours}positions", SAME),
        *same_rules(f"{outer}.patch_embeddings.projection", f"{ours}patches"),
        *same_rules(f"{there}.norm1", f"{here}.attention_norm"),
        *(
            rule
            for name, part in query.items()
            for rule in linear_rules(f"{there}.attention.attention.{name}", f"{here}.attention.{part}")
        ),
        *linear_rules(f"{there}.attention.output.dense", f"{here}.attention.out"),
        WeightRule(f"{there}.layer_scale1.lambda1", f"{here}.attention_scale", SAME),
        *same_rules(f"{there}.norm2", f"{here}.ffn_norm"),
        *linear_rules(f"{there}.mlp.fc1", f"{here}.ffn.up"),
        *linear_rules(f"{there}.mlp.fc2", f"{here}.ffn.down"),
        *linear_rules(f"{there}.mlp.weights_in", f"{here}.ffn.joint"),
        *linear_rules(f"{there}.mlp.weights_out", f"{here}.ffn.down"),
        WeightRule(f"{there}.layer_scale2.lambda1", f"{here}.ffn_scale", SAME),
        *same_rules("dinov2.layernorm", f"{ours}norm"),
    ]


def _fitting(ours: str, config: Dinov2Config) -> list[WeightRule]:
    """The rules of the feed-forward that the model has."""
    other = ".mlp.fc" if config.gated else ".mlp.weights_"
    return [rule for rule in _rules(ours) if other not in rule.theirs]


PUBLISHED_BASE = PublishedFamily(
    architecture="Dinov2Model",
    model_type="dinov2",
    keys={
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "mlp_ratio": "ffn_factor",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "num_channels",
        "use_swiglu_ffn": "gated",
        "hidden_act": "activation",
        "layerscale_value": "scale",
        "use_mask_token": "has_mask_token",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    weights=lambda config: _fitting("", config),
    fixed={"qkv_bias": (True,), "drop_path_rate": (0.0,)},
    prefix="dinov2.",
    bare=True,
    heads=("classifier.",),
    read=read_labels,
    # of who takes outputs of several blocks
    read_keys=(
        *LABEL_KEYS,
        *("stage_names", "out_features", "out_indices", "apply_layernorm", "reshape_hidden_states"),
    ),
    write=write_labels,
)
PUBLISHED_IMAGE_CLASSIFICATION = replace(
    PUBLISHED_BASE,
    architecture="Dinov2ForImageClassification",
    bare=False,
    weights=lambda config: [*_fitting("encoder.", config), *linear_rules("classifier", "classifier")],
)
