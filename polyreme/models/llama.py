"""LLaMA: a decoder with RMSNorm, rotary positions, grouped key-value heads and a SwiGLU feed-forward.

Source: arXiv:2302.13971; grouped heads arXiv:2305.13245; rotary positions arXiv:2104.09864. Same function as
transformers' LlamaForCausalLM, whose values are the fixtures of tests/models/test_llama.py. Logical dims of parameters:
embed, heads and kv_heads (each times head_dim: split by whole heads where mp divides their number), ffn, vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyreme.autograd.recompute import run_part
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_divisor, nearest_multiples
from polyreme.models.cache import LayerCache
from polyreme.models.decoder import Decoder, attend_causally, check_dimensions
from polyreme.models.families import LLAMA
from polyreme.models.published import SAME, PublishedFamily, WeightRule
from polyreme.models.rotary import (
    ROPE_KEYS,
    FrequencyScaling,
    Table,
    read_rope,
    read_scaling,
    rotary_table,
    rotate,
    write_rope,
)
from polyreme.nn import Embedding, Layer, LayerList, Linear, RMSNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.layers.linear import map_each
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions of a LLaMA.

    num_kv_heads: key-value heads, each shared by num_heads / num_kv_heads query heads; num_heads if 0. head_dim: width
    of a head, hidden_size / num_heads if 0. ffn_size: 8/3 of the width rounded up to 64 if 0 (published weights may
    round otherwise: the 7B's is 11008). seq_len: longest sequence, tokens. recompute: one of mesh.RECOMPUTE, or "" for
    what the plan in force says. qkv_bias, out_bias, mlp_bias: whether the projections into attention, the one out of it
    and those of the feed-forward add a bias. qk_norm: the queries and keys of each head are normed before they are
    turned. rope_scaling: one of models.rotary.SCALINGS, or its fields with its `type`. sliding_window: a token sees so
    many tokens, itself the last of them, in all blocks but those of these numbers, full_blocks; all before it if 0.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 0
    ffn_size: int = 0
    seq_len: int = 4096
    rope_theta: float = 10000.0
    rms_norm_epsilon: float = 1e-6
    tie_embeddings: bool = False
    recompute: str = ""
    head_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: FrequencyScaling | Mapping[str, Any] | None = None
    sliding_window: int = field(default=0, metadata={"least": 0})
    full_blocks: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope_scaling", read_scaling(self.rope_scaling))
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", LLAMA.ffn_size(self.hidden_size))
        is_derived = not self.head_dim
        if is_derived and self.num_heads > 0:
            object.__setattr__(self, "head_dim", max(1, self.hidden_size // self.num_heads))
        check_dimensions(self)
        self._check_full_blocks()
        if self.head_dim % 2 and not is_derived:
            raise ConfigError(
                f"LlamaConfig: head_dim {self.head_dim} is odd, and rotary positions turn pairs; make it "
                f"{nearest_multiples(self.head_dim, 2)}"
            )
        if is_derived and self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"LlamaConfig: hidden_size {self.hidden_size} is not a multiple of 2 * num_heads = "
                f"{2 * self.num_heads} (rotary positions need an even head_dim); "
                f"make it {nearest_multiples(self.hidden_size, 2 * self.num_heads)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"LlamaConfig: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                f"make num_kv_heads {nearest_divisor(self.num_heads, self.num_kv_heads)}"
            )

    def _check_full_blocks(self) -> None:
        numbers = self.full_blocks
        if not isinstance(numbers, Sequence) or not {*numbers} <= {*range(self.num_layers)}:
            raise ConfigError(
                f"{type(self).__name__}: full_blocks {numbers!r}; give the numbers of blocks without a window, each of "
                f"0 to {self.num_layers - 1}"
            )
        object.__setattr__(self, "full_blocks", tuple(numbers))

    def window(self, number: int) -> int:
        """Tokens that a token sees in a block with `number` before it; 0 for all before it."""
        return 0 if number in self.full_blocks or self.sliding_window >= self.seq_len else self.sliding_window

    @classmethod
    def nano(cls, **changes: Any) -> LlamaConfig:
        """A LLaMA that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 16}
        return cls(**{**base, **changes})


class Attention(Layer):
    """Causal self-attention with rotary positions and grouped key-value heads; window: as of LlamaConfig.window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    recompute: str
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(self, config: LlamaConfig, window: int = 0) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.qkv_bias
        self.window = window
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.recompute = config.recompute
        q_width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q = linear(width, q_width, ("embed", "heads"), bias)
        self.k = linear(width, kv_width, ("embed", "kv_heads"), bias)
        self.v = linear(width, kv_width, ("embed", "kv_heads"), bias)
        self.out = linear(q_width, width, ("heads", "embed"), config.out_bias)
        self.q_norm = RMSNorm(self.head_dim, epsilon=config.rms_norm_epsilon) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, epsilon=config.rms_norm_epsilon) if config.qk_norm else None

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        batch, seq, _ = x_bse.shape
        q, k, v = map_each(x_bse, self.q, self.k, self.v)
        q = q.reshape([batch, seq, self.num_heads, self.head_dim])
        k = k.reshape([batch, seq, self.num_kv_heads, self.head_dim])
        v = v.reshape([batch, seq, self.num_kv_heads, self.head_dim])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = constrain(rotate(q, cos_sd, sin_sd), "batch", "block_seq", "heads", None)
        k = constrain(rotate(k, cos_sd, sin_sd), "batch", "block_seq", "kv_heads", None)
        v = constrain(v, "batch", "block_seq", "kv_heads", None)
        if cache is not None:
            mixed = cache.attend(q, k, v, window=self.window)
            return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))
        mixed = attend_causally(self.recompute, q, k, v, ends, window=self.window, training=self.training)
        return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))


class FeedForward(Layer):
    """down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202. bias: whether each of the three adds one."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: LlamaConfig, bias: bool = False) -> None:
        super().__init__()
        self.gate = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"), bias)
        self.up = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"), bias)
        self.down = linear(config.ffn_size, config.hidden_size, ("ffn", "embed"), bias)

    def forward(self, x_bse: Any) -> Any:
        gate, up = map_each(x_bse, self.gate, self.up)
        hidden = F.silu(gate) * up
        return self.down(constrain(hidden, "batch", "block_seq", "ffn"))


class Block(Layer):
    """x + attention(norm(x)), then x + ffn(norm(x)); an Attention and a FeedForward if not given."""

    attention_norm: RMSNorm
    attention: Layer | Attention
    ffn_norm: RMSNorm
    ffn: Layer | FeedForward
    recompute: str

    def __init__(self, config: LlamaConfig, attention: Layer | None = None, ffn: Layer | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_epsilon)
        self.attention = attention or Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_epsilon)
        self.ffn = ffn or FeedForward(config)
        self.recompute = config.recompute

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, cos_sd, sin_sd, cache, ends)

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        x_bse = self.attend(x_bse, cos_sd, sin_sd, cache, ends)
        x_bse = x_bse + self.ffn(self.ffn_norm(x_bse))
        return constrain(x_bse, "batch", "seq", "embed")

    def attend(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        """x + attention(norm(x))."""
        normed = self.attention_norm(x_bse)
        apart = {} if ends is None else {"ends": ends}  # which not every attention takes
        return x_bse + run_part("full_attn", self.recompute, self.attention, normed, cos_sd, sin_sd, cache, **apart)


class Llama(Decoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token).

    labels [batch, seq]: the id that follows each token (already shifted by one); -100 leaves a token out of the mean.
    """

    tokens: Embedding
    blocks: LayerList
    norm: RMSNorm
    head: Linear

    family = LLAMA

    @property
    def is_order_free(self) -> bool:  # type: ignore[override]
        """Without windows, which tell places apart."""
        return not self.config.sliding_window

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.tokens = Embedding(config.vocab_size, width, weight_attr=normal(), dims=("vocab", "embed"))
        self.blocks = LayerList([self.make_block(config, number) for number in range(config.num_layers)])
        self.norm = RMSNorm(width, epsilon=config.rms_norm_epsilon)
        if not config.tie_embeddings:
            self.head = linear(width, config.vocab_size, ("embed", "vocab"))
        cos, sin = self.rotary_table(config)
        self.register_buffer("cos", to_tensor(cos), persistable=False)
        self.register_buffer("sin", to_tensor(sin), persistable=False)

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return Block(config, Attention(config, config.window(number)), FeedForward(config, config.mlp_bias))

    def rotary_table(self, config: Any) -> Table:
        """Cosines and sines by which queries and keys are turned."""
        sizes = (config.seq_len, config.head_dim, config.rope_theta)
        return config.rope_scaling.table(*sizes) if config.rope_scaling else rotary_table(*sizes)

    def run_block(self, block: Layer, x_bse: Any, cache: LayerCache | None = None, *more: Any) -> Any:
        """A block's output, its rotary positions being those of x. more: what else the block takes."""
        seq = x_bse.shape[1]
        if cache is not None:
            places = cache.owner.positions(seq)
            return block(x_bse, self.cos[places], self.sin[places], *more, cache=cache)
        if self.documents is not None:
            ends, places = self.documents
            return block(x_bse, self.cos[places], self.sin[places], *more, ends=ends)
        with self.keeping_order(seq):
            return block(x_bse, self.places(self.cos[:seq]), self.places(self.sin[:seq]), *more)


def normal() -> ParamAttr:
    """How matrices begin."""
    return ParamAttr(initializer=Normal(0.0, 0.02))


def linear(ins: int, outs: int, dims: tuple[str, str], bias: bool = False) -> Linear:
    """A linear map."""
    return Linear(ins, outs, normal(), bias_attr=None if bias else False, dims=dims)


# as published

KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_size",
    "max_position_embeddings": "seq_len",
    "rms_norm_eps": "rms_norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
"""What config.json says of a LLaMA and its kin."""

DEFAULTS = {"tie_word_embeddings": False, "hidden_act": "silu"}
FIXED = {"hidden_act": ("silu", "swish")}


def outer_rules() -> tuple[WeightRule, ...]:
    """The weights outside of the blocks."""
    return (
        WeightRule("model.embed_tokens.weight", "tokens.weight", SAME),
        WeightRule("model.norm.weight", "norm.weight", SAME),
        WeightRule("lm_head.weight", "head.weight"),
    )


def linear_rules(theirs: str, ours: str) -> tuple[WeightRule, ...]:
    """The weight and the bias of a linear map."""
    return WeightRule(f"{theirs}.weight", f"{ours}.weight"), WeightRule(f"{theirs}.bias", f"{ours}.bias", SAME)


def attention_rules(there: str = "model.layers.{n}", here: str = "blocks.{n}") -> list[WeightRule]:
    """The weights of a block's attention and norms."""
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    norms |= {f"self_attn.{name}": f"attention.{name}" for name in ("q_norm", "k_norm")}
    rules = [WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in norms.items()]
    for name, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}.items():
        rules += linear_rules(f"{there}.self_attn.{name}", f"{here}.attention.{ours}")
    return rules


def ffn_rules(there: str = "model.layers.{n}.mlp", here: str = "blocks.{n}.ffn") -> list[WeightRule]:
    """The weights of a gated feed-forward."""
    return [rule for name in ("gate", "up", "down") for rule in linear_rules(f"{there}.{name}_proj", f"{here}.{name}")]


def block_rules(config: Any) -> list[WeightRule]:
    """All the weights."""
    return [*outer_rules(), *attention_rules(), *ffn_rules()]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))} | read_rope(config)


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": config.out_bias, "mlp_bias": config.mlp_bias} | write_rope(config)


PUBLISHED = PublishedFamily(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=KEYS,
    weights=block_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 2048},
    fixed=FIXED,
    prefix="model.",
    read=_read,
    read_keys=("attention_bias", "mlp_bias", *ROPE_KEYS),
    write=_write,
)
