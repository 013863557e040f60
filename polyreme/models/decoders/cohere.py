"""Command R: gated feed-forward and attention side by side on one norm, rotary positions that turn neighbouring dims.

Source: Cohere, 2024 (Command R). Same function as transformers' CohereForCausalLM, whose pairs of neighbours lie half a
head apart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.models.decoders.ernie4_5 import turned_attention_rules
from polyreme.models.decoders.gpt_neox import ParallelBlock
from polyreme.models.decoders.llama import (
    FIXED,
    KEYS,
    Attention,
    FeedForward,
    Llama,
    LlamaConfig,
    ffn_rules,
    outer_rules,
)
from polyreme.models.families import COHERE
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import Layer, LayerNorm


class UnshiftedNorm(LayerNorm):
    """A LayerNorm that adds no bias.

    >>> sorted(UnshiftedNorm(4).state_dict())
    ['weight']
    """

    def __init__(self, normalized_shape: Any, epsilon: float = 1e-5) -> None:
        super().__init__(normalized_shape, epsilon=epsilon, bias_attr=False)


@dataclass(frozen=True)
class CohereConfig(LlamaConfig):
    """Dimensions of a Command R: a LLaMA's. logit_scale: what logits are multiplied by."""

    norm_class: ClassVar[Any] = UnshiftedNorm
    shared_norm: ClassVar[bool] = True

    vocab_size: int = 256000
    rms_norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
    logit_scale: float = field(default=0.0625)  # type: ignore[misc]  # a trait that here is said of each model


class Cohere(Llama, keeps_order_free=True):
    """As Llama."""

    family = COHERE

    def make_block(self, config: CohereConfig, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return ParallelBlock(config, Attention(config, config.window(number)), FeedForward(config, config.mlp_bias))


def _rules(config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}", "blocks.{n}"
    return [
        *outer_rules(),
        WeightRule(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight", SAME),
        *turned_attention_rules(f"{there}.self_attn", f"{here}.attention"),
        *ffn_rules(),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias} | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="CohereForCausalLM",
    model_type="cohere",
    keys={
        **{key: ours for key, ours in KEYS.items() if key not in ("rms_norm_eps", "head_dim")},
        "layer_norm_eps": "rms_norm_epsilon",
        "logit_scale": "logit_scale",
    },
    weights=_rules,
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
    },
    fixed={**FIXED, "use_qk_norm": (False,)},
    prefix="model.",
    read=_read,
    read_keys=("attention_bias", *ROPE_KEYS),
    write=lambda config: {"attention_bias": config.out_bias, **write_rope(config)},
)
