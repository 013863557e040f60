"""Command R7B and Command A: a Command R with windows in most blocks, and no positions in the others.

Source: arXiv:2504.00698, section 2.1. Same function as transformers' Cohere2ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyreme.models.decoders.cohere import PUBLISHED as COHERE_PUBLISHED
from polyreme.models.decoders.cohere import Cohere, CohereConfig
from polyreme.models.decoders.qwen2 import layer_types, read_full_blocks
from polyreme.models.families import COHERE2

_INTERVAL = 4
_INTERVAL_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
"""What config.json calls how many blocks there are for one without a window."""


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """Dimensions of a Command R7B: a Command R's. full_blocks: those without a window, in which nothing turns; every
    fourth if None."""

    sliding_window: int = field(default=4096, metadata={"least": 0})
    full_blocks: Sequence[int] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.full_blocks is None:
            object.__setattr__(self, "full_blocks", tuple(range(_INTERVAL - 1, self.num_layers, _INTERVAL)))
        super().__post_init__()

    @property
    def unturned_blocks(self) -> Sequence[int]:  # type: ignore[override]
        """Those without a window."""
        return self.full_blocks or ()


class Cohere2(Cohere, keeps_order_free=True):
    """As Llama."""

    family = COHERE2


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    interval = next((config[key] for key in _INTERVAL_KEYS if config.get(key)), _INTERVAL)
    window = {"sliding_window": config.get("sliding_window") or 0, "full_blocks": read_full_blocks(config, interval)}
    return window | COHERE_PUBLISHED.read(config)


def _write(config: Cohere2Config) -> dict[str, Any]:
    window = {"sliding_window": config.sliding_window or None, "layer_types": layer_types(config)}
    return window | COHERE_PUBLISHED.write(config)


PUBLISHED = replace(
    COHERE_PUBLISHED,
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    keys={**COHERE_PUBLISHED.keys, "head_dim": "head_dim"},
    defaults={**COHERE_PUBLISHED.defaults, "sliding_window": 4096},
    # what files of the first release state, and what they mean by it
    fixed={
        **COHERE_PUBLISHED.fixed,
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
    },
    read_keys=(
        *("sliding_window", "layer_types", "cache_implementation", "use_parallel_embedding"),
        *(*_INTERVAL_KEYS, *COHERE_PUBLISHED.read_keys),
    ),
    read=_read,
    write=_write,
)
