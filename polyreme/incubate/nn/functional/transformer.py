"""Multi-head attention and whole stacks of transformer layers as functions of their weights.

b batch, s sequence, e embed, h heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core.dtype import is_integer
from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate.nn.functional.blocks import activated, refuse
from polyreme.incubate.nn.functional.decoding import attend_cache, check_places, split_heads
from polyreme.nn import functional as F
from polyreme.ops.arithmetic import matmul
from polyreme.ops.attention.caches import cache_written, padded_seen
from polyreme.ops.attention.dense import scaled_dot_product_attention, turned_by
from polyreme.ops.creation import full
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import concat, stack, transpose


def _heads_first(x: Any) -> Any:
    return transpose(x, [0, 2, 1, 3])


def fused_multi_head_attention(
    x: Any,
    qkv_weight: Any,
    linear_weight: Any,
    pre_layer_norm: bool = False,
    pre_ln_scale: Any = None,
    pre_ln_bias: Any = None,
    ln_scale: Any = None,
    ln_bias: Any = None,
    pre_ln_epsilon: float = 1e-5,
    qkv_bias: Any = None,
    linear_bias: Any = None,
    cache_kv: Any = None,
    attn_mask: Any = None,
    dropout_rate: float = 0.5,
    attn_dropout_rate: float = 0.5,
    ln_epsilon: float = 1e-5,
    training: bool = True,
    mode: str = "upscale_in_train",
    ring_id: int = -1,
    add_residual: bool = True,
    num_heads: int = -1,
    transpose_qkv_wb: bool = False,
    name: str | None = None,
) -> Any:
    """x + dropout(linear(attention(x))): [b, s, e] -> the same; with cache_kv (that, the cache grown).

    qkv_weight: [3, h, d, e], or [e, 3 e] with transpose_qkv_wb, which needs num_heads. pre_layer_norm normalizes x
    before, else the sum is normalized after. cache_kv [2, b, h, places, d]: keys and values of the places before.
    attn_mask broadcasts to [b, h, s, keys]: bool and integers keep what is not 0, a float is added. mode as in dropout.
    Raises ConfigError for ring_id or a missing num_heads, ShapeError for weights that do not fit.
    """
    what = "fused_multi_head_attention"
    refuse(what, ring_id=(ring_id, -1))
    if transpose_qkv_wb and num_heads < 1:
        raise ConfigError(f"{what}: transpose_qkv_wb=True with num_heads={num_heads}; give the number of heads")
    b, s, e = x.shape
    h = F.layer_norm(x, [e], pre_ln_scale, pre_ln_bias, pre_ln_epsilon) if pre_layer_norm else x
    heads = num_heads if transpose_qkv_wb else qkv_weight.shape[1]
    weight = qkv_weight if transpose_qkv_wb else transpose(qkv_weight.reshape([-1, qkv_weight.shape[-1]]), [1, 0])
    if weight.shape[0] != e or weight.shape[1] % (3 * heads):
        raise ShapeError(f"{what}: qkv_weight {list(qkv_weight.shape)} for x {list(x.shape)} and {heads} heads")
    h = F.linear(h, weight, None if qkv_bias is None else qkv_bias.reshape([-1]))
    q, k, v = (h.reshape([b, s, 3, heads, -1])[:, :, i] for i in range(3))
    if cache_kv is not None:
        k, v = (concat([_heads_first(cache_kv[i]), new], 1) for i, new in ((0, k), (1, v)))
    mask = attn_mask if attn_mask is None or not is_integer(attn_mask.dtype) else attn_mask != 0
    out = scaled_dot_product_attention(q, k, v, mask, attn_dropout_rate, False, training)
    # it scales up in training, and the output is linear in the probabilities
    out = out * (1 - attn_dropout_rate) if mode == "downscale_in_infer" else out
    out = F.linear(out.reshape([b, s, -1]), linear_weight, linear_bias)
    out = F.dropout(out, dropout_rate, training=training, mode=mode)
    out = x + out if add_residual else out
    out = out if pre_layer_norm else F.layer_norm(out, [e], ln_scale, ln_bias, ln_epsilon)
    return out if cache_kv is None else (out, stack([_heads_first(k), _heads_first(v)]))


def fused_multi_transformer(
    x: Any,
    ln_scales: Sequence[Any],
    ln_biases: Sequence[Any] | None,
    qkv_weights: Sequence[Any],
    qkv_biases: Sequence[Any] | None,
    linear_weights: Sequence[Any],
    linear_biases: Sequence[Any] | None,
    ffn_ln_scales: Sequence[Any],
    ffn_ln_biases: Sequence[Any] | None,
    ffn1_weights: Sequence[Any],
    ffn1_biases: Sequence[Any] | None,
    ffn2_weights: Sequence[Any],
    ffn2_biases: Sequence[Any] | None,
    pre_layer_norm: bool = True,
    epsilon: float = 1e-5,
    residual_alpha: float = 1.0,
    cache_kvs: Sequence[Any] | None = None,
    beam_offset: Any = None,
    pre_caches: Sequence[Any] | None = None,
    seq_lens: Any = None,
    rotary_embs: Any = None,
    time_step: Any = None,
    attn_mask: Any = None,
    dropout_rate: float = 0.0,
    rotary_emb_dims: int = 0,
    activation: str = "gelu",
    training: bool = False,
    mode: str = "upscale_in_train",
    trans_qkvw: bool = True,
    ring_id: int = -1,
    norm_type: str = "layernorm",
    use_neox_rotary_style: bool = False,
    gqa_group_size: int = -1,
    name: str | None = None,
) -> Any:
    """A stack of transformer layers: [b, s, e] -> the same; with cache_kvs (that, the caches, written in place).

    Lists hold one weight a layer: qkv [3, h, d, e] ([e, 3, h, d] without trans_qkvw; with gqa_group_size key heads
    [h + 2 n, d, e] or [e, h + 2 n, d]), linear [h * d, e], ffn1 [e, ffn] (twice as wide for "swiglu" and "geglu"), ffn2
    [ffn, e]. Each half is norm, map, dropout, residual_alpha times its input added; without pre_layer_norm the norm
    comes last. norm_type: "layernorm" or "rmsnorm". Nothing is hidden but by attn_mask (bool keeps, float is added,
    [b, 1, s, keys]) and seq_lens [b], the keys used of a first call.

    cache_kvs: [2, b, n, places, d] each. A first call writes its s places from 0 on, after those of pre_caches; one
    with time_step [1] is a token, s = 1, at that place, which sees the places up to its own. rotary_embs [2, b, 1,
    places, d], with rotary_emb_dims=1: cosines and sines of the queries' places, or from 0 on of which a token takes
    its own; they turn neighbours, or halves with use_neox_rotary_style. Raises ConfigError for beam_offset, ring_id,
    rotary_emb_dims=2, seq_lens or pre_caches with time_step, or time_step without caches; IndexError for a full cache.
    """
    what = "fused_multi_transformer"
    refuse(what, beam_offset=(beam_offset, None), ring_id=(ring_id, -1))
    if rotary_emb_dims != (rotary_embs is not None):
        raise ConfigError(f"{what}: rotary_emb_dims={rotary_emb_dims}; it is 1 with rotary_embs and 0 without")
    if norm_type not in ("layernorm", "rmsnorm"):
        raise ConfigError(f"{what}: norm_type={norm_type!r}; choose 'layernorm' or 'rmsnorm'")
    if time_step is not None and (cache_kvs is None or seq_lens is not None or pre_caches is not None):
        raise ConfigError(f"{what}: time_step needs cache_kvs, and neither seq_lens nor pre_caches; leave them out")

    def norm(x: Any, scales: Any, biases: Any) -> Any:
        if norm_type == "rmsnorm":
            return F.rms_norm(x, x.shape[-1:], scales, epsilon)
        return F.layer_norm(x, x.shape[-1:], scales, biases, epsilon)

    def half(x: Any, mapped: Any, scales: Any, biases: Any) -> Any:
        made = F.dropout(
            mapped(norm(x, scales, biases) if pre_layer_norm else x), dropout_rate, None, training, mode=mode
        )
        out = (x if residual_alpha == 1 else x * residual_alpha) + made
        return out if pre_layer_norm else norm(out, scales, biases)

    caches = []
    for i in range(len(qkv_weights)):
        places = _Places(
            rotary_embs,
            not use_neox_rotary_style,
            time_step,
            attn_mask,
            seq_lens,
            _item(pre_caches, i),
            _item(cache_kvs, i),
        )

        def attend(x: Any, i: int = i, places: _Places = places) -> Any:
            q, k, v = _queries_keys_values(x, qkv_weights[i], _item(qkv_biases, i), trans_qkvw, gqa_group_size)
            out = places.attend(q, k, v).reshape([*x.shape[:2], -1])
            return F.linear(out, linear_weights[i], _item(linear_biases, i))

        def feed(x: Any, i: int = i) -> Any:
            hidden = activated(F.linear(x, ffn1_weights[i], _item(ffn1_biases, i)), activation, what)
            hidden = F.dropout(hidden, dropout_rate, training=training, mode=mode)
            return F.linear(hidden, ffn2_weights[i], _item(ffn2_biases, i))

        x = half(x, attend, ln_scales[i], _item(ln_biases, i))
        x = half(x, feed, ffn_ln_scales[i], _item(ffn_ln_biases, i))
        caches.append(places.cache)
    return x if cache_kvs is None else (x, caches)


def _item(items: Sequence[Any] | None, i: int) -> Any:
    return items[i] if items else None


def _queries_keys_values(x: Any, weight: Any, bias: Any, transposed: bool, key_heads: int) -> tuple[Any, Any, Any]:
    """[b, s, e] -> [b, s, h, d], [b, s, n, d] twice."""
    d = weight.shape[2] if transposed and weight.ndim == 4 else weight.shape[1] if transposed else weight.shape[-1]
    total = (weight.size // x.shape[-1]) // d
    flat = weight.reshape([-1, x.shape[-1]] if transposed else [x.shape[-1], -1])
    made = matmul(x, flat, transpose_y=transposed)
    made = made if bias is None else made + bias.reshape([-1])
    return split_heads(made, key_heads if key_heads > 0 else total // 3, d, "fused_multi_transformer")


class _Places:
    """Where one layer's queries lie, and what they attend to."""

    def __init__(
        self, angles: Any, adjacent: bool, step: Any, mask: Any, lengths: Any, before: Any, cache: Any
    ) -> None:
        self.angles, self.adjacent, self.step, self.mask = angles, adjacent, step, mask
        self.lengths, self.before, self.cache = lengths, before, cache

    def _turned(self, x: Any) -> Any:
        if self.angles is None:
            return x
        table = self.angles
        if self.step is not None and table.shape[3] > 1:
            table = table.index_select(self.step.reshape([-1]), 3)
        cos, sin = (_heads_first(table[i])[:, : x.shape[1]] for i in (0, 1))
        return turned_by(x, cos, sin, self.adjacent)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """[b, s, h, d], [b, s, n, d] twice -> [b, s, h, d]; the cache is written."""
        q, k = self._turned(q), self._turned(k)
        if self.step is not None:
            start = self.step.reshape([-1])
            check_places(start, q.shape[1], self.cache.shape[3], "fused_multi_transformer")
            self.cache = cache_written(self.cache, k, v, start, out=self.cache)
            return attend_cache(q, self.cache, start, self.mask)
        if self.before is not None:
            k, v = (concat([_heads_first(self.before[i]), new], 1) for i, new in ((0, k), (1, v)))
        if self.cache is not None:
            zero = full([1], 0, "int32")
            check_places(zero, k.shape[1], self.cache.shape[3], "fused_multi_transformer")
            self.cache = cache_written(self.cache, k, v, zero, out=self.cache)
        return scaled_dot_product_attention(q, k, v, self._mask(q.shape[1], k.shape[1]), training=False)

    def _mask(self, queries: int, keys: int) -> Any:
        if self.lengths is None:
            return self.mask
        used = self.lengths + (keys - queries)
        seen, _ = padded_seen(self.lengths, used, (queries, keys))
        if self.mask is None:
            return seen
        if self.mask.dtype == "bool":
            return seen & self.mask
        return where(seen, self.mask, full([1], -float("inf"), self.mask.dtype))
