"""StableLM: a LLaMA with norms that centre, whose positions turn a part of each head.

Source: arXiv:2402.17834. Same function as transformers' StableLmForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.llama import DEFAULTS, FIXED, KEYS, NORMS, Llama, LlamaConfig, block_rules
from polyreme.models.families import STABLELM
from polyreme.models.files.published import PublishedFamily, WeightRule
from polyreme.models.parts.encoder import same_rules
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import LayerNorm


@dataclass(frozen=True)
class StableLMConfig(LlamaConfig):
    """Dimensions of a StableLM: a LLaMA's."""

    norm_class: ClassVar[Any] = LayerNorm

    rms_norm_epsilon: float = 1e-5
    rotary_fraction: float = 0.25


class StableLM(Llama, keeps_order_free=True):
    """As Llama."""

    family = STABLELM


def _rules(config: Any) -> list[WeightRule]:
    norms = {f"model.layers.{{n}}.{name}": f"blocks.{{n}}.{ours}" for name, ours in NORMS.items()}
    norms["model.norm"] = "norm"
    return [*block_rules(config), *(rule for name, ours in norms.items() for rule in same_rules(name, ours)[1:])]


PUBLISHED = PublishedFamily(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    keys={key: ours for key, ours in KEYS.items() if key not in ("head_dim", "rms_norm_eps")}
    | {"layer_norm_eps": "rms_norm_epsilon", "use_qkv_bias": "qkv_bias"},
    weights=_rules,
    defaults={
        **DEFAULTS,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 32,
    },
    fixed={**FIXED, "qk_layernorm": (False,), "use_parallel_residual": (False,), "hidden_dropout": (0.0,)},
    prefix="model.",
    read=read_rope,
    read_keys=ROPE_KEYS,
    write=lambda config: write_rope(config) | {"partial_rotary_factor": config.rotary_fraction},
)
