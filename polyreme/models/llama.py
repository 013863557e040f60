"""LLaMA: a decoder with RMSNorm, rotary positions, grouped key-value heads and a SwiGLU feed-forward.

Source: arXiv:2302.13971; grouped heads arXiv:2305.13245; rotary positions arXiv:2104.09864 (the two halves
of a head are rotated against each other). Same function as transformers' LlamaForCausalLM, whose values are the
fixtures of tests/models/test_llama.py. Logical dims of parameters: embed, heads and kv_heads (each times head_dim:
split by whole heads where mp divides their number), ffn, vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.autograd.recompute import run_part
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_divisor, nearest_multiples
from polyreme.models.decoder import Decoder, check_dimensions
from polyreme.models.families import LLAMA
from polyreme.nn import Embedding, Layer, LayerList, Linear, RMSNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.layout import constrain
from polyreme.ops.manipulation import concat


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions of a LLaMA.

    num_kv_heads: key-value heads, each shared by num_heads / num_kv_heads query heads; num_heads if 0. head_dim: width
    of a head, hidden_size / num_heads if 0. ffn_size: 8/3 of the width rounded up to 64 if 0 (published weights may
    round otherwise: the 7B's is 11008). seq_len: longest sequence, tokens. recompute: one of mesh.RECOMPUTE, or "" for
    what the plan in force says.
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

    def __post_init__(self) -> None:
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", LLAMA.ffn_size(self.hidden_size))
        is_derived = not self.head_dim
        if is_derived and self.num_heads > 0:
            object.__setattr__(self, "head_dim", max(1, self.hidden_size // self.num_heads))
        check_dimensions(self)
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

    @classmethod
    def nano(cls, **changes: Any) -> LlamaConfig:
        """A LLaMA that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 16}
        return cls(**{**base, **changes})


class Attention(Layer):
    """Causal self-attention with rotary positions and grouped key-value heads.

    qk_norm: the queries and keys of each head are normed before they are turned.
    """

    def __init__(self, config: LlamaConfig, qk_norm: bool = False) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.recompute = config.recompute
        q_width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q = linear(width, q_width, ("embed", "heads"))
        self.k = linear(width, kv_width, ("embed", "kv_heads"))
        self.v = linear(width, kv_width, ("embed", "kv_heads"))
        self.out = linear(q_width, width, ("heads", "embed"))
        self.q_norm = RMSNorm(self.head_dim, epsilon=config.rms_norm_epsilon) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, epsilon=config.rms_norm_epsilon) if qk_norm else None

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any) -> Any:
        batch, seq, _ = x_bse.shape
        q = self.q(x_bse).reshape([batch, seq, self.num_heads, self.head_dim])
        k = self.k(x_bse).reshape([batch, seq, self.num_kv_heads, self.head_dim])
        v = self.v(x_bse).reshape([batch, seq, self.num_kv_heads, self.head_dim])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = constrain(rotate(q, cos_sd, sin_sd), "batch", "block_seq", "heads", None)
        k = constrain(rotate(k, cos_sd, sin_sd), "batch", "block_seq", "kv_heads", None)
        v = constrain(v, "batch", "block_seq", "kv_heads", None)
        options = {"is_causal": True, "training": self.training}
        mixed = run_part("core_attn", self.recompute, F.scaled_dot_product_attention, q, k, v, **options)
        return self.out(mixed.reshape([batch, seq, self.num_heads * self.head_dim]))


class FeedForward(Layer):
    """down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"))
        self.up = linear(config.hidden_size, config.ffn_size, ("embed", "ffn"))
        self.down = linear(config.ffn_size, config.hidden_size, ("ffn", "embed"))

    def forward(self, x_bse: Any) -> Any:
        hidden = F.silu(self.gate(x_bse)) * self.up(x_bse)
        return self.down(constrain(hidden, "batch", "block_seq", "ffn"))


class Block(Layer):
    """x + attention(norm(x)), then x + ffn(norm(x)); an Attention and a FeedForward if not given."""

    def __init__(self, config: LlamaConfig, attention: Layer | None = None, ffn: Layer | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_epsilon)
        self.attention = attention or Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_epsilon)
        self.ffn = ffn or FeedForward(config)
        self.recompute = config.recompute

    def forward(self, x_bse: Any, cos_sd: Any, sin_sd: Any) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, cos_sd, sin_sd)

    def _compute(self, x_bse: Any, cos_sd: Any, sin_sd: Any) -> Any:
        x_bse = self.attend(x_bse, cos_sd, sin_sd)
        x_bse = x_bse + self.ffn(self.ffn_norm(x_bse))
        return constrain(x_bse, "batch", "seq", "embed")

    def attend(self, x_bse: Any, cos_sd: Any, sin_sd: Any) -> Any:
        """x + attention(norm(x))."""
        normed = self.attention_norm(x_bse)
        return x_bse + run_part("full_attn", self.recompute, self.attention, normed, cos_sd, sin_sd)


class Llama(Decoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token).

    labels [batch, seq]: the id that follows each token (already shifted by one); -100 leaves a token out of the mean.
    """

    family = LLAMA
    is_order_free = True

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
        return Block(config)

    def rotary_table(self, config: Any) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines by which queries and keys are turned, float32 [seq, dims that are turned]."""
        return rotary_table(config.seq_len, config.head_dim, config.rope_theta)

    def run_block(self, block: Layer, x_bse: Any) -> Any:
        """A block's output, its rotary positions being those of x."""
        seq = x_bse.shape[1]
        with self.keeping_order(seq):
            return block(x_bse, self.places(self.cos[:seq]), self.places(self.sin[:seq]))


def rotary_table(
    seq_len: int, head_dim: int, theta: float, slowed: np.ndarray | float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of position * theta^(-2 i / head_dim) * slowed[i], float32 [seq, head_dim], the half repeated."""
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim) * slowed
    angle = np.arange(seq_len)[:, None] * np.concatenate([frequency, frequency])[None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x_bshd: Any, cos_sd: Any, sin_sd: Any) -> Any:
    """x with each pair (i, i + head_dim / 2) rotated by its position's angle."""
    half = x_bshd.shape[-1] // 2
    turned = concat([-x_bshd[..., half:], x_bshd[..., :half]], axis=-1)
    cos, sin = cos_sd[:, None].astype(x_bshd.dtype), sin_sd[:, None].astype(x_bshd.dtype)
    return x_bshd * cos + turned * sin


def normal() -> ParamAttr:
    """How matrices begin."""
    return ParamAttr(initializer=Normal(0.0, 0.02))


def linear(ins: int, outs: int, dims: tuple[str, str]) -> Linear:
    """A linear map without a bias."""
    return Linear(ins, outs, normal(), bias_attr=False, dims=dims)
