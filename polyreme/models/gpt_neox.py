"""GPT-NeoX, as Pythia: a decoder whose attention and feed-forward read the same stream, with rotary positions.

Source: arXiv:2204.06745, arXiv:2304.01373. Same function as transformers' GPTNeoXForCausalLM. Logical dims of
parameters: as of models.gpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.autograd.recompute import run_part
from polyreme.models.cache import LayerCache
from polyreme.models.decoder import attend_causally
from polyreme.models.families import GPT_NEOX
from polyreme.models.llama import KEYS, Block, Llama, LlamaConfig, linear, linear_rules
from polyreme.models.published import SAME, PublishedFamily, WeightRule
from polyreme.models.rotary import ROPE_KEYS, read_rope, rotate, write_rope
from polyreme.nn import Layer, LayerNorm, Linear
from polyreme.nn import functional as F
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class GPTNeoXConfig(LlamaConfig):
    """Dimensions of a GPT-NeoX: a LLaMA's, all of whose maps but the last have biases. is_parallel: attention and
    feed-forward both take x, else the second takes what the first made of it."""

    norm_class: ClassVar[Any] = LayerNorm

    vocab_size: int = 50432
    rms_norm_epsilon: float = 1e-5
    rotary_fraction: float = 0.25
    is_parallel: bool = True

    def __post_init__(self) -> None:
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", GPT_NEOX.ffn_size(self.hidden_size))
        super().__post_init__()


class Attention(Layer):
    """Causal self-attention with rotary positions; the columns of qkv are ordered [head, q k v, head_dim]."""

    num_heads: int
    head_dim: int
    recompute: str
    qkv: Linear
    out: Linear

    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.recompute = config.num_heads, config.head_dim, config.recompute
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        self.qkv = linear(width, 3 * inner, ("embed", "heads"), bias=True)
        self.out = linear(inner, width, ("heads", "embed"), bias=True)

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        batch, seq, _ = x_bse.shape
        qkv = self.qkv(x_bse).reshape([batch, seq, self.num_heads, 3, self.head_dim])
        q, k, v = constrain(qkv, "batch", "block_seq", "heads", None, None).unbind(3)
        q, k = rotate(q, cos_sd, sin_sd), rotate(k, cos_sd, sin_sd)
        if cache is not None:
            mixed = cache.attend(q, k, v)
        else:
            mixed = attend_causally(self.recompute, q, k, v, ends, training=self.training)
        return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))


class FeedForward(Layer):
    """down(gelu(up(x)))."""

    up: Linear
    down: Linear

    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__()
        self.up = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"), bias=True)
        self.down = linear(config.ffn_size, config.hidden_size, ("ffn", "embed"), bias=True)

    def forward(self, x_bse: Any) -> Any:
        return self.down(F.gelu(constrain(self.up(x_bse), "batch", "block_seq", "ffn")))


class ParallelBlock(Block):
    """x + attention(norm(x)) + ffn(other norm(x))."""

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        normed = self.attention_norm(x_bse)  # type: ignore[misc]  # norms are before the parts
        mixed = run_part("full_attn", self.recompute, self.attention, normed, cos_sd, sin_sd, cache, ends)
        return constrain(x_bse + mixed + self.ffn(self.ffn_norm(x_bse)), "batch", "seq", "embed")  # type: ignore[misc]


class GPTNeoX(Llama):
    """As Llama."""

    family = GPT_NEOX
    is_order_free: property = Llama.is_order_free

    def make_block(self, config: GPTNeoXConfig, number: int) -> Layer:
        """A new block; number: how many come before it."""
        kind = ParallelBlock if config.is_parallel else Block
        return kind(config, Attention(config), FeedForward(config))


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
        *(
            WeightRule(f"{name}.{kind}", f"{o}.{kind}", SAME)
            for name, o in norms.items()
            for kind in ("weight", "bias")
        ),
    ]


def _is_spare(name: str, config: Any) -> bool:
    """Whether a weight is a mask that older versions stored."""
    return name.endswith((".attention.bias", ".attention.masked_bias"))


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    older = {
        "rope_theta": config.get("rotary_emb_base", 10000),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return read_rope({**older, **{key: value for key, value in config.items() if value is not None}})


def _write(config: GPTNeoXConfig) -> dict[str, Any]:
    keys = write_rope(config)
    return {
        "rotary_emb_base": keys.pop("rope_theta"),
        "rotary_pct": config.rotary_fraction,
        "rope_scaling": keys["rope_scaling"],
    }


PUBLISHED = PublishedFamily(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    keys={
        **{key: ours for key, ours in KEYS.items() if key not in ("num_key_value_heads", "head_dim", "rms_norm_eps")},
        "layer_norm_eps": "rms_norm_epsilon",
        "use_parallel_residual": "is_parallel",
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
    fixed={"hidden_act": ("gelu",), "attention_bias": (True,), "hidden_dropout": (0.0,)},
    spare=_is_spare,
    prefix="gpt_neox.",
    heads=("embed_out.",),
    read=_read,
    read_keys=("rotary_emb_base", "rotary_pct", "classifier_dropout", *ROPE_KEYS),
    write=_write,
)
