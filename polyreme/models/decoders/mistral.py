"""Mistral: a LLaMA whose tokens may see no more than a window of those before them.

Source: arXiv:2310.06825. Same function as transformers' MistralForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.families import MISTRAL
from polyreme.models.files.published import PublishedFamily
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """Dimensions of a Mistral: a LLaMA's, with a window."""

    sliding_window: int = field(default=4096, metadata={"least": 0})


class Mistral(Llama, keeps_order_free=True):
    """As Llama."""

    family = MISTRAL


PUBLISHED = PublishedFamily(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=KEYS,
    weights=block_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    fixed=FIXED,
    prefix="model.",
    read=lambda config: {"sliding_window": config["sliding_window"] or 0} | read_rope(config),
    read_keys=("sliding_window", *ROPE_KEYS),
    write=lambda config: {"sliding_window": config.sliding_window or None} | write_rope(config),
)
