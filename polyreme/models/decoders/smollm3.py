"""SmolLM3: a LLaMA some of whose blocks, by default every fourth, know no positions.

Source: arXiv:2501.18795 (blocks without positions). Same function as transformers' SmolLM3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.errors import ConfigError
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
from polyreme.models.decoders.qwen2 import WINDOW_KEYS, read_windows, write_windows
from polyreme.models.families import SMOLLM3
from polyreme.models.files.published import PublishedFamily

_INTERVAL = 4


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """Dimensions of a SmolLM3: a LLaMA's. unturned_blocks: those without positions, every fourth if None."""

    rope_theta: float = 2000000.0
    tie_embeddings: bool = True
    unturned_blocks: Sequence[int] | None = None  # type: ignore[assignment]  # a trait that here is said of each model

    def __post_init__(self) -> None:
        if self.unturned_blocks is None:
            object.__setattr__(self, "unturned_blocks", tuple(range(_INTERVAL - 1, self.num_layers, _INTERVAL)))
        super().__post_init__()


class SmolLM3(Llama, keeps_order_free=True):
    """As Llama."""

    family = SMOLLM3


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    count, turned = config["num_hidden_layers"], config.get("no_rope_layers")
    if turned is None:
        interval = config.get("no_rope_layer_interval") or _INTERVAL
        turned = [int((number + 1) % interval != 0) for number in range(count)]
    if not isinstance(turned, list) or len(turned) != count or any(value not in (0, 1) for value in turned):
        raise ConfigError(f"config.json of a smollm3: no_rope_layers {turned}; give 1 or 0 for each of {count} blocks")
    unturned = tuple(number for number, value in enumerate(turned) if not value)
    return {"unturned_blocks": unturned} | read_windows(config) | read_biases(config)


def _write(config: SmolLM3Config) -> dict[str, Any]:
    turned = [int(number not in (config.unturned_blocks or ())) for number in range(config.num_layers)]
    return {"no_rope_layers": turned} | write_windows(config) | write_biases(config)


PUBLISHED = PublishedFamily(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys={key: ours for key, ours in KEYS.items() if key != "head_dim"},
    weights=block_rules,
    defaults={
        **DEFAULTS,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
    },
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("no_rope_layers", "no_rope_layer_interval", *BIAS_KEYS, *WINDOW_KEYS),
    write=_write,
)
