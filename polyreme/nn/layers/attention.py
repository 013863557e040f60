"""Multi-head attention.

Shapes: b batch, s sequence, e embed, h heads, d head_dim. Source: arXiv:1706.03762, section 3.2.2.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import ParamAttrLike
from polyreme.ops.creation import zeros
from polyreme.ops.manipulation import concat, reshape, transpose, unsqueeze

# what an additive mask puts on a position left out: large, but finite, so that a row of them is uniform, not NaN
_MASKED = 1e9


class Cache(NamedTuple):
    """Keys and values of the positions so far, [batch, heads, seq, head_dim]; attention adds the new ones."""

    k: Any
    v: Any


class StaticCache(NamedTuple):
    """Keys and values computed once, [batch, heads, seq, head_dim]; attention uses them as they are."""

    k: Any
    v: Any


class MultiHeadAttention(Layer):
    """softmax(Q K^T / sqrt(head_dim) + mask) V in num_heads heads: [batch, seq, embed_dim] -> the same.

    kdim, vdim: widths of keys and values, embed_dim if None. attn_mask: broadcasts to [batch, heads, query, key];
    True or 1 keeps a position, a floating mask is added. need_weights: the attention weights are returned too.

    >>> list(MultiHeadAttention(8, 2, bias_attr=False).state_dict())
    ['q_proj.weight', 'k_proj.weight', 'v_proj.weight', 'out_proj.weight']
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    kdim: int
    vdim: int
    dropout: float
    need_weights: bool
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear

    Cache: ClassVar[type] = Cache
    StaticCache: ClassVar[type] = StaticCache

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
        need_weights: bool = False,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"MultiHeadAttention: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.need_weights = dropout, need_weights
        self.q_proj = Linear(embed_dim, embed_dim, weight_attr, bias_attr, dims=("embed", "heads"))
        self.k_proj = Linear(self.kdim, embed_dim, weight_attr, bias_attr, dims=(self._width(self.kdim), "heads"))
        self.v_proj = Linear(self.vdim, embed_dim, weight_attr, bias_attr, dims=(self._width(self.vdim), "heads"))
        self.out_proj = Linear(embed_dim, embed_dim, weight_attr, bias_attr, dims=("heads", "embed"))

    def _width(self, size: int) -> str | None:
        return "embed" if size == self.embed_dim else None

    def forward(self, query: Any, key: Any = None, value: Any = None, attn_mask: Any = None, cache: Any = None) -> Any:
        """The output; with need_weights or a cache the tuple (output, weights [b, h, q, k], cache moved on)."""
        key = query if key is None else key
        value = query if value is None else value
        q_bshd, k_bshd, v_bshd, cache = self._project(query, key, value, cache)
        mixed, weights = self._attend(q_bshd, k_bshd, v_bshd, _additive(attn_mask, query.dtype))
        out = self.out_proj(reshape(mixed, [mixed.shape[0], mixed.shape[1], self.embed_dim]))
        extra = [weights] if self.need_weights else []
        extra += [] if cache is None else [cache]
        return (out, *extra) if extra else out

    def gen_cache(self, key: Any, value: Any = None, type: type = Cache) -> Any:
        """An empty Cache for key's batch; Cache(key, value) if value is given; or a StaticCache of key and value."""
        if type is StaticCache:
            return StaticCache(*self.compute_kv(key, key if value is None else value))
        if type is not Cache:
            raise ConfigError(f"gen_cache makes a MultiHeadAttention.Cache or StaticCache, got type={type!r}")
        if value is not None:
            return Cache(key, value)
        shape = [key.shape[0], self.num_heads, 0, self.head_dim]
        return Cache(zeros(shape, key.dtype), zeros(shape, key.dtype))

    def _project(self, query: Any, key: Any, value: Any, cache: Any) -> tuple[Any, Any, Any, Any]:
        """Queries, keys and values, [batch, seq, heads, head_dim], and the cache moved on."""
        if any(getattr(type(self), n) is not getattr(MultiHeadAttention, n) for n in ("_prepare_qkv", "compute_kv")):
            # a subclass has its own heads, rotated say
            q, k, v, *moved = self._prepare_qkv(query, key, value, cache)
            q_bshd, k_bshd, v_bshd = (transpose(x, [0, 2, 1, 3]) for x in (q, k, v))
            return q_bshd, k_bshd, v_bshd, moved[0] if moved else None
        # without the transposes there and back
        q_bshd = self._heads(self.q_proj(query))
        if isinstance(cache, StaticCache):
            return q_bshd, transpose(cache.k, [0, 2, 1, 3]), transpose(cache.v, [0, 2, 1, 3]), cache
        k_bshd, v_bshd = self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        if isinstance(cache, Cache):
            cache = Cache(*(
                concat([old, transpose(new, [0, 2, 1, 3])], axis=2)
                for old, new in ((cache.k, k_bshd), (cache.v, v_bshd))
            ))  # fmt: skip
            k_bshd, v_bshd = transpose(cache.k, [0, 2, 1, 3]), transpose(cache.v, [0, 2, 1, 3])
        return q_bshd, k_bshd, v_bshd, cache

    def _prepare_qkv(self, query: Any, key: Any, value: Any, cache: Any = None) -> tuple[Any, ...]:
        """Queries, keys and values, [batch, heads, seq, head_dim], and the cache moved on, if there is one.

        A subclass that defines this, or compute_kv, has forward attend with what it gives.
        """
        q = self._heads(self.q_proj(query)).transpose([0, 2, 1, 3])
        if isinstance(cache, StaticCache):
            return q, cache.k, cache.v, cache
        k, v = self.compute_kv(key, value)
        if cache is None:
            return q, k, v
        cache = Cache(concat([cache.k, k], axis=2), concat([cache.v, v], axis=2))
        return q, cache.k, cache.v, cache

    def compute_kv(self, key: Any, value: Any) -> tuple[Any, Any]:
        """Keys and values projected and split into heads: both [batch, heads, seq, head_dim]."""
        k, v = (self._heads(p(x)).transpose([0, 2, 1, 3]) for p, x in ((self.k_proj, key), (self.v_proj, value)))
        return k, v

    def _heads(self, x_bse: Any) -> Any:
        if len(x_bse.shape) != 3:
            raise ShapeError(
                f"MultiHeadAttention: got shape {list(x_bse.shape)}; needs [batch, seq, embed_dim={self.embed_dim}]; "
                "unsqueeze(0) makes one sequence a batch"
            )
        return reshape(x_bse, [x_bse.shape[0], x_bse.shape[1], self.num_heads, self.head_dim])

    def _attend(self, q_bshd: Any, k_bshd: Any, v_bshd: Any, mask: Any) -> tuple[Any, Any]:
        if not self.need_weights:
            mixed = F.scaled_dot_product_attention(
                q_bshd, k_bshd, v_bshd, attn_mask=mask, dropout_p=self.dropout, training=self.training
            )
            return mixed, None
        q, k, v = (transpose(x, [0, 2, 1, 3]) for x in (q_bshd, k_bshd, v_bshd))
        scores = (q / math.sqrt(self.head_dim)).matmul(k, transpose_y=True)
        weights = F.softmax(scores if mask is None else scores + mask, axis=-1)
        weights = F.dropout(weights, p=self.dropout, training=self.training)
        return transpose(weights.matmul(v), [0, 2, 1, 3]), weights


def _additive(mask: Any, dtype: Any) -> Any:
    """A mask as numbers to add to the scores, of 4 dims."""
    if mask is None:
        return None
    if not dtypes.is_floating(mask.dtype):
        mask = (mask.astype(dtype) - 1.0) * _MASKED
    while mask.ndim < 4:
        mask = unsqueeze(mask, 0)
    return mask
