"""GPT-NeoX, as Pythia: a decoder whose attention and feed-forward read the same stream, with rotary positions.

Source: arXiv:2204.06745, arXiv:2304.01373. Same function as transformers' GPTNeoXForCausalLM. Logical dims of
parameters: as of models.decoders.gpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from polyreme.autograd.recompute import run_part
from polyreme.eager.tensor import to_tensor
from polyreme.models.decoders.llama import KEYS, Block, Llama, LlamaConfig, linear, linear_rules
from polyreme.models.families import GPT_NEOX
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.cache import LayerCache
from polyreme.models.parts.decoder import attend_causally
from polyreme.models.parts.encoder import TwoLayers, check_activation, same_rules
from polyreme.models.parts.rotary import ROPE_KEYS, read_rope, rotate, write_rope
from polyreme.nn import Layer, LayerNorm, Linear
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class GPTNeoXConfig(LlamaConfig):
    """Dimensions of a GPT-NeoX: a LLaMA's, all of whose maps but the last have biases. is_parallel: attention and
    feed-forward both take x, else the second takes what the first made of it. activation: of the feed-forward, one of
    models.parts.encoder.ACTIVATIONS."""

    norm_class: ClassVar[Any] = LayerNorm

    vocab_size: int = 50432
    rms_norm_epsilon: float = 1e-5
    rotary_fraction: float = 0.25
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    is_parallel: bool = True
    activation: str = "gelu"  # type: ignore[misc]  # a trait that here is said of each model

    def __post_init__(self) -> None:
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", GPT_NEOX.ffn_size(self.hidden_size))
        check_activation(type(self).__name__, self.activation)
        super().__post_init__()


class Attention(Layer):
    """Causal self-attention; the columns of qkv are ordered [key head, its queries' heads k v, head_dim], so that mp
    splits whole groups. place_bias: as of decoder.attend_causally, [heads, seq_len]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    recompute: str
    qkv: Linear
    out: Linear

    def __init__(self, config: GPTNeoXConfig, place_bias: np.ndarray | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.recompute = config.recompute
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        columns = inner + 2 * config.num_kv_heads * config.head_dim
        self.qkv = linear(width, columns, ("embed", "heads"), config.qkv_bias)
        self.out = linear(inner, width, ("heads", "embed"), config.out_bias)
        self.register_buffer("place_bias", None if place_bias is None else to_tensor(place_bias), persistable=False)

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        batch, seq, _ = x_bse.shape
        shared = self.num_heads // self.num_kv_heads
        qkv = self.qkv(x_bse).reshape([batch, seq, self.num_kv_heads, shared + 2, self.head_dim])
        qkv = constrain(qkv, "batch", "block_seq", "kv_heads", None, None)
        q = qkv[:, :, :, :shared].reshape([batch, seq, self.num_heads, self.head_dim])
        k, v = qkv[:, :, :, shared], qkv[:, :, :, shared + 1]
        q, k = rotate(q, cos_sd, sin_sd), rotate(k, cos_sd, sin_sd)
        if cache is not None:
            mixed = cache.attend(q, k, v, place_bias=self.place_bias)
        else:
            options = {"place_bias": self.place_bias, "training": self.training}
            mixed = attend_causally(self.recompute, q, k, v, ends, **options)
        return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))


class ParallelBlock(Block):
    """x + attention(norm(x)) + ffn(other norm(x)), or of the same norm where the family has one."""

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        normed = self.attention_norm(x_bse)  # type: ignore[misc]  # norms are before the parts
        mixed = run_part("full_attn", self.recompute, self.attention, normed, cos_sd, sin_sd, cache, ends)
        fed = self.ffn(normed if self.ffn_norm is None else self.ffn_norm(x_bse))
        return constrain(x_bse + mixed + fed, "batch", "seq", "embed")


class GPTNeoX(Llama, keeps_order_free=True):
    """As Llama."""

    family = GPT_NEOX

    def make_block(self, config: GPTNeoXConfig, number: int) -> Layer:
        """A new block; number: how many come before it."""
        kind = ParallelBlock if config.is_parallel else Block
        return kind(config, self.make_attention(config), make_feed_forward(config))

    def make_attention(self, config: Any) -> Layer:
        """A block's attention."""
        return Attention(config)


def make_feed_forward(config: GPTNeoXConfig) -> TwoLayers:
    """A block's feed-forward."""
    return TwoLayers(config.hidden_size, config.ffn_size, config.activation, config.mlp_bias)


# as published


def _rules(config: Any) -> list[WeightRule]:
    there, here = "gpt_neox.layers.{n}", "blocks.{n}"
    maps = {"attention.query_key_value": "attention.qkv", "attention.dense": "attention.out"}
    maps |= {"mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down"}
    norms = {f"{there}.input_layernorm": f"{here}.attention_norm", "gpt_neox.final_layer_norm": "norm"}
    norms[f"{there}.post_attention_layernorm"] = f"{here}.ffn_norm"
    return [
        WeightRule("gpt_neox.embed_in.weight", "tokens.weight", SAME),
        WeightRule("embed_out.weight", "head.weight"),
        *(rule for name, ours in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{ours}")),
        *(rule for name, ours in norms.items() for rule in same_rules(name, ours)),
    ]


def _is_spare(name: str, config: Any) -> bool:
    """Whether a weight is a mask that older versions stored."""
    return name.endswith((".attention.bias", ".attention.masked_bias"))


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    older = {
        "rope_theta": config.get("rotary_emb_base", 10000),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    bias = bool(config.get("attention_bias", True))
    rope = read_rope({**older, **{key: value for key, value in config.items() if value is not None}})
    return {"qkv_bias": bias, "out_bias": bias} | rope


def _write(config: GPTNeoXConfig) -> dict[str, Any]:
    keys = write_rope(config)
    return {
        "rotary_emb_base": keys.pop("rope_theta"),
        "rotary_pct": config.rotary_fraction,
        "rope_scaling": keys["rope_scaling"],
        "attention_bias": config.out_bias,
    }


PUBLISHED = PublishedFamily(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    token_head="classifier",
    keys={
        **{key: ours for key, ours in KEYS.items() if key not in ("num_key_value_heads", "head_dim", "rms_norm_eps")},
        "layer_norm_eps": "rms_norm_epsilon",
        "use_parallel_residual": "is_parallel",
        "hidden_act": "activation",
    },
    weights=_rules,
    defaults={
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "max_position_embeddings": 2048,
    },
    fixed={"hidden_dropout": (0.0,)},
    spare=_is_spare,
    prefix="gpt_neox.",
    heads=("embed_out.",),
    read=_read,
    read_keys=("attention_bias", "rotary_emb_base", "rotary_pct", "classifier_dropout", *ROPE_KEYS),
    write=_write,
)
