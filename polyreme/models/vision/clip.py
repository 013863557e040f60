"""CLIP: an encoder of text and one of images, whose outputs are compared.

Source: arXiv:2103.00020. Same function as transformers' CLIPModel, whose values are the fixtures of
tests/models/test_encoders.py. Logical dims of parameters: embed, heads (num_heads * head_dim), ffn, vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, check_fields, read_config, write_config
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    SelfAttention,
    TwoLayers,
    check_activation,
    key_mask,
    linear,
    linear_rules,
    normal,
    same_rules,
)
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Conv2D, Embedding, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat


@dataclass(frozen=True)
class CLIPTowerConfig:
    """What both encoders have. activation: one of models.parts.encoder.ACTIVATIONS. attention_dropout: a probability,
    while training."""

    hidden_size: int = 512
    num_layers: int = 12
    num_heads: int = 8
    ffn_size: int = 2048
    activation: str = "quick_gelu"
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_dimensions(self)
        check_activation(name, self.activation)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"{name}: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                f"make it {nearest_multiples(self.hidden_size, self.num_heads)}"
            )


@dataclass(frozen=True)
class CLIPTextConfig(CLIPTowerConfig):
    """Dimensions of the encoder of text. end: the id whose first place is what a text is; its highest id if 2."""

    vocab_size: int = 49408
    seq_len: int = 77
    end: int = field(default=49407, metadata={"least": 0})


@dataclass(frozen=True)
class CLIPVisionConfig(CLIPTowerConfig):
    """Dimensions of the encoder of images. image_size, patch_size: pixels; the second divides the first."""

    hidden_size: int = 768
    num_heads: int = 12
    ffn_size: int = 3072
    image_size: int = 224
    patch_size: int = 32
    num_channels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"CLIPVisionConfig: image_size {self.image_size} is not a multiple of patch_size {self.patch_size}; "
                f"make it {nearest_multiples(self.image_size, self.patch_size)}"
            )


@dataclass(frozen=True)
class CLIPConfig:
    """Dimensions of a CLIP. projection_dim: width in which texts and images are compared. logit_scale: the logarithm of
    what their cosines are multiplied by, at the beginning."""

    text: CLIPTextConfig = field(default_factory=CLIPTextConfig)
    vision: CLIPVisionConfig = field(default_factory=CLIPVisionConfig)
    projection_dim: int = 512
    logit_scale: float = 2.6592

    def __post_init__(self) -> None:
        check_dimensions(self)


class PreNormBlock(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    attention_norm: LayerNorm
    attention: SelfAttention
    ffn_norm: LayerNorm
    ffn: TwoLayers

    def __init__(self, config: CLIPTowerConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        self.attention = SelfAttention(config.hidden_size, config.num_heads, config.attention_dropout)
        self.ffn_norm = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        self.ffn = TwoLayers(config.hidden_size, config.ffn_size, config.activation)

    def forward(self, x_bse: Any, mask: Any = None, is_causal: bool = False) -> Any:
        x_bse = x_bse + self.attention(self.attention_norm(x_bse), mask, is_causal)
        return constrain(x_bse + self.ffn(self.ffn_norm(x_bse)), "batch", "seq", "embed")


class CLIPText(Layer):
    """Token ids [batch, seq] -> (hidden [batch, seq, embed], pooled [batch, embed]); a place sees those before it.

    attention_mask [batch, seq]: 0 where a place is padding, which no other sees.
    """

    tokens: Embedding
    positions: Embedding
    blocks: LayerList
    norm: LayerNorm

    def __init__(self, config: CLIPTextConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.tokens = Embedding(config.vocab_size, width, weight_attr=normal(), dims=("vocab", "embed"))
        self.positions = Embedding(config.seq_len, width, weight_attr=normal(), dims=(None, "embed"))
        self.blocks = LayerList([PreNormBlock(config) for _ in range(config.num_layers)])
        self.norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        shape = list(input_ids.shape)
        if len(shape) != 2 or shape[1] > self.config.seq_len:
            raise ShapeError(
                f"CLIP: input_ids have shape {shape}; give [batch, seq], seq at most {self.config.seq_len}"
            )
        x_bse = constrain(self.tokens(input_ids), "batch", "block_seq", "embed") + self.positions(arange(shape[1]))
        mask = key_mask("CLIP", attention_mask, shape)
        for block in self.blocks:
            x_bse = block(x_bse, mask, is_causal=True)
        hidden = self.norm(x_bse)
        # files from before ids could be added say 2, whatever ends a text: there it is the highest id
        ends = input_ids if self.config.end == 2 else (input_ids == self.config.end).astype("int32")
        return hidden, hidden[arange(shape[0]), ends.argmax(-1)]


class CLIPVision(Layer):
    """Images [batch, channels, side, side] -> (hidden [batch, 1 + patches, embed], pooled [batch, embed])."""

    patches: Conv2D
    first: Parameter
    positions: Embedding
    norm: LayerNorm
    blocks: LayerList
    pooled_norm: LayerNorm

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.hidden_size, config.patch_size
        self.patches = Conv2D(config.num_channels, width, patch, stride=patch, weight_attr=normal(), bias_attr=False)
        self.first = self.create_parameter([width], normal())
        count = (config.image_size // patch) ** 2 + 1
        self.positions = Embedding(count, width, weight_attr=normal(), dims=(None, "embed"))
        self.norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)
        self.blocks = LayerList([PreNormBlock(config) for _ in range(config.num_layers)])
        self.pooled_norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)

    def forward(self, pixel_values: Any) -> Any:
        x_bse = self.features(pixel_values, len(self.blocks))
        return x_bse, self.pooled_norm(x_bse[:, 0])

    def features(self, pixel_values: Any, depth: int) -> Any:
        """What so many blocks make of images, [batch, 1 + patches, embed], not normed."""
        check_pixels("CLIP", self.config, pixel_values)
        patches = self.patches(pixel_values).flatten(2).transpose([0, 2, 1])
        first = self.first.expand([pixel_values.shape[0], 1, self.config.hidden_size])
        x_bse = concat([first, patches], axis=1)
        x_bse = self.norm(x_bse + self.positions(arange(x_bse.shape[1])))
        for block in self.blocks[:depth]:
            x_bse = block(x_bse)
        return x_bse


class CLIP(Pretrained, Layer):
    """Texts [texts, seq] and images [images, channels, side, side] -> (logits [images, texts], the same [texts,
    images], texts [texts, projection_dim], images [images, projection_dim]).

    The last two are of length 1; logits are their cosines times exp(logit_scale). attention_mask: as of CLIPText. With
    return_loss the mean cross-entropy, both ways, of which text goes with which image (0-D): as many of both.
    """

    text_projection: Linear
    image_projection: Linear

    text: CLIPText
    vision: CLIPVision
    logit_scale: Parameter

    family: Any = architecture("clip", "base")

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        self.text, self.vision = CLIPText(config.text), CLIPVision(config.vision)
        self.text_projection = linear(config.text.hidden_size, config.projection_dim, ("embed", None), bias=False)
        self.image_projection = linear(config.vision.hidden_size, config.projection_dim, ("embed", None), bias=False)
        self.logit_scale = self.create_parameter([], default_initializer=Constant(config.logit_scale))

    def get_text_features(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """Texts, [texts, projection_dim], not yet of length 1."""
        return self.text_projection(self.text(input_ids, attention_mask)[1])

    def get_image_features(self, pixel_values: Any) -> Any:
        """Images, [images, projection_dim], not yet of length 1."""
        return self.image_projection(self.vision(pixel_values)[1])

    def forward(self, input_ids: Any, pixel_values: Any, attention_mask: Any = None, return_loss: bool = False) -> Any:
        texts = of_length_one(self.get_text_features(input_ids, attention_mask))
        images = of_length_one(self.get_image_features(pixel_values))
        per_text = texts.matmul(images, transpose_y=True) * self.logit_scale.exp()
        if not return_loss:
            return per_text.t(), per_text, texts, images
        if per_text.shape[0] != per_text.shape[1]:
            raise ShapeError(f"CLIP: {per_text.shape[0]} texts and {per_text.shape[1]} images; give one for each")
        pairs = arange(per_text.shape[0])
        return (F.cross_entropy(per_text, pairs) + F.cross_entropy(per_text.t(), pairs)) / 2

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: token ids [1, length] and an image."""
        text, vision = self.config.text, self.config.vision
        shape = (1, vision.num_channels, vision.image_size, vision.image_size)
        ids = rng.integers(0, text.vocab_size, (1, min(length, text.seq_len)))
        return ids, rng.standard_normal(shape, "float32")


def check_pixels(owner: str, config: CLIPVisionConfig, pixel_values: Any) -> None:
    """Raises ShapeError for other than images [batch, channels, image_size, image_size]."""
    shape, sides = list(pixel_values.shape), [config.num_channels, config.image_size, config.image_size]
    if len(shape) != 4 or shape[1:] != sides:
        raise ShapeError(f"{owner}: pixel_values have shape {shape}; give [batch, {', '.join(map(str, sides))}]")


def of_length_one(x: Any) -> Any:
    """x, the last dim of length 1."""
    return x / x.norm(p=2, axis=-1, keepdim=True)


# as published

TOWER_KEYS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_size",
    "hidden_act": "activation",
    "attention_dropout": "attention_dropout",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""What config.json says of both encoders."""


def tower_rules(there: str, here: str) -> list[WeightRule]:
    """The weights of an encoder's blocks and positions."""
    block, ours = f"{there}.encoder.layers.{{n}}", f"{here}.blocks.{{n}}"
    rules = [*same_rules(f"{block}.layer_norm1", f"{ours}.attention_norm")]
    rules += same_rules(f"{block}.layer_norm2", f"{ours}.ffn_norm")
    for part in ("q", "k", "v", "out"):
        rules += linear_rules(f"{block}.self_attn.{part}_proj", f"{ours}.attention.{part}")
    rules += linear_rules(f"{block}.mlp.fc1", f"{ours}.ffn.up")
    rules += linear_rules(f"{block}.mlp.fc2", f"{ours}.ffn.down")
    return [*rules, WeightRule(f"{there}.embeddings.position_embedding.weight", f"{here}.positions.weight", SAME)]


def vision_rules(there: str, here: str) -> list[WeightRule]:
    """The weights of the encoder of images."""
    return [
        *tower_rules(there, here),
        WeightRule(f"{there}.embeddings.patch_embedding.weight", f"{here}.patches.weight", SAME),
        WeightRule(f"{there}.embeddings.class_embedding", f"{here}.first", SAME),
        *same_rules(f"{there}.pre_layrnorm", f"{here}.norm"),
        *same_rules(f"{there}.post_layernorm", f"{here}.pooled_norm"),
    ]


def _rules(config: CLIPConfig) -> list[WeightRule]:
    return [
        *tower_rules("text_model", "text"),
        WeightRule("text_model.embeddings.token_embedding.weight", "text.tokens.weight", SAME),
        *same_rules("text_model.final_layer_norm", "text.norm"),
        *vision_rules("vision_model", "vision"),
        WeightRule("text_projection.weight", "text_projection.weight"),
        WeightRule("visual_projection.weight", "image_projection.weight"),
        WeightRule("logit_scale", "logit_scale", SAME),
    ]


# the width of a projection is said above, and what the parts say of it is not used
_TEXT = PublishedFamily(
    architecture="CLIPTextModel",
    model_type="clip_text_model",
    keys={
        **TOWER_KEYS,
        "vocab_size": "vocab_size",
        "max_position_embeddings": "seq_len",
        "eos_token_id": "end",
    },
    weights=_rules,
    fixed={"dropout": (0.0,)},
    read_keys=("projection_dim",),
)
PUBLISHED_VISION = PublishedFamily(
    architecture="CLIPVisionModel",
    model_type="clip_vision_model",
    keys={**TOWER_KEYS, "image_size": "image_size", "patch_size": "patch_size", "num_channels": "num_channels"},
    weights=_rules,
    fixed={"dropout": (0.0,)},
    read_keys=("projection_dim",),
)


def read_part(config_class: Any, published: PublishedFamily, config: Mapping[str, Any]) -> Any:
    """The config of an encoder."""
    fields = read_config(published, config)
    check_fields(config_class, fields)
    return config_class(**fields)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": read_part(CLIPTextConfig, _TEXT, config.get("text_config") or {}),
        "vision": read_part(CLIPVisionConfig, PUBLISHED_VISION, config.get("vision_config") or {}),
    }


def _write(config: CLIPConfig) -> dict[str, Any]:
    vision = write_config(PUBLISHED_VISION, config.vision)
    return {"text_config": write_config(_TEXT, config.text), "vision_config": vision}


PUBLISHED_BASE = PublishedFamily(
    architecture="CLIPModel",
    model_type="clip",
    keys={"projection_dim": "projection_dim", "logit_scale_init_value": "logit_scale"},
    weights=_rules,
    heads=(),
    read=_read,
    read_keys=("text_config", "vision_config"),
    write=_write,
)
