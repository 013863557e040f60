"""gpt-oss: a decoder of experts with biases, whose heads learn a sink, with windows in every other block.

Source: arXiv:2508.10925. Same function as transformers' GptOssForCausalLM. Logical dims of parameters: Mixtral's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, attention_rules, outer_rules
from polyreme.models.decoders.qwen2 import layer_types, read_layer_types
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig, check_published_routing
from polyreme.models.families import GPT_OSS, Family
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, in_turn
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope

_LIMIT = 7.0
"""Of what goes through the gate, as kernels.experts.clamped_swiglu has it."""


@dataclass(frozen=True)
class GptOssConfig(MixtralConfig):
    """Dimensions of a gpt-oss: a Mixtral's. full_blocks: those without a window; every second one if None."""

    family: ClassVar[Family] = GPT_OSS
    has_sinks: ClassVar[bool] = True
    router_bias: ClassVar[bool] = True
    expert_options: ClassVar[Mapping[str, Any]] = {"activation": "clamped_swiglu", "bias": True, "gate_bias": True}

    vocab_size: int = 201088
    rope_theta: float = 150000.0
    rms_norm_epsilon: float = 1e-5
    num_experts: int = 32
    experts_per_token: int = 4
    qkv_bias: bool = True
    out_bias: bool = True
    sliding_window: int = field(default=128, metadata={"least": 0})
    full_blocks: Sequence[int] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.full_blocks is None:
            object.__setattr__(self, "full_blocks", tuple(range(1, self.num_layers, 2)))
        super().__post_init__()

    @classmethod
    def nano(cls, **changes: Any) -> GptOssConfig:
        """A gpt-oss that trains in seconds on a CPU."""
        return super().nano(**{"experts_per_token": 2, "sliding_window": 4, **changes})  # type: ignore[return-value]


class GptOss(Mixtral, keeps_order_free=True):
    """As Mixtral."""

    family = GPT_OSS


def _rules(config: Any) -> list[WeightRule]:
    check_published_routing(config)
    there, here = "model.layers.{n}.mlp", "blocks.{n}.ffn"
    pairs = [
        WeightRule(f"{there}.experts.gate_up_proj{ending}", f"{here}.{name}{ending}", in_turn(2, number))
        for ending in ("", "_bias")
        for number, name in enumerate(("gate", "up"))
    ]
    return [
        *outer_rules(),
        *attention_rules(),
        WeightRule("model.layers.{n}.self_attn.sinks", "blocks.{n}.attention.sinks", SAME),
        WeightRule(f"{there}.router.weight", f"{here}.router.weight"),
        WeightRule(f"{there}.router.bias", f"{here}.router.bias", SAME),
        *pairs,
        WeightRule(f"{there}.experts.down_proj", f"{here}.down", SAME),
        WeightRule(f"{there}.experts.down_proj_bias", f"{here}.down_bias", SAME),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    # every feed-forward is of experts: one width is both
    fields = {"ffn_size": config["intermediate_size"], "sliding_window": config.get("sliding_window") or 0}
    if config.get("layer_types"):
        fields["full_blocks"] = read_layer_types(config["layer_types"], config["num_hidden_layers"])
    return fields | read_rope(config)


def _write(config: GptOssConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window or None, "layer_types": layer_types(config)} | write_rope(config)


PUBLISHED = PublishedFamily(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    keys={
        **KEYS,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_ffn_size",
    },
    spellings={"experts_per_token": "num_experts_per_tok"},
    weights=_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 128, "rope_theta": 150000.0},
    fixed={**FIXED, "attention_bias": (True,), "swiglu_limit": (_LIMIT,)},
    prefix="model.",
    read=_read,
    # the length before it was stretched, which rope_scaling has too
    read_keys=("sliding_window", "layer_types", "initial_context_length", *ROPE_KEYS),
    write=_write,
)
