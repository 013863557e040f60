"""SigLIP: texts and images compared pair by pair, each pair for itself.

Source: arXiv:2303.15343. Same function as transformers' SiglipModel. Logical dims of parameters: as of
models.vision.clip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, write_config
from polyreme.models.parts.encoder import TwoLayers, key_mask, linear, linear_rules, normal, same_rules
from polyreme.models.pretrained import Pretrained
from polyreme.models.vision.clip import (
    TOWER_KEYS,
    CLIPTowerConfig,
    CLIPVisionConfig,
    PreNormBlock,
    check_pixels,
    of_length_one,
    read_part,
    tower_rules,
)
from polyreme.nn import Conv2D, Embedding, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.creation import arange, eye
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class SiglipTextConfig(CLIPTowerConfig):
    """Dimensions of the encoder of text; projection_dim: width in which texts are compared, hidden_size if 0."""

    hidden_size: int = 768
    num_heads: int = 12
    ffn_size: int = 3072
    activation: str = "gelu_pytorch_tanh"
    layer_norm_epsilon: float = 1e-6
    vocab_size: int = 32000
    seq_len: int = 64
    projection_dim: int = field(default=0, metadata={"least": 0})

    def __post_init__(self) -> None:
        if not self.projection_dim:
            object.__setattr__(self, "projection_dim", self.hidden_size)
        super().__post_init__()


@dataclass(frozen=True)
class SiglipVisionConfig(CLIPVisionConfig):
    """Dimensions of the encoder of images, whose patches at the rim that are not whole are left out. has_pool: whether
    an image becomes one vector too."""

    patch_size: int = 16
    activation: str = "gelu_pytorch_tanh"
    layer_norm_epsilon: float = 1e-6
    has_pool: bool = True

    def __post_init__(self) -> None:
        CLIPTowerConfig.__post_init__(self)


@dataclass(frozen=True)
class SiglipConfig:
    """Dimensions of a SigLIP. logit_scale, logit_bias: the logarithm of what cosines are multiplied by, and what is
    added then, at the beginning. Raises ConfigError for parts that are compared in different widths."""

    text: SiglipTextConfig = field(default_factory=SiglipTextConfig)
    vision: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)
    logit_scale: float = 2.3026
    logit_bias: float = -10.0

    def __post_init__(self) -> None:
        if not self.vision.has_pool:
            raise ConfigError("SiglipConfig: images are compared by what the pool makes of them; leave has_pool True")
        if self.text.projection_dim != self.vision.hidden_size:
            raise ConfigError(
                f"SiglipConfig: texts are compared in {self.text.projection_dim} dims and images in "
                f"{self.vision.hidden_size}; give text's projection_dim the vision's hidden_size"
            )


class SiglipText(Layer):
    """Token ids [batch, seq] -> (hidden [batch, seq, embed], pooled [batch, projection_dim]): every place sees every
    other, and the last one is what a text is; so texts are padded to the model's length."""

    tokens: Embedding
    positions: Embedding
    blocks: LayerList
    norm: LayerNorm
    head: Linear

    def __init__(self, config: SiglipTextConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.tokens = Embedding(config.vocab_size, width, weight_attr=normal(), dims=("vocab", "embed"))
        self.positions = Embedding(config.seq_len, width, weight_attr=normal(), dims=(None, "embed"))
        self.blocks = LayerList([PreNormBlock(config) for _ in range(config.num_layers)])
        self.norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)
        self.head = linear(width, config.projection_dim, ("embed", None))

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        shape = list(input_ids.shape)
        if len(shape) != 2 or shape[1] > self.config.seq_len:
            raise ShapeError(
                f"Siglip: input_ids have shape {shape}; give [batch, seq], seq at most {self.config.seq_len}"
            )
        x_bse = constrain(self.tokens(input_ids), "batch", "block_seq", "embed") + self.positions(arange(shape[1]))
        mask = key_mask("Siglip", attention_mask, shape)
        for block in self.blocks:
            x_bse = block(x_bse, mask)
        hidden = self.norm(x_bse)
        return hidden, self.head(hidden[:, -1])


class AttentionPool(Layer):
    """What a learned query sees of [batch, seq, embed], and a feed-forward of that -> [batch, embed]."""

    query: Parameter
    qkv: Linear
    out: Linear
    norm: LayerNorm
    ffn: TwoLayers

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.query = self.create_parameter([1, 1, width], normal())
        self.qkv = linear(width, 3 * width, ("embed", None))
        self.out = linear(width, width, (None, "embed"))
        self.norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)
        self.ffn = TwoLayers(width, config.ffn_size, config.activation)

    def forward(self, x_bse: Any) -> Any:
        batch, _, width = x_bse.shape
        weight, bias = self.qkv.weight, self.qkv.bias
        q = F.linear(self.query, weight[:, :width], bias[:width]).expand([batch, 1, width])
        k, v = F.linear(x_bse, weight[:, width:], bias[width:]).chunk(2, -1)
        q, k, v = (part.reshape([batch, -1, self.num_heads, width // self.num_heads]) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, training=self.training).reshape([batch, 1, width])
        seen = self.out(mixed)
        return (seen + self.ffn(self.norm(seen)))[:, 0]


class SiglipVision(Layer):
    """Images [batch, channels, side, side] -> (hidden [batch, patches, embed], pooled [batch, embed], None where
    nothing pools)."""

    patches: Conv2D
    positions: Embedding
    blocks: LayerList
    norm: LayerNorm
    pool: AttentionPool | None

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.config, width, patch = config, config.hidden_size, config.patch_size
        self.patches = Conv2D(config.num_channels, width, patch, stride=patch, weight_attr=normal())
        count = (config.image_size // patch) ** 2
        self.positions = Embedding(count, width, weight_attr=normal(), dims=(None, "embed"))
        self.blocks = LayerList([PreNormBlock(config) for _ in range(config.num_layers)])
        self.norm = LayerNorm(width, epsilon=config.layer_norm_epsilon)
        self.pool = AttentionPool(config) if config.has_pool else None

    def forward(self, pixel_values: Any) -> Any:
        hidden = self.norm(self.features(pixel_values, len(self.blocks)))
        return hidden, None if self.pool is None else self.pool(hidden)

    def features(self, pixel_values: Any, depth: int) -> Any:
        """What so many blocks make of images, [batch, patches, embed], not normed."""
        check_pixels("Siglip", self.config, pixel_values)
        x_bse = self.patches(pixel_values).flatten(2).transpose([0, 2, 1])
        x_bse = constrain(x_bse + self.positions(arange(x_bse.shape[1])), "batch", "seq", "embed")
        for block in self.blocks[:depth]:
            x_bse = block(x_bse)
        return x_bse


class Siglip(Pretrained, Layer):
    """Texts [texts, seq] and images [images, channels, side, side] -> (logits [images, texts], the same [texts,
    images], texts [texts, embed], images [images, embed]).

    The last two are of length 1; logits are their cosines times exp(logit_scale), plus logit_bias, and their sigmoid
    how likely a pair is one. With return_loss the mean over texts of -log of how likely all pairs are as they stand,
    the first text with the first image and no other (0-D): as many of both.
    """

    text: SiglipText
    vision: SiglipVision
    logit_scale: Parameter
    logit_bias: Parameter

    family: Any = architecture("siglip", "base")

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.text, self.vision = SiglipText(config.text), SiglipVision(config.vision)
        self.logit_scale = self.create_parameter([1], default_initializer=Constant(config.logit_scale))
        self.logit_bias = self.create_parameter([1], default_initializer=Constant(config.logit_bias))

    def get_text_features(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """Texts, [texts, embed], not yet of length 1."""
        return self.text(input_ids, attention_mask)[1]

    def get_image_features(self, pixel_values: Any) -> Any:
        """Images, [images, embed], not yet of length 1."""
        return self.vision(pixel_values)[1]

    def forward(self, input_ids: Any, pixel_values: Any, attention_mask: Any = None, return_loss: bool = False) -> Any:
        texts = of_length_one(self.get_text_features(input_ids, attention_mask))
        images = of_length_one(self.get_image_features(pixel_values))
        per_text = texts.matmul(images, transpose_y=True) * self.logit_scale.exp() + self.logit_bias
        if not return_loss:
            return per_text.t(), per_text, texts, images
        count = per_text.shape[0]
        if count != per_text.shape[1]:
            raise ShapeError(f"Siglip: {count} texts and {per_text.shape[1]} images; give one for each")
        signs = 2 * eye(count, dtype=per_text.dtype) - 1
        return -F.log_sigmoid(signs * per_text).sum(-1).mean()

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: token ids [1, length] and an image."""
        text, vision = self.config.text, self.config.vision
        shape = (1, vision.num_channels, vision.image_size, vision.image_size)
        ids = rng.integers(0, text.vocab_size, (1, min(length, text.seq_len)))
        return ids, rng.standard_normal(shape, "float32")


# as published


def vision_rules(there: str, here: str) -> list[WeightRule]:
    """The weights of the encoder of images."""
    head, pool = f"{there}.head", f"{here}.pool"
    return [
        *tower_rules(there, here),
        *same_rules(f"{there}.embeddings.patch_embedding", f"{here}.patches"),
        *same_rules(f"{there}.post_layernorm", f"{here}.norm"),
        WeightRule(f"{head}.probe", f"{pool}.query", SAME),
        WeightRule(f"{head}.attention.in_proj_weight", f"{pool}.qkv.weight"),
        WeightRule(f"{head}.attention.in_proj_bias", f"{pool}.qkv.bias", SAME),
        *linear_rules(f"{head}.attention.out_proj", f"{pool}.out"),
        *same_rules(f"{head}.layernorm", f"{pool}.norm"),
        *linear_rules(f"{head}.mlp.fc1", f"{pool}.ffn.up"),
        *linear_rules(f"{head}.mlp.fc2", f"{pool}.ffn.down"),
    ]


def _rules(config: SiglipConfig) -> list[WeightRule]:
    return [
        *tower_rules("text_model", "text"),
        WeightRule("text_model.embeddings.token_embedding.weight", "text.tokens.weight", SAME),
        *same_rules("text_model.final_layer_norm", "text.norm"),
        *linear_rules("text_model.head", "text.head"),
        *vision_rules("vision_model", "vision"),
        WeightRule("logit_scale", "logit_scale", SAME),
        WeightRule("logit_bias", "logit_bias", SAME),
    ]


_TEXT = PublishedFamily(
    architecture="SiglipTextModel",
    model_type="siglip_text_model",
    keys={
        **TOWER_KEYS,
        "vocab_size": "vocab_size",
        "max_position_embeddings": "seq_len",
        "projection_size": "projection_dim",
    },
    weights=_rules,
)
PUBLISHED_VISION = PublishedFamily(
    architecture="SiglipVisionModel",
    model_type="siglip_vision_model",
    keys={**TOWER_KEYS, "image_size": "image_size", "patch_size": "patch_size", "num_channels": "num_channels"},
    weights=_rules,
    read=lambda config: {"has_pool": config.get("vision_use_head", True)},
    read_keys=("vision_use_head",),
    write=lambda config: {"vision_use_head": config.has_pool},
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": read_part(SiglipTextConfig, _TEXT, config.get("text_config") or {}),
        "vision": read_part(SiglipVisionConfig, PUBLISHED_VISION, config.get("vision_config") or {}),
    }


def _write(config: SiglipConfig) -> dict[str, Any]:
    vision = write_config(PUBLISHED_VISION, config.vision)
    return {"text_config": write_config(_TEXT, config.text), "vision_config": vision}


PUBLISHED_BASE = PublishedFamily(
    architecture="SiglipModel",
    model_type="siglip",
    keys={},
    weights=_rules,
    heads=(),
    read=_read,
    read_keys=("text_config", "vision_config"),
    write=_write,
)
