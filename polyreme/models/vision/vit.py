"""ViT: the vision transformer of vision.models as it is published with weights.

Source: arXiv:2010.11929. Same functions as transformers' ViTModel and ViTForImageClassification, whose values are the
fixtures of tests/models/test_encoders.py. Logical dims of parameters: embed and ffn, of the feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, merged
from polyreme.models.parts.decoder import check_dimensions
from polyreme.models.parts.encoder import (
    LABEL_KEYS,
    check_label_names,
    linear,
    linear_rules,
    read_labels,
    same_rules,
    write_labels,
)
from polyreme.models.pretrained import Pretrained
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear
from polyreme.vision.models.vit import VisionTransformer


@dataclass(frozen=True)
class ViTConfig:
    """Dimensions of a ViT.

    image_size, patch_size: pixels; the second divides the first. ffn_size: 4 * hidden_size if 0. dropout,
    attention_dropout: probabilities, while training. num_labels: what the classifier scores; label_names: what they are
    called.
    """

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_size: int = 0
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-12
    num_labels: int = 2
    label_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        check_dimensions(self)
        check_label_names(self)

    @property
    def seq_len(self) -> int:
        """Tokens: patches, and the one before them."""
        return (self.image_size // self.patch_size) ** 2 + 1


class _ViT(Pretrained, VisionTransformer):
    """A VisionTransformer of a ViTConfig."""

    def __init__(self, config: ViTConfig, num_classes: int) -> None:
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.hidden_size,
            depth=config.num_layers,
            num_heads=config.num_heads,
            num_classes=num_classes,
            dropout=config.dropout,
            attn_dropout=config.attention_dropout,
            in_channels=config.num_channels,
            epsilon=config.layer_norm_epsilon,
            ffn_size=config.ffn_size,
        )
        self.config = config

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: an image."""
        side = self.config.image_size
        return (rng.standard_normal((1, self.config.num_channels, side, side), "float32"),)


class ViT(_ViT):
    """Images [batch, channels, image_size, image_size] -> (hidden [batch, 1 + patches, embed], pooled [batch, embed]).

    pooled: tanh of a linear map of the first token.
    """

    pooler: Linear

    family: Any = architecture("vit", "base")

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, num_classes=0)
        self.pooler = linear(config.hidden_size, config.hidden_size, ("embed", None))

    def forward(self, pixel_values: Any) -> Any:  # type: ignore[override]
        hidden = self.hidden(pixel_values)
        return hidden, F.tanh(self.pooler(hidden[:, 0]))


class ViTForImageClassification(_ViT):
    """Images [batch, channels, image_size, image_size] -> scores [batch, num_labels]; with labels [batch], the mean
    cross-entropy (0-D)."""

    family: Any = architecture("vit", "image_classification")

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, num_classes=config.num_labels)

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:  # type: ignore[override]
        scores = super().forward(pixel_values)
        return scores if labels is None else F.cross_entropy(scores, labels)


# as published


def _rules(config: ViTConfig) -> list[WeightRule]:
    there, here, query = "vit.encoder.layer.{n}", "blocks.{n}", "attention.attention.{query,key,value}"
    return [
        WeightRule("vit.embeddings.cls_token", "cls_token", SAME),
        WeightRule("vit.embeddings.position_embeddings", "pos_embed", SAME),
        *same_rules("vit.embeddings.patch_embeddings.projection", "patch_embed.proj"),
        WeightRule(f"{there}.{query}.weight", f"{here}.attn.qkv.weight", merged(3, is_transposed=True)),
        WeightRule(f"{there}.{query}.bias", f"{here}.attn.qkv.bias", merged(3, is_transposed=False)),
        *linear_rules(f"{there}.attention.output.dense", f"{here}.attn.proj"),
        *linear_rules(f"{there}.intermediate.dense", f"{here}.mlp.fc1"),
        *linear_rules(f"{there}.output.dense", f"{here}.mlp.fc2"),
        *same_rules(f"{there}.layernorm_before", f"{here}.norm1"),
        *same_rules(f"{there}.layernorm_after", f"{here}.norm2"),
        *same_rules("vit.layernorm", "norm"),
        *linear_rules("vit.pooler.dense", "pooler"),
        *linear_rules("classifier", "head"),
    ]


PUBLISHED_BASE = PublishedFamily(
    architecture="ViTModel",
    model_type="vit",
    keys={
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_size",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "num_channels",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    weights=_rules,
    fixed={"hidden_act": ("gelu",), "qkv_bias": (True,), "pooler_act": ("tanh",)},
    prefix="vit.",
    bare=True,
    heads=("vit.pooler.", "classifier."),
    read=read_labels,
    # of other heads: one for masked patches; the width of the pooler, which is checked by its weight's shape
    read_keys=(*LABEL_KEYS, "encoder_stride", "pooler_output_size"),
    write=lambda config: write_labels(config) | {"pooler_output_size": config.hidden_size},
)
PUBLISHED_IMAGE_CLASSIFICATION = replace(PUBLISHED_BASE, architecture="ViTForImageClassification", bare=False)
