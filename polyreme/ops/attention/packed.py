"""Attention of packed and of ragged batches.

Layout [batch, seq, heads, head_dim], or [tokens, heads, head_dim] for sequences that lie end to end.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core.annotations import AnyTensor
from polyreme.core.op import composite, op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.attention.columns import FAR, attend_columns, refuse_generators, window_of
from polyreme.ops.attention.dense import flash_attention
from polyreme.ops.ids import check_none


def _unpack(qkv: Any, what: str, ndim: int) -> tuple[Any, Any, Any]:
    """[..., groups + 2, kv_heads, d] -> [..., groups * kv_heads, d], [..., kv_heads, d] twice."""
    if len(qkv.shape) != ndim or qkv.shape[-3] < 3:
        raise ShapeError(
            f"{what}: qkv {list(qkv.shape)}; needs {ndim} dims, "
            f"[{'batch, seq' if ndim == 5 else 'tokens'}, heads / kv_heads + 2, kv_heads, head_dim]"
        )
    *lead, parts, kv_heads, d = qkv.shape
    q = qkv[..., : parts - 2, :, :].reshape([*lead, (parts - 2) * kv_heads, d])
    return q, qkv[..., parts - 2, :, :], qkv[..., parts - 1, :, :]


@composite(method=False)
def flash_attn_qkvpacked(
    qkv: AnyTensor,
    dropout: float = 0.0,
    causal: bool = False,
    return_softmax: bool = False,
    *,
    fixed_seed_offset: AnyTensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
) -> tuple[AnyTensor, AnyTensor | None]:
    """flash_attention of one array: [batch, seq, heads / kv_heads + 2, kv_heads, d] -> [batch, seq, heads, d], None.

    The last two of dim 2 are keys and values, the others the queries, whose heads are dims 2 and 3 joined. Raises as
    flash_attention does, ShapeError for other dims.
    """
    q, k, v = _unpack(qkv, "flash_attn_qkvpacked", 5)
    return flash_attention(
        q, k, v, dropout, causal, return_softmax, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name,
        training=training,
    )  # fmt: skip


@op(method=False)
def ragged_rows(x: Array, cumulated: Array, longest: int) -> Array:
    """Tokens [tokens, heads, d] of sequences that lie end to end -> one row each, [batch, longest, heads, d].

    Sequence i begins at cumulated[i]. A row goes on past its sequence; what lies past the last token is 0. Raises
    ShapeError for other dims.
    """
    if x.ndim != 3 or cumulated.ndim != 1:
        raise ShapeError(
            f"attention of ragged batches: tokens {list(x.shape)}, cumulated lengths {list(cumulated.shape)}; needs "
            "[tokens, heads, head_dim] and [batch + 1]"
        )
    at = cumulated[:-1, None].astype(jnp.int32) + jnp.arange(longest, dtype=jnp.int32)
    return x.at[at].get(mode="fill", fill_value=0)


@op(method=False)
def ragged_tokens(rows: Array, cumulated: Array, tokens: int) -> Array:
    """The inverse of ragged_rows: [batch, longest, heads, d] -> [tokens, heads, d], 0 for tokens of no sequence."""
    ends = cumulated.astype(jnp.int32)
    at = jnp.arange(rows.shape[1], dtype=jnp.int32)
    place = jnp.where(at < (ends[1:] - ends[:-1])[:, None], ends[:-1, None] + at, tokens)
    return jnp.zeros((tokens, *rows.shape[2:]), rows.dtype).at[place].set(rows, mode="drop")


@op(method=False)
def segment_bounds(
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    tokens: int,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    used_q: Array | None = None,
    used_k: Array | None = None,
    padded: tuple[int, int] | None = None,
) -> Array:
    """Bounds of the tokens of its own sequence that see each of `tokens` keys, as flashmask_attention takes them: [1,
    1, tokens, 2].

    Sequence i begins at cu_seqlens[i], or with padded = (queries, keys) at i times that; used: how many tokens of it
    count. causal and window (left, right; -1 is all) count from the end: the last query lies at the last key.
    """
    key = jnp.arange(tokens, dtype=jnp.int32)
    if cu_seqlens_k.shape[0] < 2:
        return jnp.zeros((1, 1, tokens, 2), jnp.int32)
    first_q, len_q = _segments(cu_seqlens_q, used_q, padded and padded[0])
    first_k, len_k = _segments(cu_seqlens_k, used_k, padded and padded[1])
    of = jnp.searchsorted(first_k, key, side="right").astype(jnp.int32) - 1
    owner = jnp.maximum(of, 0)
    place = key - first_k[owner]
    row = place - len_k[owner] + len_q[owner]  # the query that lies at this key, counted in its sequence
    right = 0 if causal else window[1]
    low = jnp.zeros_like(row) if right < 0 else jnp.clip(row - right, 0, len_q[owner])
    high = len_q[owner] if window[0] < 0 else jnp.clip(row + min(window[0], FAR) + 1, 0, len_q[owner])
    used = (of >= 0) & (place < len_k[owner]) & (low < high)
    return jnp.where(used, first_q[owner] + jnp.stack([high, low]), 0).T[None, None]


def _segments(cumulated: Array, used: Array | None, padded: int | None) -> tuple[Array, Array]:
    """The start of each sequence and the number of its tokens that count, int32 [batch] each."""
    ends = cumulated.astype(jnp.int32)
    first = ends[:-1] if padded is None else jnp.arange(len(ends) - 1, dtype=jnp.int32) * padded
    return first, ends[1:] - ends[:-1] if used is None else used.reshape(-1).astype(jnp.int32)


def _check_lengths(what: str, cumulated: Any, longest: int, tokens: int, padded: bool) -> None:
    """Raise ShapeError for lengths below 0 or above the longest, and for an end past the tokens."""
    if padded and (cumulated.shape[0] - 1) * longest > tokens:
        raise ShapeError(
            f"{what}: {cumulated.shape[0] - 1} sequences padded to {longest} for {tokens} tokens; they need "
            f"{(cumulated.shape[0] - 1) * longest}, or give varlen_padded=False"
        )

    def bad(xp: Any, ends: Any) -> Any:
        step = xp.concatenate([ends[:1], ends[1:] - ends[:-1]])
        return (step < 0) | (step > longest) | (False if padded else ends > tokens)

    def describe(value: int, at: tuple[int, ...]) -> Exception:
        return ShapeError(
            f"{what}: cumulated lengths hold {value} at {list(at)}; they must grow by 0 to max_seqlen {longest} each "
            f"and end at {tokens} tokens at most"
        )

    check_none(bad, [cumulated], describe)


def segment_attention(
    what: str,
    qkv: tuple[Any, Any, Any],
    cumulated: tuple[Any, Any],
    longest: tuple[int, int],
    *,
    padded: bool = False,
    used: tuple[Any, Any] = (None, None),
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Any:
    """Attention within each of many sequences: [tokens, heads, d], [keys, kv_heads, d] twice -> [tokens, heads, d].

    The parameters are those of flash_attention_v3_varlen, in pairs of queries and keys. Tokens are not padded to the
    longest: the sequences are bounds of one attention over all of them, which skips the blocks between them. Raises
    ShapeError for dims or lengths that do not fit, in the name of `what`.
    """
    q, k, v = qkv
    if any(len(x.shape) != 3 for x in qkv) or any(len(x.shape) != 1 for x in cumulated):
        raise ShapeError(
            f"{what}: query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}, cumulated lengths "
            f"{list(cumulated[0].shape)}, {list(cumulated[1].shape)}; needs [tokens, heads, head_dim] three times and "
            "[batch + 1] twice"
        )
    if tuple(cumulated[0].shape) != tuple(cumulated[1].shape):
        raise ShapeError(
            f"{what}: cumulated lengths {list(cumulated[0].shape)} of queries, {list(cumulated[1].shape)} of keys; "
            "both need [batch + 1], give an empty sequence the same end twice"
        )
    for x, cu, most in zip((q, k), cumulated, longest, strict=True):
        _check_lengths(what, cu, most, x.shape[0], padded)
    bounds = segment_bounds(*cumulated, k.shape[0], causal, window, *used, tuple(longest) if padded else None)
    q, k, v = (x.unsqueeze(0) for x in qkv)
    return attend_columns(q, k, v, bounds, None, False, (-1, -1), dropout, scale, softcap)[0].squeeze(0)


@composite(method=False)
def flash_attn_varlen_qkvpacked(
    qkv: AnyTensor,
    cu_seqlens_q: AnyTensor,
    cu_seqlens_k: AnyTensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    dropout: float = 0.0,
    causal: bool = False,
    return_softmax: bool = False,
    fixed_seed_offset: AnyTensor | None = None,
    rng_name: str = "",
    varlen_padded: bool = True,
    training: bool = True,
    name: str | None = None,
) -> tuple[AnyTensor, None]:
    """Attention within each of many sequences of one array: [tokens, heads / kv_heads + 2, kv_heads, d].

    Returns ([tokens, heads, d], None). cu_seqlens [batch + 1] are the ends of the sequences, from 0 on: their lengths;
    varlen_padded says that each sequence has max_seqlen tokens of which the length is used, else they lie end to end.
    Tokens of no sequence give 0. Raises ShapeError for dims or lengths that do not fit, ConfigError for return_softmax,
    whose probabilities are never stored, and for a seed of its own.
    """
    what = "flash_attn_varlen_qkvpacked"
    refuse_generators(what, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    if return_softmax:
        raise ConfigError(f"{what}: return_softmax=True; the probabilities are never stored, leave it out")
    out = segment_attention(
        what, _unpack(qkv, what, 4), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
        padded=varlen_padded, causal=causal, dropout=dropout if training else 0.0, scale=scale,
    )  # fmt: skip
    return out, None


@composite(method=False)
def flash_attention_v3_varlen(
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    cu_seqlens_q: AnyTensor,
    cu_seqlens_k: AnyTensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: AnyTensor | None = None,
    seqused_k: AnyTensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: AnyTensor | None = None,
    q_descale: AnyTensor | None = None,
    k_descale: AnyTensor | None = None,
    v_descale: AnyTensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    sm_margin: int = 0,
) -> Any:
    """Attention within each of many sequences that lie end to end: [tokens, heads, d], [keys, kv_heads, d] twice.

    Returns [tokens, heads, d]. cu_seqlens [batch + 1] are the ends of the sequences, from 0 on; seqused [batch] uses
    only so many of each. window_size (left, right): query i sees keys i - left to i + right, -1 all. causal and the
    window count from the end: the last query lies at the last key. softcap: as of scaled_dot_product_attention. Source:
    arXiv:2407.08608. Raises ShapeError for dims or lengths that do not fit, ConfigError for qv, the scales of float8
    inputs, and how a GPU splits the work.
    """
    what = "flash_attention_v3_varlen"
    given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "pack_gqa": pack_gqa}
    refused = [n for n, value in given.items() if value is not None]
    refused += [n for n, off in (("num_splits", num_splits == 1), ("sm_margin", sm_margin == 0)) if not off]
    if refused:
        raise ConfigError(f"{what}: {', '.join(refused)} cannot be honoured here; leave it out")
    return segment_attention(
        what, (query, key, value), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
        used=(seqused_q, seqused_k), causal=causal, window=window_of(what, window_size), scale=softmax_scale,
        softcap=softcap,
    )  # fmt: skip
