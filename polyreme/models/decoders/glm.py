"""GLM-4 of 2024: a LLaMA whose rotary positions turn neighbouring dims of half of each head.

Source: arXiv:2406.12793. Same function as transformers' GlmForCausalLM, whose pairs of neighbours lie half the turned
dims apart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.models.decoders.ernie4_5 import turned_attention_rules
from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, NORMS, Llama, LlamaConfig, linear_rules, outer_rules
from polyreme.models.families import GLM
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, rows_of
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class GlmConfig(LlamaConfig):
    """Dimensions of a GLM: a LLaMA's."""

    vocab_size: int = 151552
    qkv_bias: bool = True
    rotary_fraction: float = 0.5
    rms_norm_epsilon: float = 1.5625e-7


class Glm(Llama, keeps_order_free=True):
    """As Llama."""

    family = GLM


def glm_rules(norms: Mapping[str, str]) -> list[WeightRule]:
    """All the weights; norms: of a block, as llama.NORMS."""
    there, here = "model.layers.{n}", "blocks.{n}"
    gate_up = enumerate(("gate", "up"))
    return [
        *outer_rules(),
        *(WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in norms.items()),
        *turned_attention_rules(f"{there}.self_attn", f"{here}.attention"),
        *linear_rules(f"{there}.mlp.down_proj", f"{here}.ffn.down"),
        *(
            WeightRule(f"{there}.mlp.gate_up_proj.weight", f"{here}.ffn.{part}.weight", rows_of(_gate_up, number))
            for number, part in gate_up
        ),
    ]


def _gate_up(config: Any) -> list[int]:
    return [config.ffn_size] * 2


def published_glm(architecture: str, model_type: str, norms: Mapping[str, str]) -> PublishedFamily:
    """The record of a GLM; norms: as of glm_rules."""
    return PublishedFamily(
        architecture=architecture,
        model_type=model_type,
        keys={**KEYS, "attention_bias": "qkv_bias"},
        weights=lambda config: glm_rules(norms),
        defaults={
            **DEFAULTS,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": model_type == "glm4",  # what each class of transformers takes it for
        },
        fixed=FIXED,
        prefix="model.",
        read=read_rope,
        read_keys=ROPE_KEYS,
        write=lambda config: write_rope(config) | {"partial_rotary_factor": config.rotary_fraction},
    )


PUBLISHED = published_glm("GlmForCausalLM", "glm", NORMS)
