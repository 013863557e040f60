"""Qwen3-MoE: a Mixtral whose queries and keys are normed head by head, with heads of a width of their own.

Source: arXiv:2505.09388. Same function as transformers' Qwen3MoeForCausalLM where every layer has experts, whose values
are the fixtures of tests/models/experts/test_qwen3_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.llama import FIXED, KEYS, attention_rules, outer_rules
from polyreme.models.decoders.qwen2 import QWEN_DEFAULTS, WINDOW_KEYS, read_windows, write_windows
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig, check_published_routing, expert_rules
from polyreme.models.families import QWEN3_MOE, Family
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Qwen3MoeConfig(MixtralConfig):
    """Dimensions of a Qwen3-MoE: a Mixtral's."""

    family: ClassVar[Family] = QWEN3_MOE
    rope_theta: float = 1000000.0
    experts_per_token: int = 8
    num_experts: int = 128
    qk_norm: bool = True

    @classmethod
    def nano(cls, **changes: Any) -> Qwen3MoeConfig:
        """A Qwen3-MoE that trains in seconds on a CPU."""
        return super().nano(**{"head_dim": 16, "experts_per_token": 2, **changes})  # type: ignore[return-value]


class Qwen3Moe(Mixtral, keeps_order_free=True):
    """As Mixtral."""

    family = QWEN3_MOE


def _rules(config: Any) -> list[WeightRule]:
    check_published_routing(config)
    names = {f"{name}_proj": name for name in ("gate", "up", "down")}
    return [*outer_rules(), *attention_rules(), *expert_rules("model.layers.{n}.mlp", "blocks.{n}.ffn", names)]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias} | read_windows(config) | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys={
        **KEYS,
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_ffn_size",
        "norm_topk_prob": "normalize_gates",
    },
    spellings={"num_local_experts": "num_experts"},
    weights=_rules,
    defaults={**QWEN_DEFAULTS, "norm_topk_prob": False},
    # blocks without experts between others
    fixed={**FIXED, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    prefix="model.",
    read=_read,
    read_keys=("attention_bias", *WINDOW_KEYS, *ROPE_KEYS),
    write=lambda config: {"attention_bias": config.out_bias} | write_windows(config) | write_rope(config),
)
