"""BLOOM: a GPT-NeoX without rotary positions, whose scores fall with distance, and whose embeddings are normed.

Source: arXiv:2211.05100. Same function as transformers' BloomForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.models.decoders.gpt_neox import Attention, GPTNeoX, GPTNeoXConfig
from polyreme.models.decoders.llama import linear_rules, make_norm
from polyreme.models.families import BLOOM
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.alibi import place_biases
from polyreme.models.parts.cache import KVCache
from polyreme.models.parts.encoder import same_rules
from polyreme.nn import Layer


@dataclass(frozen=True)
class BloomConfig(GPTNeoXConfig):
    """Dimensions of a BLOOM: a GPT-NeoX's. seq_len: the longest row that is taken; the weights have no such bound."""

    vocab_size: int = 250880
    seq_len: int = 2048
    tie_embeddings: bool = True
    rotary_fraction: float = 0.0
    is_parallel: bool = False
    activation: str = "gelu_new"


class Bloom(GPTNeoX):
    """As Llama."""

    embedding_norm: Layer

    family = BLOOM

    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        self.embedding_norm = make_norm(config, config.hidden_size)

    def make_attention(self, config: BloomConfig) -> Layer:
        """A block's attention."""
        return Attention(config, place_biases(config.num_heads, config.seq_len))

    def placed(self, x_bse: Any, cache: KVCache | None = None) -> Any:
        """Token embeddings, normed."""
        return self.embedding_norm(x_bse)

    def embedding_layers(self) -> dict[str, Layer]:
        """The Layers that embed calls."""
        return {"tokens": self.tokens, "embedding_norm": self.embedding_norm}


def body_rules(there: str = "transformer.h.{n}", here: str = "blocks.{n}") -> list[WeightRule]:
    """The weights that a BLOOM and a Falcon have, but for the norms of blocks."""
    maps = {"self_attention.query_key_value": "attention.qkv", "self_attention.dense": "attention.out"}
    maps |= {"mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down"}
    return [
        WeightRule("transformer.word_embeddings.weight", "tokens.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
        *same_rules("transformer.ln_f", "norm"),
        *(rule for name, ours in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{ours}")),
    ]


def _rules(config: Any) -> list[WeightRule]:
    there, here = "transformer.h.{n}", "blocks.{n}"
    return [
        *body_rules(),
        *same_rules("transformer.word_embeddings_layernorm", "embedding_norm"),
        *same_rules(f"{there}.input_layernorm", f"{here}.attention_norm"),
        *same_rules(f"{there}.post_attention_layernorm", f"{here}.ffn_norm"),
    ]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"ffn_size": 4 * config["hidden_size"]}


PUBLISHED = PublishedFamily(
    architecture="BloomForCausalLM",
    model_type="bloom",
    token_head="classifier",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "seq_length": "seq_len",
        "layer_norm_epsilon": "rms_norm_epsilon",
        "tie_word_embeddings": "tie_embeddings",
    },
    spellings={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    weights=_rules,
    defaults={"tie_word_embeddings": True, "seq_length": 2048, "layer_norm_epsilon": 1e-5},
    fixed={"apply_residual_connection_post_layernorm": (False,)},
    prefix="transformer.",
    read=_read,
    # of training, and of a sum in parts that is the same sum
    read_keys=(
        *("hidden_dropout", "slow_but_exact", "unk_token_id", "offset_alibi", "attention_softmax_in_fp32"),
        *("bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"),
    ),
)
