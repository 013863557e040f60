"""OLMo 3: an OLMo 2 with windows in most blocks, whose positions are stretched in the others alone.

Source: Allen Institute for AI, 2025 (OLMo 3 technical report). Same function as transformers' Olmo3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyreme.models.decoders.gemma3 import LocallyTurned, read_rope_by_kind
from polyreme.models.decoders.olmo2 import PUBLISHED as OLMO2_PUBLISHED
from polyreme.models.decoders.olmo2 import Olmo2Config
from polyreme.models.decoders.qwen2 import FULL, SLIDING, layer_types, read_full_blocks
from polyreme.models.families import OLMO3
from polyreme.models.parts.rotary import write_rope

_INTERVAL = 4


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """Dimensions of an OLMo 3: an OLMo 2's. full_blocks: those without a window, every fourth if None. local_theta:
    rope_theta of those with one."""

    rope_theta: float = 500000.0
    local_theta: float = 500000.0
    sliding_window: int = field(default=4096, metadata={"least": 0})
    full_blocks: Sequence[int] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.full_blocks is None:
            object.__setattr__(self, "full_blocks", tuple(range(_INTERVAL - 1, self.num_layers, _INTERVAL)))
        super().__post_init__()


class Olmo3(LocallyTurned, keeps_order_free=True):
    """As Llama."""

    family = OLMO3


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    window = {"sliding_window": config["sliding_window"] or 0, "full_blocks": read_full_blocks(config, _INTERVAL)}
    biases = {key: value for key, value in OLMO2_PUBLISHED.read(config).items() if key.endswith("bias")}
    return window | biases | read_rope_by_kind(config, config["rope_theta"])


def _write(config: Olmo3Config) -> dict[str, Any]:
    window = {"sliding_window": config.sliding_window or None, "layer_types": layer_types(config)}
    rope = write_rope(config)
    whole = {"rope_theta": config.rope_theta, **(rope["rope_scaling"] or {"rope_type": "default"})}
    local = {"rope_theta": config.local_theta, "rope_type": "default"}
    # older programs have one base, and read no rope_parameters
    return OLMO2_PUBLISHED.write(config) | window | rope | {"rope_parameters": {FULL: whole, SLIDING: local}}


PUBLISHED = replace(
    OLMO2_PUBLISHED,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={**OLMO2_PUBLISHED.defaults, "sliding_window": 4096, "rope_theta": 500000.0},
    read=_read,
    read_keys=("sliding_window", "layer_types", *OLMO2_PUBLISHED.read_keys),
    write=_write,
)
