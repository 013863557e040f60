"""DeepSeek-V2: a DeepSeek-V3 whose experts are chosen by a softmax alone.

Source: arXiv:2405.04434. Same function as transformers' DeepseekV2ForCausalLM where tokens choose among all experts, as
in DeepSeek-V2-Lite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from polyreme.models.decoders.llama import DEFAULTS, FIXED
from polyreme.models.experts.deepseek_v3 import EXPERTS_KEYS, LATENT_KEYS, DeepseekV3, LatentConfig, SharedExpertsConfig
from polyreme.models.experts.deepseek_v3 import PUBLISHED as DEEPSEEK_PUBLISHED
from polyreme.models.families import DEEPSEEK_V2


@dataclass(frozen=True)
class DeepseekV2Config(SharedExpertsConfig, LatentConfig):
    """Dimensions of a DeepSeek-V2: those of latent attention, and those of its experts."""

    vocab_size: int = 102400
    num_experts: int = 64
    n_shared_experts: int = 2
    norm_topk_prob: bool = False

    @classmethod
    def nano(cls, **changes: Any) -> DeepseekV2Config:
        """A DeepSeek-V2 that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_len": 16, "num_experts": 4}
        return cls(**{**base, "experts_per_token": 2, "expert_ffn_size": 32, **changes})  # type: ignore[arg-type]


class DeepseekV2(DeepseekV3):
    """As DeepseekV3."""

    family = DEEPSEEK_V2


PUBLISHED = replace(
    DEEPSEEK_PUBLISHED,
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    keys={
        **LATENT_KEYS,
        **{key: ours for key, ours in EXPERTS_KEYS.items() if key not in ("n_group", "topk_group", "norm_topk_prob")},
    },
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 32,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 1536,
    },
    fixed={
        **FIXED,
        "attention_bias": (False,),
        "mlp_bias": (False, None),
        "moe_layer_freq": (1, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", None),
        # the reference divides by no sum, whatever it says
        "norm_topk_prob": (False, None),
    },
    # of groups, which are not asked for
    read_keys=("n_group", "topk_group", *DEEPSEEK_PUBLISHED.read_keys),
)
