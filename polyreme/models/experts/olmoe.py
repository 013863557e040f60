"""OLMoE: a Mixtral of many small experts, whose queries and keys are normed over all heads together.

Source: arXiv:2409.02060. Same function as transformers' OlmoeForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from polyreme.models.decoders.gemma import read_attention_bias
from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.models.experts.qwen3_moe import PUBLISHED as QWEN3_MOE_PUBLISHED
from polyreme.models.families import OLMOE, Family
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class OlmoeConfig(MixtralConfig):
    """Dimensions of an OLMoE: a Mixtral's."""

    family: ClassVar[Family] = OLMOE
    whole_qk_norm: ClassVar[bool] = True

    rms_norm_epsilon: float = 1e-5
    num_experts: int = 64
    experts_per_token: int = 8
    normalize_gates: bool = False
    qk_norm: bool = True

    @classmethod
    def nano(cls, **changes: Any) -> OlmoeConfig:
        """An OLMoE that trains in seconds on a CPU."""
        return super().nano(**{"experts_per_token": 2, **changes})  # type: ignore[return-value]


class Olmoe(Mixtral, keeps_order_free=True):
    """As Mixtral."""

    family = OLMOE


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    # every feed-forward is of experts: one width is both
    return {"ffn_size": config["intermediate_size"]} | read_attention_bias(config) | read_rope(config)


PUBLISHED = replace(
    QWEN3_MOE_PUBLISHED,
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    keys={
        **{key: ours for key, ours in KEYS.items() if key != "head_dim"},
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_ffn_size",
        "norm_topk_prob": "normalize_gates",
    },
    defaults={**DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
    fixed={**FIXED, "clip_qkv": (None,)},  # bounds lie behind the norms there
    read=_read,
    read_keys=("attention_bias", *ROPE_KEYS),
    write=lambda config: {"attention_bias": config.out_bias} | write_rope(config),
)
