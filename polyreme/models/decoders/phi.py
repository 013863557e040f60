"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward side by side on one norm, rotary positions on half of each head.

Source: arXiv:2306.11644, arXiv:2309.05463. Same function as transformers' PhiForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.decoders.gpt_neox import GPTNeoX, GPTNeoXConfig
from polyreme.models.decoders.llama import KEYS, Attention, linear_rules
from polyreme.models.families import PHI
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.encoder import same_rules
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import Layer


@dataclass(frozen=True)
class PhiConfig(GPTNeoXConfig):
    """Dimensions of a Phi: a GPT-NeoX's."""

    shared_norm: ClassVar[bool] = True
    head_bias: ClassVar[bool] = True

    vocab_size: int = 51200
    seq_len: int = 2048
    rotary_fraction: float = 0.5
    activation: str = "gelu_new"


class Phi(GPTNeoX, keeps_order_free=True):
    """As Llama."""

    family = PHI

    def make_attention(self, config: PhiConfig) -> Layer:
        """A block's attention."""
        return Attention(config)


def _rules(config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}", "blocks.{n}"
    maps = {f"self_attn.{name}_proj": f"attention.{name}" for name in ("q", "k", "v")}
    maps |= {"self_attn.dense": "attention.out", "mlp.fc1": "ffn.up", "mlp.fc2": "ffn.down"}
    return [
        WeightRule("model.embed_tokens.weight", "tokens.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
        WeightRule("lm_head.bias", "head_bias", SAME),
        *same_rules("model.final_layernorm", "norm"),
        *same_rules(f"{there}.input_layernorm", f"{here}.attention_norm"),
        *(rule for name, ours in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{ours}")),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"]} | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="PhiForCausalLM",
    model_type="phi",
    keys={
        **{key: ours for key, ours in KEYS.items() if key not in ("num_key_value_heads", "head_dim", "rms_norm_eps")},
        "layer_norm_eps": "rms_norm_epsilon",
        "hidden_act": "activation",
    },
    weights=_rules,
    defaults={
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
    },
    fixed={"qk_layernorm": (False,)},
    prefix="model.",
    heads=("lm_head.",),
    read=_read,
    read_keys=("num_key_value_heads", *ROPE_KEYS),
    write=lambda config: {
        "num_key_value_heads": config.num_kv_heads,
        **write_rope(config),
        "partial_rotary_factor": config.rotary_fraction,
    },
)
