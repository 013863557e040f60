"""GLM-4.5 and GLM-4.6: a GLM's attention with the shared and routed experts of a DeepSeek-V3.

Source: arXiv:2508.06471. Same function as transformers' Glm4MoeForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, Attention, LlamaConfig, attention_rules
from polyreme.models.experts.deepseek_v3 import (
    AHEAD,
    EXPERTS_KEYS,
    BiasedExpertsConfig,
    DeepseekV3,
    shared_experts_rules,
)
from polyreme.models.experts.deepseek_v3 import PUBLISHED as DEEPSEEK_PUBLISHED
from polyreme.models.families import GLM4_MOE
from polyreme.models.files.published import WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import Layer


@dataclass(frozen=True)
class Glm4MoeConfig(BiasedExpertsConfig, LlamaConfig):
    """Dimensions of a GLM-4.5: a LLaMA's, and a DeepSeek-V3's of its experts."""

    vocab_size: int = 151552
    rms_norm_epsilon: float = 1e-5
    rotary_fraction: float = 0.5
    num_experts: int = 128

    @classmethod
    def nano(cls, **changes: Any) -> Glm4MoeConfig:
        """A GLM-4.5 that trains in seconds on a CPU."""
        sizes = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32}
        return super().nano(**{**sizes, **changes})  # type: ignore[misc]  # a LLaMA's


class Glm4Moe(DeepseekV3):
    """As DeepseekV3, with the attention of a LLaMA."""

    family = GLM4_MOE

    def make_attention(self, config: Any, number: int) -> Layer:
        """A new attention of a block."""
        return Attention(config)

    @property
    def cache_dims(self) -> tuple[int, int, int]:
        """Keys and values of the heads that have some."""
        return self.config.num_kv_heads, self.config.head_dim, self.config.head_dim


def _rules(config: Any) -> list[WeightRule]:
    return shared_experts_rules(config, attention_rules)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": bool(config.get("attention_bias"))} | read_rope(config)


def _write(config: Glm4MoeConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **write_rope(config), "partial_rotary_factor": config.rotary_fraction}


PUBLISHED = replace(
    DEEPSEEK_PUBLISHED,
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    keys={**KEYS, **EXPERTS_KEYS, **AHEAD, "use_qk_norm": "qk_norm"},
    spellings={"num_mtp_layers": "num_nextn_predict_layers"},
    weights=_rules,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    },
    fixed=FIXED,
    read=_read,
    read_keys=("attention_bias", *ROPE_KEYS),
    write=_write,
)
