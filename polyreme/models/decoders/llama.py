"""LLaMA: a decoder with RMSNorm, rotary positions, grouped key-value heads and a SwiGLU feed-forward.

Source: arXiv:2302.13971; grouped heads arXiv:2305.13245; rotary positions arXiv:2104.09864. Same function as
transformers' LlamaForCausalLM, whose values are the fixtures of tests/models/decoders/test_llama.py. Logical dims of
parameters: embed, heads and kv_heads (each times head_dim: split by whole heads where mp divides their number), ffn,
vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from polyreme.autograd.recompute import run_part
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_divisor, nearest_multiples
from polyreme.models.families import LLAMA
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.cache import KVCache, LayerCache
from polyreme.models.parts.decoder import Decoder, attend_causally, check_dimensions
from polyreme.models.parts.rotary import (
    ROPE_KEYS,
    FrequencyScaling,
    LongRope,
    Table,
    read_rope,
    read_scaling,
    rotary_table,
    rotate,
    write_rope,
)
from polyreme.nn import Embedding, Layer, LayerList, Linear, RMSNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant, Normal
from polyreme.nn.layers.linear import map_each
from polyreme.nn.parameter import ParamAttr, Parameter
from polyreme.ops.layout import constrain

ACTIVATIONS: dict[str, Any] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate=True)}
"""What a gate may go through."""


class BlockTraits:
    """In what decoders of LLaMA's kind differ beside their dimensions; a family's config class says what it has.

    norm_class: of every norm. norm_places: whether attention and feed-forward take normed input ("before"), give normed
    output ("after") or both ("around"). activation: of the gate, one of ACTIVATIONS. whole_qk_norm: with qk_norm, the
    heads of queries and those of keys are normed together. embedding_scale: what embeddings are multiplied by,
    residual_scale what blocks add, logit_scale logits, score_scale scores of attention (head_dim ** -0.5 if None).
    score_cap, logit_cap: bounds of scores and of logits, as softcap of F.scaled_dot_product_attention; none if 0.
    rotary_fraction: of the dims of a head those that positions turn, the first ones; 0 for none. unturned_blocks: the
    numbers of those that know no positions. qkv_bound: what queries, keys and values are kept within, on both sides; 0
    for none. has_sinks: each head learns a score that takes part in the softmax and gives nothing. shared_norm:
    attention and feed-forward of a block that has them side by side read one norm. head_bias: the output projection
    adds a bias.
    """

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    norm_places: ClassVar[str] = "before"
    activation: ClassVar[str] = "silu"
    whole_qk_norm: ClassVar[bool] = False
    embedding_scale: ClassVar[float] = 1.0
    residual_scale: ClassVar[float] = 1.0
    logit_scale: ClassVar[float] = 1.0
    score_scale: ClassVar[float | None] = None
    score_cap: ClassVar[float] = 0.0
    logit_cap: ClassVar[float] = 0.0
    rotary_fraction: ClassVar[float] = 1.0
    unturned_blocks: ClassVar[Sequence[int]] = ()
    qkv_bound: ClassVar[float] = 0.0
    has_sinks: ClassVar[bool] = False
    shared_norm: ClassVar[bool] = False
    head_bias: ClassVar[bool] = False


@dataclass(frozen=True)
class LlamaConfig(BlockTraits):
    """Dimensions of a LLaMA.

    num_kv_heads: key-value heads, each shared by num_heads / num_kv_heads query heads; num_heads if 0. head_dim: width
    of a head, hidden_size / num_heads if 0. ffn_size: 8/3 of the width rounded up to 64 if 0 (published weights may
    round otherwise: the 7B's is 11008). seq_len: longest sequence, tokens. recompute: one of mesh.RECOMPUTE, or "" for
    what the plan in force says. qkv_bias, out_bias, mlp_bias: whether the projections into attention, the one out of it
    and those of the feed-forward add a bias. qk_norm: the queries and keys of each head are normed before they are
    turned. rope_scaling: one of models.parts.rotary.SCALINGS, or its fields with its `type`. rotary_fraction: as of
    BlockTraits. sliding_window: a token sees so
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
    rotary_fraction: float = 1.0  # type: ignore[misc]  # a trait that here is said of each model

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
        for name in ("full_blocks", "unturned_blocks"):
            self._check_blocks(name)
        if self.head_dim % 2 and not is_derived and self.rotary_fraction:
            raise ConfigError(
                f"LlamaConfig: head_dim {self.head_dim} is odd, and rotary positions turn pairs; make it "
                f"{nearest_multiples(self.head_dim, 2)}"
            )
        parts, reason = (2, " (rotary positions need an even head_dim)") if self.rotary_fraction else (1, "")
        if is_derived and self.hidden_size % (parts * self.num_heads):
            raise ConfigError(
                f"LlamaConfig: hidden_size {self.hidden_size} is not a multiple of {parts} * num_heads = "
                f"{parts * self.num_heads}{reason}; "
                f"make it {nearest_multiples(self.hidden_size, parts * self.num_heads)}"
            )
        if not 0 <= self.rotary_fraction <= 1:
            raise ConfigError(f"{type(self).__name__}: rotary_fraction {self.rotary_fraction}; give one in [0, 1]")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"LlamaConfig: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                f"make num_kv_heads {nearest_divisor(self.num_heads, self.num_kv_heads)}"
            )

    def _check_blocks(self, name: str) -> None:
        numbers = getattr(self, name)
        is_listed = isinstance(numbers, Sequence) and all(isinstance(number, Integral) for number in numbers)
        if not is_listed or any(not 0 <= number < self.num_layers for number in numbers):
            raise ConfigError(
                f"{type(self).__name__}: {name} {numbers!r}; give the numbers of blocks, each of 0 to "
                f"{self.num_layers - 1}"
            )
        if not isinstance(numbers, tuple):
            object.__setattr__(self, name, tuple(numbers))

    def window(self, number: int) -> int:
        """Tokens that a token sees in a block with `number` before it; 0 for all before it."""
        return 0 if number in self.full_blocks or self.sliding_window >= self.seq_len else self.sliding_window

    @property
    def rotary_width(self) -> int:
        """Dims of a head that positions turn, in pairs."""
        return max(1, int(self.head_dim * self.rotary_fraction) // 2) * 2 if self.rotary_fraction else 0

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
    q_norm: Layer | None
    k_norm: Layer | None
    sinks: Parameter | None

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
        self.q_norm = self.k_norm = None
        self.is_normed_whole = config.whole_qk_norm
        if config.qk_norm:
            widths = (q_width, kv_width) if self.is_normed_whole else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (make_norm(config, size) for size in widths)
        self.qkv_bound = config.qkv_bound
        self.sinks = None
        if config.has_sinks:
            self.sinks = self.create_parameter([self.num_heads], default_initializer=Constant(0.0), dims=("heads",))
        self.score_options = {"scale": config.score_scale, "softcap": config.score_cap}

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        batch, seq, _ = x_bse.shape
        q, k, v = map_each(x_bse, self.q, self.k, self.v)
        if self.qkv_bound:
            q, k, v = (x.clip(-self.qkv_bound, self.qkv_bound) for x in (q, k, v))
        if self.is_normed_whole:
            q, k = self._normed(q, k)
        q = q.reshape([batch, seq, self.num_heads, self.head_dim])
        k = k.reshape([batch, seq, self.num_kv_heads, self.head_dim])
        v = v.reshape([batch, seq, self.num_kv_heads, self.head_dim])
        if not self.is_normed_whole:
            q, k = self._normed(q, k)
        q = constrain(rotate(q, cos_sd, sin_sd), "batch", "block_seq", "heads", None)
        k = constrain(rotate(k, cos_sd, sin_sd), "batch", "block_seq", "kv_heads", None)
        v = constrain(v, "batch", "block_seq", "kv_heads", None)
        options = {"window": self.window, **self.score_options}
        if self.sinks is not None:
            options["sinks"] = self.sinks
        if cache is not None:
            mixed = cache.attend(q, k, v, **options)
            return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))
        options["training"] = self.training
        mixed = attend_causally(self.recompute, q, k, v, ends, **options)
        return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))

    def _normed(self, q: Any, k: Any) -> tuple[Any, Any]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


class FeedForward(Layer):
    """down(activation(gate(x)) * up(x)). Source: arXiv:2002.05202. bias: whether each of the three adds one."""

    activation: str
    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: LlamaConfig, bias: bool = False) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"), bias)
        self.up = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"), bias)
        self.down = linear(config.ffn_size, config.hidden_size, ("ffn", "embed"), bias)

    def forward(self, x_bse: Any) -> Any:
        gate, up = map_each(x_bse, self.gate, self.up)
        hidden = ACTIVATIONS[self.activation](gate) * up
        return self.down(constrain(hidden, "batch", "block_seq", "ffn"))


class Block(Layer):
    """x + attention(norm(x)), then x + ffn(norm(x)); an Attention and a FeedForward if not given. Where the norms are,
    and by what these are multiplied before they are added, config says as BlockTraits."""

    attention_norm: Layer | None
    attention: Layer | Attention
    attention_out_norm: Layer | None
    ffn_norm: Layer | None
    ffn: Layer | FeedForward
    ffn_out_norm: Layer | None
    residual_scale: float
    recompute: str

    def __init__(self, config: LlamaConfig, attention: Layer | None = None, ffn: Layer | None = None) -> None:
        super().__init__()
        width, has_input_norms = config.hidden_size, config.norm_places != "after"
        has_output_norms = config.norm_places != "before"
        self.attention_norm = make_norm(config, width) if has_input_norms else None
        self.attention = attention or Attention(config)
        self.attention_out_norm = make_norm(config, width) if has_output_norms else None
        self.ffn_norm = make_norm(config, width) if has_input_norms and not config.shared_norm else None
        self.ffn = ffn or FeedForward(config)
        self.ffn_out_norm = make_norm(config, width) if has_output_norms else None
        self.residual_scale = config.residual_scale
        self.recompute = config.recompute

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, cos_sd, sin_sd, cache, ends)

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        x_bse = self.attend(x_bse, cos_sd, sin_sd, cache, ends)
        fed = self.ffn(x_bse if self.ffn_norm is None else self.ffn_norm(x_bse))
        return constrain(self._joined(x_bse, fed, self.ffn_out_norm), "batch", "seq", "embed")

    def attend(self, x_bse: Any, cos_sd: Any, sin_sd: Any, cache: LayerCache | None = None, ends: Any = None) -> Any:
        """x + attention(norm(x))."""
        normed = x_bse if self.attention_norm is None else self.attention_norm(x_bse)
        apart = {} if ends is None else {"ends": ends}  # which not every attention takes
        mixed = run_part("full_attn", self.recompute, self.attention, normed, cos_sd, sin_sd, cache, **apart)
        return self._joined(x_bse, mixed, self.attention_out_norm)

    def _joined(self, x_bse: Any, part: Any, norm: Layer | None) -> Any:
        part = part if norm is None else norm(part)
        return x_bse + (part if self.residual_scale == 1 else part * self.residual_scale)


class Llama(Decoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token).

    labels [batch, seq]: the id that follows each token (already shifted by one); -100 leaves a token out of the mean.
    """

    tokens: Embedding
    blocks: LayerList
    norm: Layer
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
        self.norm = make_norm(config, width)
        self.logit_scale, self.logit_cap = config.logit_scale, config.logit_cap
        if not config.tie_embeddings:
            self.head = linear(width, config.vocab_size, ("embed", "vocab"))
        if config.head_bias:
            self.head_bias = self.create_parameter([config.vocab_size], is_bias=True, dims=("vocab",))
        scaling = config.rope_scaling
        # the most places of rows that turn by another table; 0 if all turn alike
        self.short_places = scaling.original_max_position_embeddings if isinstance(scaling, LongRope) else 0
        if config.rotary_width:
            self.register_tables("", self.rotary_table(config, config.seq_len))
        if config.unturned_blocks:  # which turn by nothing, so that all blocks are alike
            sizes = (config.seq_len, config.rotary_width)
            self.register_tables("still_", (np.ones(sizes, np.float32), np.zeros(sizes, np.float32)))
            for number in config.unturned_blocks:
                self.blocks[number].is_turned = False
        if 0 < self.short_places < config.seq_len:
            self.register_tables("short_", self.rotary_table(config, self.short_places))

    def register_tables(self, prefix: str, table: Table) -> None:
        """Keep cosines and sines beside the parameters, under these names with the prefix."""
        for name, array in zip(("cos", "sin"), table, strict=True):
            self.register_buffer(f"{prefix}{name}", to_tensor(array), persistable=False)

    def make_block(self, config: Any, number: int) -> Layer:
        """A new block; number: how many come before it."""
        return Block(config, Attention(config, config.window(number)), FeedForward(config, config.mlp_bias))

    def rotary_table(self, config: Any, seq_len: int) -> Table:
        """Cosines and sines by which queries and keys of rows of so many places are turned."""
        sizes = (seq_len, config.rotary_width, config.rope_theta)
        return config.rope_scaling.table(*sizes) if config.rope_scaling else rotary_table(*sizes)

    def tables_of(self, block: Layer, places: int) -> tuple[Any, Any]:
        """The tables by which a block turns in rows that have so many places; not called where nothing turns."""
        if not getattr(block, "is_turned", True):
            return self.still_cos, self.still_sin
        if 0 < self.short_places < self.config.seq_len and places <= self.short_places:
            return self.short_cos, self.short_sin
        return self.cos, self.sin

    def placed(self, x_bse: Any, cache: KVCache | None = None) -> Any:
        """Token embeddings, times the family's embedding_scale."""
        scale = self.config.embedding_scale
        return x_bse if scale == 1 else x_bse * scale

    def run_block(self, block: Layer, x_bse: Any, cache: LayerCache | None = None, *more: Any) -> Any:
        """A block's output, its rotary positions being those of x. more: what else the block takes."""
        seq = x_bse.shape[1]
        if cache is not None:
            places = cache.owner.positions(seq)
            turns = self._turns(block, cache.owner.places, lambda table: table[places])
            return block(x_bse, *turns, *more, cache=cache)
        if self.documents is not None:
            ends, places = self.documents
            return block(x_bse, *self._turns(block, seq, lambda table: table[places]), *more, ends=ends)
        with self.keeping_order(seq):
            return block(x_bse, *self._turns(block, seq, lambda table: self.places(table[:seq])), *more)

    def _turns(self, block: Layer, places: int, select: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Cosines and sines that a block takes: what `select` gives of its tables, None where nothing turns."""
        if not self.config.rotary_width:
            return None, None
        cos, sin = self.tables_of(block, places)
        return select(cos), select(sin)


def normal() -> ParamAttr:
    """How matrices begin."""
    return ParamAttr(initializer=Normal(0.0, 0.02))


def make_norm(config: Any, width: int) -> Layer:
    """A norm of the family's kind over the last dim, of this width."""
    return config.norm_class(width, epsilon=config.rms_norm_epsilon)


def linear(ins: int, outs: int, dims: tuple[str | None, str | None], bias: bool = False) -> Linear:
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


NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
"""What the norms of a block are called there, and here."""


def attention_rules(
    there: str = "model.layers.{n}", here: str = "blocks.{n}", block_norms: Mapping[str, str] = NORMS
) -> list[WeightRule]:
    """The weights of a block's attention and norms; block_norms: as NORMS."""
    norms = {**block_norms}
    norms |= {f"self_attn.{name}": f"attention.{name}" for name in ("q_norm", "k_norm")}
    rules = [WeightRule(f"{there}.{name}.weight", f"{here}.{ours}.weight", SAME) for name, ours in norms.items()]
    for name, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}.items():
        rules += linear_rules(f"{there}.self_attn.{name}", f"{here}.attention.{ours}")
    return rules


def ffn_rules(there: str = "model.layers.{n}.mlp", here: str = "blocks.{n}.ffn") -> list[WeightRule]:
    """The weights of a gated feed-forward."""
    return [rule for name in ("gate", "up", "down") for rule in linear_rules(f"{there}.{name}_proj", f"{here}.{name}")]


def block_rules(config: Any, block_norms: Mapping[str, str] = NORMS) -> list[WeightRule]:
    """All the weights; block_norms: as NORMS."""
    return [*outer_rules(), *attention_rules(block_norms=block_norms), *ffn_rules()]


def read_biases(config: Mapping[str, Any]) -> dict[str, Any]:
    """qkv_bias, out_bias, mlp_bias and rotary positions."""
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))} | read_rope(config)


def write_biases(config: LlamaConfig) -> dict[str, Any]:
    """The keys that these fields become."""
    return {"attention_bias": config.out_bias, "mlp_bias": config.mlp_bias} | write_rope(config)


BIAS_KEYS = ("attention_bias", "mlp_bias", *ROPE_KEYS)
"""What config.json says of biases and of rotary positions."""


PUBLISHED = PublishedFamily(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=KEYS,
    weights=block_rules,
    defaults={**DEFAULTS, "max_position_embeddings": 2048},
    fixed=FIXED,
    prefix="model.",
    read=read_biases,
    read_keys=BIAS_KEYS,
    write=write_biases,
)
