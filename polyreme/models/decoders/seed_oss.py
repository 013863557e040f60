"""Seed-OSS: a LLaMA with biases where queries, keys and values are projected, and heads of a width of their own.

Source: ByteDance Seed, 2025 (Seed-OSS-36B). Same function as transformers' SeedOssForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyreme.models.decoders.llama import DEFAULTS, Llama, LlamaConfig, read_biases, write_biases
from polyreme.models.decoders.llama import PUBLISHED as LLAMA_PUBLISHED
from polyreme.models.families import SEED_OSS


@dataclass(frozen=True)
class SeedOssConfig(LlamaConfig):
    """Dimensions of a Seed-OSS: a LLaMA's, with biases."""

    vocab_size: int = 155136
    rope_theta: float = 10000000.0
    qkv_bias: bool = True


class SeedOss(Llama, keeps_order_free=True):
    """As Llama."""

    family = SEED_OSS


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_biases(config) | {"out_bias": bool(config.get("attention_out_bias"))}


PUBLISHED = replace(
    LLAMA_PUBLISHED,
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    defaults={
        **DEFAULTS,
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
    },
    read=_read,
    # residual_dropout: of training
    read_keys=("attention_out_bias", "residual_dropout", *LLAMA_PUBLISHED.read_keys),
    write=lambda config: (
        write_biases(config) | {"attention_bias": config.qkv_bias, "attention_out_bias": config.out_bias}
    ),
)
