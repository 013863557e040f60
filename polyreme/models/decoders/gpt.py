"""GPT: a decoder of pre-norm blocks with learned positions and a GELU feed-forward.

Source: Radford et al., 2019 (GPT-2); same function as transformers' GPT2LMHeadModel, whose values are the fixtures
of tests/models/decoders/test_gpt.py. Logical dims of parameters: embed, heads (num_heads * head_dim, times 3 in qkv:
split by whole heads where mp divides num_heads), ffn, vocab; the positions' first dim has no name: mp leaves it whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.autograd.recompute import run_part
from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models import families
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule, permuted
from polyreme.models.parts.cache import KVCache, LayerCache
from polyreme.models.parts.decoder import Decoder, attend_causally, check_dimensions
from polyreme.nn import Dropout, Embedding, Layer, LayerList, LayerNorm, Linear
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class GPTConfig:
    """Dimensions of a GPT.

    seq_len: longest sequence, tokens. ffn_size: width of the feed-forward, 4 * hidden_size if 0. dropout: probability,
    used on embeddings, attention weights and block outputs while training. recompute: one of mesh.RECOMPUTE, or "" for
    what the plan in force says.
    """

    vocab_size: int = 50304
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    seq_len: int = 1024
    ffn_size: int = 0
    dropout: float = 0.0
    tie_embeddings: bool = True
    layer_norm_epsilon: float = 1e-5
    recompute: str = ""

    def __post_init__(self) -> None:
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", families.GPT.ffn_size(self.hidden_size))
        check_dimensions(self)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"GPTConfig: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                f"make it {nearest_multiples(self.hidden_size, self.num_heads)}"
            )

    @classmethod
    def nano(cls, **changes: Any) -> GPTConfig:
        """A GPT that trains in seconds on a CPU."""
        return cls(**{"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_len": 16, **changes})


class Attention(Layer):
    """Causal self-attention; the columns of qkv are ordered [head, q k v, head_dim], so that mp splits whole heads."""

    num_heads: int
    head_dim: int
    dropout: float
    recompute: str
    qkv: Linear
    out: Linear

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, std = config.hidden_size, _output_std(config)
        self.num_heads = config.num_heads
        self.head_dim = width // config.num_heads
        self.dropout = config.dropout
        self.recompute = config.recompute
        self.qkv = Linear(width, 3 * width, _normal(0.02), dims=("embed", "heads"))
        self.out = Linear(width, width, _normal(std), dims=("heads", "embed"))

    def forward(self, x_bse: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        batch, seq, width = x_bse.shape
        qkv = self.qkv(x_bse).reshape([batch, seq, self.num_heads, 3, self.head_dim])
        qkv = constrain(qkv, "batch", "block_seq", "heads", None, None)
        q_bshd, k_bshd, v_bshd = qkv.unbind(3)
        if cache is not None:
            return self.out(cache.attend(q_bshd, k_bshd, v_bshd).reshape([batch, seq, width]))
        options = {"dropout": self.dropout, "training": self.training}
        mixed = attend_causally(self.recompute, q_bshd, k_bshd, v_bshd, ends, **options)
        return self.out(mixed.reshape([batch, seq, width]))


class FeedForward(Layer):
    """GELU (tanh form) between two Linears."""

    up: Linear
    down: Linear

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.ffn_size, _normal(0.02), dims=("embed", "ffn"))
        self.down = Linear(config.ffn_size, config.hidden_size, _normal(_output_std(config)), dims=("ffn", "embed"))

    def forward(self, x_bse: Any) -> Any:
        return self.down(F.gelu(constrain(self.up(x_bse), "batch", "block_seq", "ffn"), approximate=True))


class Block(Layer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    attention_norm: LayerNorm
    attention: Attention
    ffn_norm: LayerNorm
    ffn: FeedForward
    drop: Dropout
    recompute: str

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn = FeedForward(config)
        self.drop = Dropout(config.dropout)
        self.recompute = config.recompute

    def forward(self, x_bse: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, cache, ends)

    def _compute(self, x_bse: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        mixed = run_part("full_attn", self.recompute, self.attention, self.attention_norm(x_bse), cache, ends)
        x_bse = x_bse + self.drop(mixed)
        x_bse = x_bse + self.drop(self.ffn(self.ffn_norm(x_bse)))
        return constrain(x_bse, "batch", "seq", "embed")


class GPT(Decoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token).

    labels [batch, seq]: the id that follows each token (already shifted by one); -100 leaves a token out of the mean.

    >>> from polyreme.eager.tensor import to_tensor
    >>> GPT(GPTConfig.nano())(to_tensor([[1, 2, 3]])).shape
    paddle.Size([1, 3, 128])
    """

    tokens: Embedding
    positions: Embedding
    drop: Dropout
    blocks: LayerList
    norm: LayerNorm
    head: Linear

    family = families.GPT

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.tokens = Embedding(config.vocab_size, width, weight_attr=_normal(0.02), dims=("vocab", "embed"))
        self.positions = Embedding(config.seq_len, width, weight_attr=_normal(0.02), dims=(None, "embed"))
        self.drop = Dropout(config.dropout)
        self.blocks = LayerList([Block(config) for _ in range(config.num_layers)])
        self.norm = _norm(config)
        if not config.tie_embeddings:
            self.head = Linear(width, config.vocab_size, _normal(0.02), bias_attr=False, dims=("embed", "vocab"))

    def placed(self, x_bse: Any, cache: KVCache | None = None) -> Any:
        """Token embeddings plus those of their positions, with dropout."""
        if cache is not None:
            return x_bse + self.positions(cache.positions(x_bse.shape[1]))
        if self.documents is not None:
            return self.drop(x_bse + self.positions(self.documents.places))
        return self.drop(x_bse + self.positions(self.places(arange(x_bse.shape[1]))))

    @property
    def is_order_free(self) -> bool:  # type: ignore[override]
        """Without dropout, whose numbers are those of places in the rows."""
        return self.config.dropout == 0

    def run_block(self, block: Layer, x_bse: Any, cache: LayerCache | None = None) -> Any:
        """A block's output."""
        if cache is not None:
            return block(x_bse, cache)
        if self.documents is not None:
            return block(x_bse, ends=self.documents.ends)
        with self.keeping_order(x_bse.shape[1]):
            return block(x_bse)

    def embedding_layers(self) -> dict[str, Layer]:
        """Tokens, positions and dropout."""
        return {"tokens": self.tokens, "positions": self.positions, "drop": self.drop}


def _normal(std: float) -> ParamAttr:
    return ParamAttr(initializer=Normal(0.0, std))


def _output_std(config: GPTConfig) -> float:
    # residual branches add up: their output weights start smaller by the square root of how many there are
    return 0.02 / math.sqrt(2 * config.num_layers)


def _norm(config: GPTConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)


# as published


def _columns_here(array: np.ndarray, config: GPTConfig) -> np.ndarray:
    """Columns [q k v, head, head_dim], as published, in the order that Attention has them."""
    split = array.reshape(*array.shape[:-1], 3, config.num_heads, -1)
    return split.swapaxes(-3, -2).reshape(array.shape)


def _columns_there(array: np.ndarray, config: GPTConfig) -> np.ndarray:
    split = array.reshape(*array.shape[:-1], config.num_heads, 3, -1)
    return split.swapaxes(-3, -2).reshape(array.shape)


_QKV = permuted(_columns_there, _columns_here)


def _rules(config: GPTConfig) -> list[WeightRule]:
    # its linear maps lie [in, out], as ours
    rules = [
        WeightRule("transformer.wte.weight", "tokens.weight", SAME),
        WeightRule("transformer.wpe.weight", "positions.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
    ]
    names = {"ln_1": "attention_norm", "attn.c_proj": "attention.out", "ln_2": "ffn_norm"}
    names |= {"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}
    for kind in ("weight", "bias"):
        rules += [
            WeightRule(f"transformer.h.{{n}}.{name}.{kind}", f"blocks.{{n}}.{o}.{kind}", SAME)
            for name, o in names.items()
        ]
        rules.append(WeightRule(f"transformer.h.{{n}}.attn.c_attn.{kind}", f"blocks.{{n}}.attention.qkv.{kind}", _QKV))
        rules.append(WeightRule(f"transformer.ln_f.{kind}", f"norm.{kind}", SAME))
    return rules


PUBLISHED = PublishedFamily(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    token_head="classifier",
    keys={
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_positions": "seq_len",
        "n_inner": "ffn_size",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_embeddings",
    },
    weights=_rules,
    defaults={"tie_word_embeddings": True, "activation_function": "gelu_new"},
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    prefix="transformer.",
    read_keys=("n_ctx",),
)
