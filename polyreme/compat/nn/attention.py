"""MultiheadAttention with one packed projection, sequence first, and the weights returned."""

from __future__ import annotations

from typing import Any

from polyreme.compat.nn.layers import Linear
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.nn import initializer
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter
from polyreme.ops import creation
from polyreme.ops.arithmetic import logical_not, matmul
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import concat, reshape, split, transpose, unsqueeze
from polyreme.ops.reduce import mean
from polyreme.ops.repetition import expand


class MultiheadAttention(Layer):
    """Attention of query [s, b, embed] to key [t, b, kdim] and value [t, b, vdim] -> ([s, b, embed], weights or None);
    with batch_first [b, s, ...]; without the batch dim too. Source: arXiv:1706.03762.

    Parameters in_proj_weight [3 embed, embed] and in_proj_bias, or q/k/v_proj_weight where kdim or vdim differs from
    embed_dim; out_proj. add_bias_kv: a learned key and value at the end of the sequence; add_zero_attn: zeros there.
    """

    in_proj_weight: Parameter
    in_proj_bias: Parameter | None
    bias_k: Parameter | None
    bias_v: Parameter | None

    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool
    packed: bool
    out_proj: Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dtype=dtype)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"MultiheadAttention: embed_dim={embed_dim} does not divide by num_heads={num_heads}")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.add_zero_attn = add_zero_attn
        sizes = [embed_dim, embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim]
        self.packed = sizes == [embed_dim] * 3
        if self.packed:
            self.in_proj_weight = self.create_parameter([3 * embed_dim, embed_dim])
            self.in_proj_bias = self.create_parameter([3 * embed_dim], is_bias=True) if bias else None
        else:
            for name, size in zip("qkv", sizes, strict=True):
                setattr(self, f"{name}_proj_weight", self.create_parameter([embed_dim, size]))
                setattr(self, f"{name}_proj_bias", self.create_parameter([embed_dim], is_bias=True) if bias else None)
        normal = initializer.XavierNormal()
        self.bias_k = self.create_parameter([1, 1, embed_dim], default_initializer=normal) if add_bias_kv else None
        self.bias_v = self.create_parameter([1, 1, embed_dim], default_initializer=normal) if add_bias_kv else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        if self.out_proj.bias is not None:
            self.out_proj.bias.set_value(creation.zeros([embed_dim]))
        if device is not None:
            self.to(device=device)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        """The output and the weights [b, s, t] (for each head [b, heads, s, t] unless average_attn_weights), or None.

        key_padding_mask [b, t] and attn_mask [s, t] or [b * heads, s, t]: True hides a key, a number is added.
        is_causal says that attn_mask hides what comes later, and needs it.
        """
        if is_causal and attn_mask is None:
            raise ConfigError("MultiheadAttention: is_causal=True only describes attn_mask; give that too")
        single = query.ndim == 2
        if single:
            query, key, value = (unsqueeze(t, 0 if self.batch_first else 1) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else unsqueeze(key_padding_mask, 0)
        if not self.batch_first:
            query, key, value = (transpose(t, [1, 0, 2]) for t in (query, key, value))
        q, k, v = self._projected(query, key, value)
        extra = (self.bias_k is not None) + self.add_zero_attn
        q, k, v = (self._heads(t) for t in (q, k, v))
        mask = self._mask(key_padding_mask, attn_mask, q, key.shape[1], extra)
        done, weights = self._attend(q, k, v, mask, need_weights)
        b, s = query.shape[:2]
        done = self.out_proj(reshape(transpose(done, [0, 2, 1, 3]), [b, s, self.embed_dim]))
        if weights is not None and average_attn_weights:
            weights = mean(weights, 1)
        if not self.batch_first:
            done = transpose(done, [1, 0, 2])
        if single:
            return done.squeeze(0 if self.batch_first else 1), None if weights is None else weights.squeeze(0)
        return done, weights

    def _projected(self, query: Any, key: Any, value: Any) -> list[Any]:
        if self.packed:
            weights = split(self.in_proj_weight, 3)
            biases = [None] * 3 if self.in_proj_bias is None else split(self.in_proj_bias, 3)
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            biases = [self.q_proj_bias, self.k_proj_bias, self.v_proj_bias]
        projections = [
            F.linear(x, transpose(w, [1, 0]), b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
        ]
        b = query.shape[0]
        if self.bias_k is not None:
            projections[1:] = [
                concat([t, expand(row, [b, 1, self.embed_dim])], 1)
                for t, row in zip(projections[1:], (self.bias_k, self.bias_v), strict=True)
            ]
        if self.add_zero_attn:
            projections[1:] = [concat([t, creation.zeros([b, 1, self.embed_dim], t.dtype)], 1) for t in projections[1:]]
        return projections

    def _heads(self, x: Any) -> Any:
        """[b, s, embed] -> [b, heads, s, d]."""
        b, s, _ = x.shape
        return transpose(reshape(x, [b, s, self.num_heads, -1]), [0, 2, 1, 3])

    def _mask(self, padding: Any, mask: Any, q: Any, t: int, extra: int) -> Any:
        """What is added to the scores [b, heads, s, t + extra], or None."""
        b, heads, s, _ = q.shape
        total = None
        if mask is not None:
            if list(mask.shape) not in ([s, t], [b * heads, s, t]):
                raise ShapeError(f"attn_mask is {list(mask.shape)}, needs {[s, t]} or {[b * heads, s, t]}")
            added = _add(mask, q.dtype)
            total = added if mask.ndim == 2 else reshape(added, [b, heads, s, t])
        if padding is not None:
            if list(padding.shape) != [b, t]:
                raise ShapeError(f"key_padding_mask is {list(padding.shape)}, needs {[b, t]}")
            hidden = reshape(_add(padding, q.dtype), [b, 1, 1, t])
            total = hidden if total is None else total + hidden
        if total is None or not extra:
            return total
        return concat([total, creation.zeros([*total.shape[:-1], extra], q.dtype)], -1)

    def _attend(self, q: Any, k: Any, v: Any, mask: Any, need_weights: bool) -> tuple[Any, Any]:
        if not need_weights:
            q, k, v = (transpose(x, [0, 2, 1, 3]) for x in (q, k, v))
            done = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, False, self.training)
            return transpose(done, [0, 2, 1, 3]), None
        scores = matmul(q, k, False, True) * q.shape[-1] ** -0.5
        weights = F.softmax(scores if mask is None else scores + mask)
        weights = F.dropout(weights, self.dropout, training=self.training)
        return matmul(weights, v), weights


def _add(mask: Any, dtype: Any) -> Any:
    """A mask as numbers to add: minus infinity where a bool one hides."""
    if mask.dtype != "bool":
        return mask.astype(dtype)
    return where(logical_not(mask), creation.zeros([], dtype), creation.full([], float("-inf"), dtype))
