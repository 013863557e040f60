"""Phi-3 and Phi-4: a LLaMA, published with queries, keys and values in one matrix and gate and up in another.

Source: arXiv:2404.14219; longer texts by LongRope, arXiv:2402.13753. Same function as transformers' Phi3ForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, NORMS, Llama, LlamaConfig, linear_rules, outer_rules
from polyreme.models.families import PHI3
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, rows_of
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Phi3Config(LlamaConfig):
    """Dimensions of a Phi-3: a LLaMA's."""

    rms_norm_epsilon: float = 1e-5


class Phi3(Llama, keeps_order_free=True):
    """As Llama."""

    family = PHI3


def _qkv_rows(config: Any) -> list[int]:
    return [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]


def _gate_up_rows(config: Any) -> list[int]:
    return [config.ffn_size] * 2


def _rules(config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}", "blocks.{n}"
    fused = {
        "self_attn.qkv_proj": (_qkv_rows, ("attention.q", "attention.k", "attention.v")),
        "mlp.gate_up_proj": (_gate_up_rows, ("ffn.gate", "ffn.up")),
    }
    return [
        *outer_rules(),
        *(WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in NORMS.items()),
        *linear_rules(f"{there}.self_attn.o_proj", f"{here}.attention.out"),
        *linear_rules(f"{there}.mlp.down_proj", f"{here}.ffn.down"),
        *(
            WeightRule(f"{there}.{name}.weight", f"{here}.{part}.weight", rows_of(sizes, number))
            for name, (sizes, parts) in fused.items()
            for number, part in enumerate(parts)
        ),
    ]


PUBLISHED = PublishedFamily(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    keys={key: ours for key, ours in KEYS.items() if key != "head_dim"},
    weights=_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    fixed={**FIXED, "attention_bias": (False,)},
    prefix="model.",
    read=lambda config: {"sliding_window": config.get("sliding_window") or 0} | read_rope(config),
    read_keys=("sliding_window", *ROPE_KEYS),
    write=lambda config: {"sliding_window": config.sliding_window or None} | write_rope(config),
)
