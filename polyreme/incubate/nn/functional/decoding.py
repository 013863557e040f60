"""Attention of tokens to a cache of those before: in rows of one length, in blocks, and of padded batches.

b batch, h query heads, n key heads, d head_dim. Caches are written in place.
"""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate.nn.functional.blocks import refuse
from polyreme.ops.attention.caches import (
    block_angles,
    blocks_gathered,
    blocks_written,
    cache_mask,
    cache_written,
    padded_seen,
    stage_mask,
    token_places,
)
from polyreme.ops.attention.dense import scaled_dot_product_attention, turned_by
from polyreme.ops.attention.packed import ragged_rows, ragged_tokens
from polyreme.ops.creation import full, ones, zeros_like
from polyreme.ops.ids import check_none, check_range
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import concat, transpose
from polyreme.ops.reduce import max as largest


def blha_get_max_len(seq_lens_encoder: Any, seq_lens_decoder: Any, batch_size: Any) -> tuple[Any, Any]:
    """The longest of each, [1]: of the new sequences, and of those that are continued."""
    return largest(seq_lens_encoder).reshape([1]), largest(seq_lens_decoder).reshape([1])


def split_heads(qkv: Any, key_heads: int, d: int, what: str) -> tuple[Any, Any, Any]:
    """[..., (h + 2 n) * d] -> queries [..., h, d], keys and values [..., n, d]."""
    *lead, width = qkv.shape
    heads = width // d - 2 * key_heads
    if width % d or heads < 1 or heads % key_heads:
        raise ShapeError(
            f"{what}: {width} numbers a token for {key_heads} key heads of {d}; needs (heads + 2 * {key_heads}) * {d}, "
            "heads a multiple of the key heads"
        )
    parts = qkv.reshape([*lead, heads + 2 * key_heads, d])
    return parts[..., :heads, :], parts[..., heads : heads + key_heads, :], parts[..., heads + key_heads :, :]


def attend_cache(q: Any, cache: Any, start: Any, mask: Any) -> Any:
    """Queries [b, s, h, d] at the places start, start + 1, ... of a cache [2, b, n, places, d] -> as q."""
    k, v = (transpose(cache[i], [0, 2, 1, 3]) for i in (0, 1))
    return scaled_dot_product_attention(q, k, v, cache_mask(start, q.shape[1], k.shape[1], mask), training=False)


def check_places(start: Any, new: int, places: int, what: str) -> None:
    """Raise IndexError if start + new is more than the cache holds."""

    def describe(value: int, at: tuple[int, ...]) -> Exception:
        return IndexError(f"{what}: {new} more after {value} at {list(at)}; the cache has {places} places")

    check_none(lambda _, x: (x < 0) | (x + new > places), [start], describe)


def masked_multihead_attention(
    x: Any,
    cache_kv: Any = None,
    bias: Any = None,
    src_mask: Any = None,
    cum_offsets: Any = None,
    sequence_lengths: Any = None,
    rotary_tensor: Any = None,
    beam_cache_offset: Any = None,
    qkv_out_scale: Any = None,
    out_shift: Any = None,
    out_smooth: Any = None,
    seq_len: int = 1,
    rotary_emb_dims: int = 0,
    use_neox_rotary_style: bool = False,
    compute_dtype: str = "default",
    out_scale: float = -1,
    quant_round_type: int = 1,
    quant_max_bound: float = 127.0,
    quant_min_bound: float = -127.0,
) -> tuple[Any, Any]:
    """One new token of each sequence attends to those in its cache and to itself: [b, (h + 2 n) * d] -> [b, h * d].

    Returns (out, cache_kv), and writes the token's keys and values into cache_kv [2, b, n, places, d] at place
    sequence_lengths [b, 1], or without it at src_mask's last. bias [h + 2 n, d] (or [3, h, d]) is added first; src_mask
    [b, 1, 1, keys] is added to the scores. Raises ConfigError for what is refused (rotary_tensor: turn x before;
    beam_cache_offset: reorder the cache; integer inputs and outputs), ShapeError, IndexError for a full cache.
    """
    what = "masked_multihead_attention"
    refuse(
        what, cum_offsets=(cum_offsets, None), rotary_tensor=(rotary_tensor, None),
        rotary_emb_dims=(rotary_emb_dims, 0), beam_cache_offset=(beam_cache_offset, None),
        qkv_out_scale=(qkv_out_scale, None), out_shift=(out_shift, None),
        out_smooth=(out_smooth, None), seq_len=(seq_len, 1), compute_dtype=(compute_dtype, "default"),
        out_scale=(out_scale, -1), use_neox_rotary_style=(use_neox_rotary_style, False),
        quant_round_type=(quant_round_type, 1), quant_max_bound=(quant_max_bound, 127.0),
        quant_min_bound=(quant_min_bound, -127.0),
    )  # fmt: skip
    if cache_kv is None or (sequence_lengths is None and src_mask is None):
        raise ConfigError(f"{what}: needs cache_kv, and sequence_lengths or src_mask for the token's place")
    _, b, n, places, d = cache_kv.shape
    parts = x.reshape([b, -1, d])
    parts = parts if bias is None else parts + bias.reshape([1, -1, d])
    q, k, v = split_heads(parts.reshape([b, 1, -1]), n, d, what)
    start = full([1], src_mask.shape[-1] - 1, "int32") if sequence_lengths is None else sequence_lengths.reshape([-1])
    check_places(start, 1, places, what)
    cache = cache_written(cache_kv, k, v, start, out=cache_kv)
    return attend_cache(q, cache, start, src_mask).reshape([b, -1]), cache


def block_multihead_attention(
    qkv: Any,
    key_cache: Any,
    value_cache: Any,
    seq_lens_encoder: Any,
    seq_lens_decoder: Any,
    seq_lens_this_time: Any,
    padding_offsets: Any,
    cum_offsets: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    block_tables: Any,
    pre_key_cache: Any = None,
    pre_value_cache: Any = None,
    cache_k_quant_scales: Any = None,
    cache_v_quant_scales: Any = None,
    cache_k_dequant_scales: Any = None,
    cache_v_dequant_scales: Any = None,
    qkv_out_scale: Any = None,
    qkv_bias: Any = None,
    out_shift: Any = None,
    out_smooth: Any = None,
    max_enc_len_this_time: Any = None,
    max_dec_len_this_time: Any = None,
    rope_emb: Any = None,
    mask: Any = None,
    tgt_mask: Any = None,
    max_seq_len: int = -1,
    block_size: int = 64,
    use_neox_style: bool = False,
    use_dynamic_cachekv_quant: bool = False,
    quant_round_type: int = 1,
    quant_max_bound: float = 127.0,
    quant_min_bound: float = -127.0,
    out_scale: float = -1,
    compute_dtype: str = "default",
    rope_theta: float = 10000.0,
) -> tuple[Any, Any, Any, Any]:
    """New and continued sequences attend to caches kept in blocks: tokens [tokens, (h + 2 n) * d] -> [tokens, h * d].

    Returns (out, qkv, key_cache, value_cache); qkv has qkv_bias and positions in it, and it and the caches
    [blocks, n, block_size, d] are written in place. Sequence i is tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1]; it has
    seq_lens_decoder[i] tokens in the cache already, and keeps places block_size * j on in block block_tables[i, j].
    A token sees those of its sequence up to itself, and pre_key_cache [b, n, length, d] before them all. rope_emb
    [2, b or 1, places, 1, d / 2]: cosines and sines that turn pairs of neighbours, or of halves with use_neox_style.
    mask [b, 1, s, keys] is added for sequences with seq_lens_encoder > 0, tgt_mask [b, 1, 1, keys] for the others. The
    offsets, cu_seqlens_k and the longest lengths say nothing more and are not read; no sequence has more than
    max_seq_len new tokens if that is given. Raises ConfigError for quantized caches, inputs and outputs and for pre
    caches with a mask, ShapeError, IndexError for a block that there is not or a table that is full. Source:
    arXiv:2309.06180.
    """
    what = "block_multihead_attention"
    refuse(
        what, cache_k_quant_scales=(cache_k_quant_scales, None), cache_v_quant_scales=(cache_v_quant_scales, None),
        cache_k_dequant_scales=(cache_k_dequant_scales, None), cache_v_dequant_scales=(cache_v_dequant_scales, None),
        qkv_out_scale=(qkv_out_scale, None), out_shift=(out_shift, None), out_smooth=(out_smooth, None),
        use_dynamic_cachekv_quant=(use_dynamic_cachekv_quant, False), out_scale=(out_scale, -1),
        compute_dtype=(compute_dtype, "default"),
        quant_round_type=(quant_round_type, 1), quant_max_bound=(quant_max_bound, 127.0),
        quant_min_bound=(quant_min_bound, -127.0),
    )  # fmt: skip
    if rope_theta != 10000.0:
        raise ConfigError(f"{what}: rope_theta={rope_theta}; the angles are those of rope_emb, computed with that base")
    blocks, n, size, d = key_cache.shape
    if size != block_size:
        raise ShapeError(f"{what}: block_size={block_size}, but key_cache {list(key_cache.shape)} has blocks of {size}")
    if pre_key_cache is not None and not (mask is None and tgt_mask is None):
        raise ConfigError(f"{what}: pre_key_cache with a mask; leave one of them out")
    _check_blocks(what, seq_lens_decoder, seq_lens_this_time, block_tables, blocks, block_tables.shape[1] * size)
    tokens, ends, start = qkv.shape[0], cu_seqlens_q.reshape([-1]), seq_lens_decoder.reshape([-1])
    sequence, place = token_places(ends, start, tokens)
    q, k, v = split_heads(qkv if qkv_bias is None else qkv + qkv_bias.reshape([-1]), n, d, what)
    if rope_emb is not None:
        cos, sin = block_angles(rope_emb, sequence, place, not use_neox_style)
        q, k = turned_by(q, cos, sin, not use_neox_style), turned_by(k, cos, sin, not use_neox_style)
    qkv = concat([x.reshape([tokens, -1]) for x in (q, k, v)], 1, out=qkv)
    key_cache = blocks_written(key_cache, k, block_tables, sequence, place, out=key_cache)
    value_cache = blocks_written(value_cache, v, block_tables, sequence, place, out=value_cache)
    keys, values = blocks_gathered(key_cache, block_tables), blocks_gathered(value_cache, block_tables)
    longest = tokens if max_seq_len < 0 else min(tokens, max_seq_len)
    masked = mask is not None or tgt_mask is not None
    added = stage_mask(seq_lens_encoder, (longest, keys.shape[1]), mask, tgt_mask) if masked else None
    seen = cache_mask(start, longest, keys.shape[1], added)
    if pre_key_cache is not None:
        before = [transpose(x, [0, 2, 1, 3]) for x in (pre_key_cache, pre_value_cache)]
        keys, values = concat([before[0], keys], 1), concat([before[1], values], 1)
        seen = concat([ones([*seen.shape[:3], before[0].shape[1]], "bool"), seen], 3)
    out = scaled_dot_product_attention(ragged_rows(q, ends, longest), keys, values, seen, training=False)
    return ragged_tokens(out, ends, tokens).reshape([tokens, -1]), qkv, key_cache, value_cache


def _check_blocks(what: str, decoder: Any, now: Any, block_tables: Any, blocks: int, places: int) -> None:
    def describe(value: int, at: tuple[int, ...]) -> Exception:
        return IndexError(f"{what}: sequence {at[0]} has {value} cached tokens and new ones; its blocks hold {places}")

    check_range(block_tables, blocks, f"{what}: block", allowed=-1)
    check_none(lambda _, old, new: old + new > places, [decoder.reshape([-1]), now.reshape([-1])], describe)


def variable_length_memory_efficient_attention(
    query: Any,
    key: Any,
    value: Any,
    seq_lens: Any,
    kv_seq_lens: Any,
    mask: Any = None,
    scale: float | None = None,
    causal: bool = False,
    pre_cache_length: int = 0,
) -> Any:
    """Attention of padded sequences: [b, h, s, d], [b, n, t, d] twice -> [b, h, s, d], 0 past a sequence's end.

    seq_lens and kv_seq_lens [b, 1]: how many queries and keys of each are used. mask [b, 1 or h, s, t] is added.
    causal: query i sees the keys up to i + pre_cache_length. Raises ShapeError for dims that do not fit.
    """
    seen, inside = padded_seen(seq_lens, kv_seq_lens, (query.shape[2], key.shape[2]), causal, pre_cache_length)
    seen = seen if mask is None else where(seen, mask, full([1], -float("inf"), mask.dtype))
    q, k, v = (transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
    out = transpose(scaled_dot_product_attention(q, k, v, seen, training=False, scale=scale), [0, 2, 1, 3])
    return where(inside, out, zeros_like(out))
