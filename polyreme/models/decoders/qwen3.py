"""Qwen3: a LLaMA whose queries and keys are normed head by head, with heads of a width of their own.

Source: arXiv:2505.09388. Same function as transformers' Qwen3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.models.decoders.llama import FIXED, KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.decoders.qwen2 import QWEN_DEFAULTS, WINDOW_KEYS, read_windows, write_windows
from polyreme.models.families import QWEN3
from polyreme.models.files.published import PublishedFamily
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """Dimensions of a Qwen3: a LLaMA's, with norms."""

    rope_theta: float = 1000000.0
    qk_norm: bool = True


class Qwen3(Llama, keeps_order_free=True):
    """As Llama."""

    family = QWEN3


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias} | read_windows(config) | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=KEYS,
    weights=block_rules,
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("attention_bias", *WINDOW_KEYS, *ROPE_KEYS),
    write=lambda config: {"attention_bias": config.out_bias} | write_windows(config) | write_rope(config),
)
