"""GLM-4 of 2025: a GLM with norms around the parts of its blocks.

Source: Zhipu AI, 2025 (GLM-4-0414). Same function as transformers' Glm4ForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyreme.models.decoders.glm import GlmConfig, published_glm
from polyreme.models.decoders.llama import Llama
from polyreme.models.families import GLM4


@dataclass(frozen=True)
class Glm4Config(GlmConfig):
    """Dimensions of a GLM-4: a GLM's."""

    norm_places: ClassVar[str] = "around"


class Glm4(Llama, keeps_order_free=True):
    """As Llama."""

    family = GLM4


PUBLISHED = published_glm(
    "Glm4ForCausalLM",
    "glm4",
    {
        "input_layernorm": "attention_norm",
        "post_self_attn_layernorm": "attention_out_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "ffn_out_norm",
    },
)
