"""Qwen2: a LLaMA with biases where queries, keys and values are projected.

Source: arXiv:2407.10671. Same function as transformers' Qwen2ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.errors import ConfigError
from polyreme.models.families import QWEN2
from polyreme.models.llama import DEFAULTS, FIXED, KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.published import PublishedFamily
from polyreme.models.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Dimensions of a Qwen2: a LLaMA's, with biases."""

    rope_theta: float = 1000000.0
    qkv_bias: bool = True


class Qwen2(Llama):
    """As Llama."""

    family = QWEN2
    is_order_free = Llama.is_order_free


WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
"""What config.json says of windows in a Qwen."""


def read_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window and full_blocks. Raises ConfigError for windows in blocks that are followed by one without."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return {"sliding_window": 0}
    count = config["num_hidden_layers"]
    full = min(config.get("max_window_layers", count), count)
    kinds = config.get("layer_types") or []
    if kinds and kinds != ["full_attention"] * full + ["sliding_attention"] * (count - full):
        raise ConfigError(
            f"config.json: layer_types {kinds} has a window in other blocks than those after the first "
            f"max_window_layers = {full}, which cannot be had here"
        )
    return {"sliding_window": config["sliding_window"] if full < count else 0, "full_blocks": full}


def write_windows(config: Any) -> dict[str, Any]:
    """The keys that these fields become."""
    window, full = config.sliding_window, config.full_blocks
    return {"use_sliding_window": bool(window), "sliding_window": window or None, "max_window_layers": full}


PUBLISHED = PublishedFamily(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=KEYS,
    weights=block_rules,
    defaults={**DEFAULTS, "use_sliding_window": False},
    fixed=FIXED,
    prefix="model.",
    read=lambda config: read_windows(config) | read_rope(config),
    read_keys=(*WINDOW_KEYS, *ROPE_KEYS),
    write=lambda config: write_windows(config) | write_rope(config),
)
