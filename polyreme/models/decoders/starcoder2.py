"""StarCoder2: LayerNorms, biases and two matrices in a feed-forward, with grouped heads, rotary positions and windows.

Source: arXiv:2402.19173. Same function as transformers' Starcoder2ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.models.decoders.gpt_neox import GPTNeoXConfig, make_feed_forward
from polyreme.models.decoders.llama import DEFAULTS, KEYS, NORMS, Attention, Block, Llama, linear_rules
from polyreme.models.families import STARCODER2
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.encoder import same_rules
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, write_rope
from polyreme.nn import Layer


@dataclass(frozen=True)
class Starcoder2Config(GPTNeoXConfig):
    """Dimensions of a StarCoder2: a GPT-NeoX's, its parts in turn."""

    vocab_size: int = 49152
    tie_embeddings: bool = True
    rotary_fraction: float = 1.0
    is_parallel: bool = False
    activation: str = "gelu_pytorch_tanh"


class Starcoder2(Llama, keeps_order_free=True):
    """As Llama."""

    family = STARCODER2

    def make_block(self, config: Starcoder2Config, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return Block(config, Attention(config, config.window(number)), make_feed_forward(config))


def _rules(config: Any) -> list[WeightRule]:
    there, here = "model.layers.{n}", "blocks.{n}"
    maps = {f"self_attn.{name}_proj": f"attention.{name}" for name in ("q", "k", "v")}
    maps |= {"self_attn.o_proj": "attention.out", "mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}
    norms = {f"{there}.{name}": f"{here}.{ours}" for name, ours in NORMS.items()} | {"model.norm": "norm"}
    return [
        WeightRule("model.embed_tokens.weight", "tokens.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
        *(rule for name, ours in norms.items() for rule in same_rules(name, ours)),
        *(rule for name, ours in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{ours}")),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("use_bias", True))
    window = {"sliding_window": config.get("sliding_window") or 0}
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias} | window | read_rope(config)


PUBLISHED = PublishedFamily(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    keys={
        **{key: ours for key, ours in KEYS.items() if key not in ("rms_norm_eps", "head_dim")},
        "norm_epsilon": "rms_norm_epsilon",
        "hidden_act": "activation",
    },
    weights=_rules,
    defaults={
        **DEFAULTS,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
    },
    fixed={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    prefix="model.",
    read=_read,
    # of training
    read_keys=("use_bias", "sliding_window", "residual_dropout", "embedding_dropout", *ROPE_KEYS),
    write=lambda config: {
        "use_bias": config.out_bias,
        "sliding_window": config.sliding_window or None,
        **write_rope(config),
    },
)
