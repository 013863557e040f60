"""Gemma 2: a Gemma with norms around attention and feed-forward, bounded scores and logits, and windows in every other
block.

Source: arXiv:2408.00118. Same function as transformers' Gemma2ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.models.decoders.gemma import GEMMA_DEFAULTS, GEMMA_FIXED, GemmaConfig, read_attention_bias
from polyreme.models.decoders.llama import KEYS, Llama, block_rules
from polyreme.models.decoders.qwen2 import layer_types, read_layer_types
from polyreme.models.families import GEMMA2
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Dimensions of a Gemma 2: a Gemma's. query_scalar: scores are divided by its square root. full_blocks: every
    `pattern`th block if None."""

    norm_places: ClassVar[str] = "around"
    pattern: ClassVar[int] = 2

    query_scalar: float = 256.0
    score_cap: float = 50.0  # type: ignore[misc]  # traits that here are said of each model
    logit_cap: float = 30.0  # type: ignore[misc]
    sliding_window: int = field(default=4096, metadata={"least": 0})
    full_blocks: Sequence[int] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.full_blocks is None:
            object.__setattr__(self, "full_blocks", tuple(range(self.pattern - 1, self.num_layers, self.pattern)))
        super().__post_init__()
        if not self.query_scalar > 0 or min(self.score_cap, self.logit_cap) < 0:
            raise ConfigError(
                f"{type(self).__name__}: query_scalar {self.query_scalar}, score_cap {self.score_cap}, logit_cap "
                f"{self.logit_cap}; give a scalar above 0, and bounds above 0 or 0 for none"
            )

    @property
    def score_scale(self) -> float:  # type: ignore[override]
        """What scores are multiplied by."""
        return self.query_scalar**-0.5


class Gemma2(Llama, keeps_order_free=True):
    """As Llama."""

    family = GEMMA2


NORMS_AROUND = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_out_norm",
}
"""What the norms of a block are called there, and here."""
GEMMA2_KEYS = {
    **KEYS,
    "query_pre_attn_scalar": "query_scalar",
    "attn_logit_softcapping": "score_cap",
    "final_logit_softcapping": "logit_cap",
}
GEMMA2_DEFAULTS = {**GEMMA_DEFAULTS, "sliding_window": 4096, "query_pre_attn_scalar": 256}
WINDOW_KEYS = ("sliding_window", "layer_types")
"""What config.json says of windows in a Gemma."""


def block_rules_around(config: Any) -> list[WeightRule]:
    """All the weights of a Gemma with norms around the parts of its blocks."""
    return block_rules(config, NORMS_AROUND)


def read_gemma_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window and, where it is said, full_blocks; no bound of scores or logits where null is said."""
    caps = {GEMMA2_KEYS[key]: 0.0 for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    said = {ours: 0.0 for key, ours in GEMMA2_KEYS.items() if ours in caps and key in config and config[key] is None}
    fields = {"sliding_window": config["sliding_window"] or 0}
    if config.get("layer_types"):
        fields["full_blocks"] = read_layer_types(config["layer_types"], config["num_hidden_layers"])
    return said | fields | read_attention_bias(config)


def write_gemma_windows(config: Gemma2Config) -> dict[str, Any]:
    """The keys that these fields become."""
    caps = {"attn_logit_softcapping": config.score_cap or None, "final_logit_softcapping": config.logit_cap or None}
    windows = {"sliding_window": config.sliding_window or None, "layer_types": layer_types(config)}
    return caps | windows | {"attention_bias": config.out_bias}


PUBLISHED = PublishedFamily(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys=GEMMA2_KEYS,
    weights=block_rules_around,
    defaults=GEMMA2_DEFAULTS,
    fixed=GEMMA_FIXED,
    prefix="model.",
    read=lambda config: read_gemma_windows(config) | read_rope(config),
    read_keys=("hidden_act", "attention_bias", *WINDOW_KEYS, *ROPE_KEYS, "cache_implementation"),
    write=lambda config: write_gemma_windows(config) | write_rope(config),
)
