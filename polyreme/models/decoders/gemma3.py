"""Gemma 3, of text alone: a Gemma 2 without bounds, with normed queries and keys, and a rotary base of its own in the
blocks with a window, which are five of six.

Source: arXiv:2503.19786. Same function as transformers' Gemma3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.models.decoders.gemma import GEMMA_FIXED
from polyreme.models.decoders.gemma2 import (
    GEMMA2_DEFAULTS,
    GEMMA2_KEYS,
    WINDOW_KEYS,
    Gemma2Config,
    block_rules_around,
    read_gemma_windows,
    write_gemma_windows,
)
from polyreme.models.decoders.llama import Llama
from polyreme.models.decoders.qwen2 import FULL, SLIDING
from polyreme.models.families import GEMMA3
from polyreme.models.files.published import PublishedFamily
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, rotary_table, write_rope
from polyreme.nn import Layer


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """Dimensions of a Gemma 3: a Gemma 2's. rope_theta and rope_scaling are those of the full_blocks, local_theta
    of the others."""

    pattern: ClassVar[int] = 6

    vocab_size: int = 262208
    rope_theta: float = 1000000.0
    local_theta: float = 10000.0
    qk_norm: bool = True
    score_cap: float = 0.0
    logit_cap: float = 0.0
    sliding_window: int = field(default=512, metadata={"least": 0})


class LocallyTurned(Llama, keeps_order_free=True):
    """As Llama; the blocks with a window turn by local_theta, and stretch nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_tables("local_", rotary_table(config.seq_len, config.rotary_width, config.local_theta))

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        block = super().make_block(config, number)
        block.is_local = number not in (config.full_blocks or ())
        return block

    def tables_of(self, block: Layer, places: int) -> tuple[Any, Any]:
        """The tables by which a block turns in rows that have so many places."""
        return (self.local_cos, self.local_sin) if block.is_local else super().tables_of(block, places)


class Gemma3(LocallyTurned, keeps_order_free=True):
    """As LocallyTurned."""

    family = GEMMA3


def read_rope_by_kind(config: Mapping[str, Any], local_theta: Any) -> dict[str, Any]:
    """What read_rope gives of the blocks without a window, and the local_theta of the others, this one where
    config.json does not speak of kinds. Raises ConfigError where those with a window are stretched."""
    by_kind = config.get("rope_parameters") or {}
    local = by_kind.get(SLIDING, {}) if isinstance(by_kind, Mapping) else {}
    if local.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope_parameters of {SLIDING} {local}; only full_attention is stretched here")
    whole = {**config, "rope_parameters": by_kind.get(FULL, {})} if FULL in by_kind else config
    return {"local_theta": float(local.get("rope_theta", local_theta))} | read_rope(whole)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = read_gemma_windows(config)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if pattern is not None and "full_blocks" not in fields:
        if type(pattern) is not int or pattern < 1:
            raise ConfigError(f"config.json of a gemma3_text: sliding_window_pattern {pattern!r}; give 1 or more")
        fields["full_blocks"] = tuple(range(pattern - 1, config["num_hidden_layers"], pattern))
    return fields | read_rope_by_kind(config, config["rope_local_base_freq"])


def _write(config: Gemma3Config) -> dict[str, Any]:
    return write_gemma_windows(config) | {"rope_local_base_freq": config.local_theta} | write_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys=GEMMA2_KEYS,
    weights=block_rules_around,
    defaults={
        **GEMMA2_DEFAULTS,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    fixed={**GEMMA_FIXED, "use_bidirectional_attention": (False, None)},
    prefix="model.",
    read=_read,
    read_keys=(
        *("hidden_act", "attention_bias", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
        *("cache_implementation", *WINDOW_KEYS, *ROPE_KEYS),
    ),
    write=_write,
)
