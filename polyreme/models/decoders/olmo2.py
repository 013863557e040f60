"""OLMo 2: a LLaMA that norms what attention and feed-forward give, not what they take, and queries and keys of all
heads together.

Source: arXiv:2501.00656. Same function as transformers' Olmo2ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.gemma import read_attention_bias
from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.families import OLMO2
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """Dimensions of an OLMo 2: a LLaMA's."""

    norm_places: ClassVar[str] = "after"
    whole_qk_norm: ClassVar[bool] = True

    rms_norm_epsilon: float = 1e-5
    qk_norm: bool = True


class Olmo2(Llama, keeps_order_free=True):
    """As Llama."""

    family = OLMO2


_NORMS = {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "ffn_out_norm"}


def block_rules_after(config: Any) -> list[WeightRule]:
    """All the weights of a decoder that norms what the parts of its blocks give."""
    return block_rules(config, _NORMS)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_attention_bias(config) | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=KEYS,
    weights=block_rules_after,
    defaults={**DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("attention_bias", *ROPE_KEYS),
    write=lambda config: {"attention_bias": config.out_bias} | write_rope(config),
)
