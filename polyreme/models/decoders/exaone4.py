"""EXAONE 4.0: a LLaMA that norms what attention and feed-forward give, with normed queries and keys, and where it has
windows no positions in the blocks without one.

Source: arXiv:2507.11407. Same function as transformers' Exaone4ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, Llama, LlamaConfig
from polyreme.models.decoders.olmo2 import block_rules_after
from polyreme.models.decoders.qwen2 import layer_types, read_full_blocks
from polyreme.models.families import EXAONE4
from polyreme.models.files.published import PublishedFamily
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Exaone4Config(LlamaConfig):
    """Dimensions of an EXAONE 4.0: a LLaMA's. full_blocks: those without a window, in which nothing turns; none if
    there are no windows."""

    norm_places: ClassVar[str] = "after"

    vocab_size: int = 102400
    rms_norm_epsilon: float = 1e-5
    rope_theta: float = 1000000.0
    qk_norm: bool = True
    sliding_window: int = field(default=0, metadata={"least": 0})

    @property
    def unturned_blocks(self) -> Sequence[int]:  # type: ignore[override]
        """Those without a window."""
        return self.full_blocks if self.sliding_window else ()


class Exaone4(Llama, keeps_order_free=True):
    """As Llama."""

    family = EXAONE4


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window") or 0
    full = read_full_blocks(config, config.get("sliding_window_pattern", 4)) if window else ()
    return {"sliding_window": window, "full_blocks": full} | read_rope(config)


def _write(config: Exaone4Config) -> dict[str, Any]:
    window = {"sliding_window": config.sliding_window or None, "layer_types": layer_types(config)}
    return window | {"sliding_window_pattern": 4 if config.sliding_window else None} | write_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    keys=KEYS,
    weights=block_rules_after,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    },
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("sliding_window", "sliding_window_pattern", "layer_types", *ROPE_KEYS),
    write=_write,
)
