"""ERNIE 4.5, the dense ones: a LLaMA whose rotary positions turn neighbouring dims.

Source: Baidu, 2025 (ERNIE 4.5 technical report); rotary positions arXiv:2104.09864. Same function as transformers'
Ernie4_5ForCausalLM, whose pairs of neighbours lie half a head apart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.models.decoders.llama import (
    DEFAULTS,
    FIXED,
    KEYS,
    NORMS,
    Llama,
    LlamaConfig,
    ffn_rules,
    linear_rules,
    outer_rules,
)
from polyreme.models.families import ERNIE4_5
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, neighbour_rules, read_rope, write_rope


@dataclass(frozen=True)
class Ernie4_5Config(LlamaConfig):
    """Dimensions of an ERNIE 4.5: a LLaMA's."""

    vocab_size: int = 103424
    rope_theta: float = 500000.0
    rms_norm_epsilon: float = 1e-5
    tie_embeddings: bool = True


class Ernie4_5(Llama, keeps_order_free=True):
    """As Llama."""

    family = ERNIE4_5


def turned_attention_rules(there: str, here: str) -> list[WeightRule]:
    """The weights of an attention whose queries and keys turn neighbours."""
    return [
        *neighbour_rules(f"{there}.q_proj", f"{here}.q", "num_heads"),
        *neighbour_rules(f"{there}.k_proj", f"{here}.k", "num_kv_heads"),
        *linear_rules(f"{there}.v_proj", f"{here}.v"),
        *linear_rules(f"{there}.o_proj", f"{here}.out"),
    ]


def _rules(config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}", "blocks.{n}"
    return [
        *outer_rules(),
        *(WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in NORMS.items()),
        *turned_attention_rules(f"{there}.self_attn", f"{here}.attention"),
        *ffn_rules(),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("use_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias} | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    keys=KEYS,
    weights=_rules,
    defaults={
        **DEFAULTS,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "head_dim": 128,
    },
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("use_bias", *ROPE_KEYS),
    write=lambda config: {"use_bias": config.out_bias, **write_rope(config)},
)
