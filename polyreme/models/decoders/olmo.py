"""OLMo: a LLaMA whose norms learn nothing, and whose queries, keys and values may be bounded.

Source: arXiv:2402.00838. Same function as transformers' OlmoForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.models.decoders.gemma import read_attention_bias
from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.families import OLMO
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import LayerNorm


class BareNorm(LayerNorm):
    """A LayerNorm without gain and bias.

    >>> sorted(BareNorm(4).state_dict())
    []
    """

    def __init__(self, normalized_shape: Any, epsilon: float = 1e-5) -> None:
        super().__init__(normalized_shape, epsilon=epsilon, weight_attr=False, bias_attr=False)


@dataclass(frozen=True)
class OlmoConfig(LlamaConfig):
    """Dimensions of an OLMo: a LLaMA's. qkv_bound: as of BlockTraits."""

    norm_class: ClassVar[Any] = BareNorm

    rms_norm_epsilon: float = 1e-5
    qkv_bound: float = 0.0  # type: ignore[misc]  # a trait that here is said of each model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qkv_bound < 0:
            raise ConfigError(f"OlmoConfig: qkv_bound {self.qkv_bound}; give a bound above 0, or 0 for none")


class Olmo(Llama, keeps_order_free=True):
    """As Llama."""

    family = OLMO


def _rules(config: Any) -> list[WeightRule]:
    return block_rules(config, {})


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bound": config.get("clip_qkv") or 0.0} | read_attention_bias(config) | read_rope(config)


def _write(config: OlmoConfig) -> dict[str, Any]:
    return {"clip_qkv": config.qkv_bound or None, "attention_bias": config.out_bias} | write_rope(config)


PUBLISHED = PublishedFamily(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    keys={key: ours for key, ours in KEYS.items() if key not in ("rms_norm_eps", "head_dim")},
    weights=_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 2048},
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("attention_bias", "clip_qkv", *ROPE_KEYS),
    write=_write,
)
