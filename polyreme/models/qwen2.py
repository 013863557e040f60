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
    is_order_free: property = Llama.is_order_free


_FULL, _SLIDING = "full_attention", "sliding_attention"
QWEN_DEFAULTS = {**DEFAULTS, "use_sliding_window": False, "max_position_embeddings": 32768, "rope_theta": 10000.0}
"""What config.json of a Qwen means by leaving a key out."""
WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
"""What config.json says of windows in a Qwen."""


def read_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window and full_blocks. Raises ConfigError for layer_types that are not one for each block, or others."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return {"sliding_window": 0}
    count = config["num_hidden_layers"]
    first = min(config.get("max_window_layers", count), count)
    kinds = config.get("layer_types") or [_FULL] * first + [_SLIDING] * (count - first)
    if len(kinds) != count or {*kinds} - {_FULL, _SLIDING}:
        raise ConfigError(f"config.json: layer_types {kinds}; give {_FULL} or {_SLIDING} for each of {count} blocks")
    full = tuple(number for number, kind in enumerate(kinds) if kind == _FULL)
    return (
        {"sliding_window": config["sliding_window"], "full_blocks": full}
        if _SLIDING in kinds
        else {"sliding_window": 0}
    )


def write_windows(config: Any) -> dict[str, Any]:
    """The keys that these fields become."""
    window, count = config.sliding_window, config.num_layers
    kinds = [_FULL if number in config.full_blocks or not window else _SLIDING for number in range(count)]
    first = kinds.index(_SLIDING) if window else count
    keys = {"use_sliding_window": bool(window), "sliding_window": window or None, "max_window_layers": first}
    return {**keys, "layer_types": kinds}


PUBLISHED = PublishedFamily(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=KEYS,
    weights=block_rules,
    defaults=QWEN_DEFAULTS,
    fixed=FIXED,
    prefix="model.",
    read=lambda config: read_windows(config) | read_rope(config),
    read_keys=(*WINDOW_KEYS, *ROPE_KEYS),
    write=lambda config: write_windows(config) | write_rope(config),
)
