"""Granite: a LLaMA that scales embeddings, scores, what blocks add, and logits.

Source: arXiv:2405.04324; scales as of arXiv:2203.03466. Same function as transformers' GraniteForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyreme.models.decoders.llama import (
    BIAS_KEYS,
    DEFAULTS,
    FIXED,
    KEYS,
    Llama,
    LlamaConfig,
    block_rules,
    read_biases,
    write_biases,
)
from polyreme.models.families import GRANITE
from polyreme.models.files.published import PublishedFamily


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """Dimensions of a Granite: a LLaMA's; the scales are BlockTraits'. logit_divisor: logits are divided by it."""

    embedding_scale: float = 1.0  # type: ignore[misc]  # traits that here are said of each model
    residual_scale: float = 1.0  # type: ignore[misc]
    score_scale: float = 1.0  # type: ignore[misc]
    logit_divisor: float = 1.0

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        """What logits are multiplied by."""
        return 1 / self.logit_divisor


class Granite(Llama, keeps_order_free=True):
    """As Llama."""

    family = GRANITE


_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "score_scale",
    "logits_scaling": "logit_divisor",
}


PUBLISHED = PublishedFamily(
    architecture="GraniteForCausalLM",
    model_type="granite",
    keys={**KEYS, **_SCALES},
    weights=block_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 2048, **dict.fromkeys(_SCALES, 1.0)},
    fixed=FIXED,
    prefix="model.",
    read=read_biases,
    read_keys=BIAS_KEYS,
    write=write_biases,
)
