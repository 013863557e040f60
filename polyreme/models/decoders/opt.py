"""OPT: a decoder with learned positions, whose feed-forward bends by ReLU; one size norms sums and has a narrow table.

Source: arXiv:2205.01068. Same function as transformers' OPTForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyreme.autograd.recompute import run_part
from polyreme.models.decoders.gpt_neox import GPTNeoXConfig, make_feed_forward
from polyreme.models.decoders.llama import Attention, Block, Llama, linear, linear_rules, normal
from polyreme.models.families import OPT as FAMILY
from polyreme.models.families import SPARE_POSITIONS
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.cache import KVCache, LayerCache
from polyreme.models.parts.encoder import same_rules
from polyreme.nn import Embedding, Layer, Linear
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class OPTConfig(GPTNeoXConfig):
    """Dimensions of an OPT: a GPT-NeoX's. embedding_size: width of the table of tokens, hidden_size if 0. norms_sums:
    whether x + part(x) is normed, and not what the part takes; there is then no norm after the last block."""

    vocab_size: int = 50272
    seq_len: int = 2048
    tie_embeddings: bool = True
    rotary_fraction: float = 0.0
    is_parallel: bool = False
    activation: str = "relu"
    embedding_size: int = field(default=0, metadata={"least": 0})
    norms_sums: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)


class SumNormBlock(Block):
    """norm(x + attention(x)), then norm(x + ffn(x))."""

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        mixed = run_part("full_attn", self.recompute, self.attention, x_bse, cos_sd, sin_sd, cache, ends)
        x_bse = self.attention_norm(x_bse + mixed)  # type: ignore[misc]  # a Block of these has both norms
        return constrain(self.ffn_norm(x_bse + self.ffn(x_bse)), "batch", "seq", "embed")  # type: ignore[misc]


class OPT(Llama, keeps_order_free=True):
    """As Llama."""

    config: OPTConfig

    positions: Embedding
    embedding_in: Linear | None
    embedding_out: Linear | None

    family = FAMILY

    def __init__(self, config: OPTConfig) -> None:
        super().__init__(config)
        width, narrow = config.hidden_size, config.embedding_size
        self.positions = Embedding(config.seq_len + SPARE_POSITIONS, width, weight_attr=normal(), dims=(None, "embed"))
        self.embedding_in = self.embedding_out = None
        if narrow != width:
            self.tokens = Embedding(config.vocab_size, narrow, weight_attr=normal(), dims=("vocab", "embed"))
            self.embedding_in = linear(narrow, width, (None, "embed"))
            self.embedding_out = linear(width, narrow, ("embed", None))
            if not config.tie_embeddings:
                self.head = linear(narrow, config.vocab_size, ("embed", "vocab"))
        if config.norms_sums:
            del self.norm

    def make_block(self, config: OPTConfig, number: int) -> Layer:
        """A new block; number: how many come before it."""
        kind = SumNormBlock if config.norms_sums else Block
        return kind(config, Attention(config), make_feed_forward(config))

    def placed(self, x_bse: Any, cache: KVCache | None = None) -> Any:
        """Token embeddings plus those of their positions."""
        if cache is not None:
            places = cache.positions(x_bse.shape[1])
        elif self.documents is not None:
            places = self.documents.places
        else:
            places = self.places(arange(x_bse.shape[1]))
        x_bse = x_bse if self.embedding_in is None else self.embedding_in(x_bse)
        return x_bse + self.positions(places + SPARE_POSITIONS)

    def embedding_layers(self) -> dict[str, Layer]:
        """The Layers that embed calls."""
        layers: dict[str, Layer] = {"tokens": self.tokens, "positions": self.positions}
        return layers if self.embedding_in is None else layers | {"embedding_in": self.embedding_in}

    def output_layers(self) -> dict[str, Layer]:
        """The Layers that normed, logits and the loss call, those of embed apart."""
        layers: dict[str, Layer] = {} if self.config.norms_sums else {"norm": self.norm}
        layers |= {} if self.config.tie_embeddings else {"head": self.head}
        return layers if self.embedding_out is None else layers | {"embedding_out": self.embedding_out}

    def normed(self, x_bse: Any) -> Any:
        """What logits and the loss are computed from, given the last block's output."""
        x_bse = x_bse if self.config.norms_sums else self.norm(x_bse)
        return x_bse if self.embedding_out is None else self.embedding_out(x_bse)


def _rules(config: OPTConfig) -> list[WeightRule]:
    decoder, here = "model.decoder", "blocks.{n}"
    there = f"{decoder}.layers.{{n}}"
    maps = {f"self_attn.{name}_proj": f"attention.{name}" for name in ("q", "k", "v", "out")}
    maps |= {"fc1": "ffn.up", "fc2": "ffn.down"}
    return [
        WeightRule(f"{decoder}.embed_tokens.weight", "tokens.weight", SAME),
        WeightRule(f"{decoder}.embed_positions.weight", "positions.weight", SAME),
        WeightRule(f"{decoder}.project_in.weight", "embedding_in.weight"),
        WeightRule(f"{decoder}.project_out.weight", "embedding_out.weight"),
        WeightRule("lm_head.weight", "head.weight"),
        *same_rules(f"{decoder}.final_layer_norm", "norm"),
        *same_rules(f"{there}.self_attn_layer_norm", f"{here}.attention_norm"),
        *same_rules(f"{there}.final_layer_norm", f"{here}.ffn_norm"),
        *(rule for name, ours in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{ours}")),
    ]


def _rename(name: str) -> str:
    return f"model.{name}" if name.startswith("decoder.") else name


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"norms_sums": not config.get("do_layer_norm_before", True)}


PUBLISHED = PublishedFamily(
    architecture="OPTForCausalLM",
    model_type="opt",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "ffn_dim": "ffn_size",
        "max_position_embeddings": "seq_len",
        "word_embed_proj_dim": "embedding_size",
        "activation_function": "activation",
        "tie_word_embeddings": "tie_embeddings",
    },
    weights=_rules,
    defaults={"tie_word_embeddings": True, "activation_function": "relu", "max_position_embeddings": 2048},
    fixed={
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
    },
    rename=_rename,
    read=_read,
    # of training
    read_keys=("do_layer_norm_before", "dropout", "activation_dropout", "layerdrop", "init_std", "output_projection"),
    write=lambda config: {"do_layer_norm_before": not config.norms_sums},
)
