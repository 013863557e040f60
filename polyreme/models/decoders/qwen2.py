"""Qwen2: a LLaMA with biases where queries, keys and values are projected.

Source: arXiv:2407.10671. Same function as transformers' Qwen2ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.errors import ConfigError
from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, Llama, LlamaConfig, block_rules
from polyreme.models.families import QWEN2
from polyreme.models.files.published import PublishedFamily
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Dimensions of a Qwen2: a LLaMA's, with biases."""

    rope_theta: float = 1000000.0
    qkv_bias: bool = True


class Qwen2(Llama, keeps_order_free=True):
    """As Llama."""

    family = QWEN2


FULL, SLIDING = "full_attention", "sliding_attention"
"""What config.json says of a block: that its tokens see all before them, or a window."""
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
    full = read_layer_types(config.get("layer_types") or [FULL] * first + [SLIDING] * (count - first), count)
    if len(full) == count:
        return {"sliding_window": 0}
    return {"sliding_window": config["sliding_window"], "full_blocks": full}


def read_layer_types(kinds: Any, count: int) -> tuple[int, ...]:
    """full_blocks. Raises ConfigError for what is no list of kinds, one for each of so many blocks."""
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ConfigError(f"config.json: layer_types {kinds}; give {FULL} or {SLIDING} for each of {count} blocks")
    return tuple(number for number, kind in enumerate(kinds) if kind == FULL)


def read_full_blocks(config: Mapping[str, Any], interval: Any) -> tuple[int, ...]:
    """full_blocks: by layer_types, or where that says nothing every interval-th. Raises ConfigError for another
    interval than a whole number, none for 0."""
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None:
        return read_layer_types(kinds, count)
    if type(interval) is not int or interval < 0:
        raise ConfigError(f"config.json: every {interval!r}-th block without a window; give a number, or layer_types")
    return tuple(range(interval - 1, count, interval)) if interval else ()


def layer_types(config: Any) -> list[str]:
    """The kind of each block."""
    full = {*config.full_blocks} if config.sliding_window else {*range(config.num_layers)}
    return [FULL if number in full else SLIDING for number in range(config.num_layers)]


def write_windows(config: Any) -> dict[str, Any]:
    """The keys that these fields become."""
    window, count = config.sliding_window, config.num_layers
    kinds = layer_types(config)
    first = kinds.index(SLIDING) if window else count
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
