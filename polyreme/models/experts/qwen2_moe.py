"""Qwen2-MoE: a Qwen2 whose feed-forwards are mixtures of experts, with one besides that every token goes through.

Source: arXiv:2407.10671. Same function as transformers' Qwen2MoeForCausalLM where every layer has experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.models.decoders.llama import ffn_rules
from polyreme.models.decoders.qwen2 import WINDOW_KEYS, read_windows, write_windows
from polyreme.models.experts.mixtral import Mixtral
from polyreme.models.experts.qwen3_moe import PUBLISHED as QWEN3_MOE_PUBLISHED
from polyreme.models.experts.qwen3_moe import Qwen3MoeConfig
from polyreme.models.families import QWEN2_MOE, Family
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """Dimensions of a Qwen2-MoE: a Mixtral's. n_shared_experts: how many times as wide as an expert is the one that
    every token goes through, by a gate of its own."""

    family: ClassVar[Family] = QWEN2_MOE

    qkv_bias: bool = True
    qk_norm: bool = False
    experts_per_token: int = 4
    num_experts: int = 60
    n_shared_experts: int = 1  # type: ignore[misc]  # a trait that here is said of each model


class Qwen2Moe(Mixtral, keeps_order_free=True):
    """As Mixtral."""

    family = QWEN2_MOE


def _rules(config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}.mlp", "blocks.{n}.ffn"
    return [
        *QWEN3_MOE_PUBLISHED.weights(config),
        *ffn_rules(f"{there}.shared_expert", f"{here}.shared"),
        WeightRule(f"{there}.shared_expert_gate.weight", f"{here}.shared.token_gate.weight"),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    width, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    if shared % width:
        raise ConfigError(
            f"config.json of a qwen2_moe: shared_expert_intermediate_size {shared} is no multiple of "
            f"moe_intermediate_size {width}; only so many times that can be had here"
        )
    return {"n_shared_experts": shared // width} | read_windows(config) | read_rope(config)


def _write(config: Any) -> dict[str, Any]:
    shared = config.n_shared_experts * config.expert_ffn_size
    return {"shared_expert_intermediate_size": shared} | write_windows(config) | write_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    keys={**QWEN3_MOE_PUBLISHED.keys, "qkv_bias": "qkv_bias"},
    spellings=QWEN3_MOE_PUBLISHED.spellings,
    weights=_rules,
    defaults={
        **QWEN3_MOE_PUBLISHED.defaults,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "qkv_bias": True,
    },
    fixed=QWEN3_MOE_PUBLISHED.fixed,
    prefix="model.",
    read=_read,
    read_keys=("shared_expert_intermediate_size", *WINDOW_KEYS, *ROPE_KEYS),
    write=_write,
)
