"""Attention of packed and of ragged batches, and under masks that are kept as column bounds or compressed rows.

Layout [batch, seq, heads, head_dim], or [tokens, heads, head_dim] for sequences that lie end to end.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import promote_floating
from polyreme.core.op import composite, op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.attention import flash_attention, scaled_dot_product_attention
from polyreme.ops.ids import check_none

BLOCK_ROWS = 128
"""Queries, and keys, in one block of flashmask_attention's block_mask."""


def _refuse(what: str, **settings: Any) -> None:
    """Raise ConfigError for a setting that asks for another source of random numbers."""
    given = {name: value for name, value in settings.items() if value is not None and value != ""}
    if given:
        shown = ", ".join(f"{n}={v!r}" for n, v in given.items())
        raise ConfigError(f"{what}: {shown}; random numbers come from the default generator, use seed(), leave it out")


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
    qkv: Any,
    dropout: float = 0.0,
    causal: bool = False,
    return_softmax: bool = False,
    *,
    fixed_seed_offset: Any = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
) -> tuple[Any, Any]:
    """flash_attention of one array: [batch, seq, heads / kv_heads + 2, kv_heads, d] -> [batch, seq, heads, d], None.

    The last two of dim 2 are keys and values, the others the queries, whose heads are dims 2 and 3 joined. Raises as
    flash_attention does, ShapeError for other dims.
    """
    q, k, v = _unpack(qkv, "flash_attn_qkvpacked", 5)
    return flash_attention(
        q, k, v, dropout, causal, return_softmax, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name,
        training=training,
    )  # fmt: skip


# ---- ragged batches ----


def _starts(cumulated: Array, longest: int, padded: bool) -> tuple[Array, Array]:
    """Where each sequence starts among the tokens, and its length, [batch] each."""
    ends = cumulated.astype(jnp.int32)
    first = jnp.arange(len(ends) - 1, dtype=jnp.int32) * longest if padded else ends[:-1]
    return first, ends[1:] - ends[:-1]


@op(method=False)
def ragged_rows(x: Array, cumulated: Array, longest: int, padded: bool = False) -> Array:
    """Tokens [tokens, heads, d] of sequences -> one row each, [batch, longest, heads, d].

    Sequence i begins at cumulated[i], or with padded at i * longest. A row goes on past its sequence; what lies past
    the last token is 0. Raises ShapeError for other dims.
    """
    if x.ndim != 3 or cumulated.ndim != 1:
        raise ShapeError(
            f"attention of ragged batches: tokens {list(x.shape)}, cumulated lengths {list(cumulated.shape)}; needs "
            "[tokens, heads, head_dim] and [batch + 1]"
        )
    first, _ = _starts(cumulated, longest, padded)
    at = first[:, None] + jnp.arange(longest, dtype=jnp.int32)
    return x.at[at].get(mode="fill", fill_value=0)


@op(method=False)
def ragged_tokens(rows: Array, cumulated: Array, tokens: int, padded: bool = False, used: Array | None = None) -> Array:
    """The inverse of ragged_rows: [batch, longest, heads, d] -> [tokens, heads, d], 0 for tokens of no sequence."""
    longest = rows.shape[1]
    first, lengths = _starts(cumulated, longest, padded)
    lengths = lengths if used is None else used.reshape(-1).astype(jnp.int32)
    at = jnp.arange(longest, dtype=jnp.int32)
    place = jnp.where(at < lengths[:, None], first[:, None] + at, tokens)
    return jnp.zeros((tokens, *rows.shape[2:]), rows.dtype).at[place].set(rows, mode="drop")


@op(method=False)
def ragged_mask(
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    longest: tuple[int, int],
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    used_q: Array | None = None,
    used_k: Array | None = None,
) -> Array:
    """What the queries of each sequence see, bool [batch, 1, s, t]; s is 1 where all see the same keys.

    causal and window (left, right; -1 is all) count from the end: the last query lies at the last key.
    """
    queries, keys = _lengths(cu_seqlens_q, used_q), _lengths(cu_seqlens_k, used_k)
    key = jnp.arange(longest[1], dtype=jnp.int32)
    seen = key < keys
    if causal or window != (-1, -1):
        place = jnp.arange(longest[0], dtype=jnp.int32)[:, None] + keys - queries
        right = 0 if causal else window[1]
        seen = seen if right < 0 else seen & (key <= place + right)
        seen = seen if window[0] < 0 else seen & (key >= place - window[0])
    return seen


def _lengths(cumulated: Array, used: Array | None) -> Array:
    """[batch, 1, 1, 1]"""
    lengths = cumulated[1:] - cumulated[:-1] if used is None else used
    return lengths.astype(jnp.int32).reshape(-1, 1, 1, 1)


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


@composite(method=False)
def flash_attn_varlen_qkvpacked(
    qkv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    dropout: float = 0.0,
    causal: bool = False,
    return_softmax: bool = False,
    fixed_seed_offset: Any = None,
    rng_name: str = "",
    varlen_padded: bool = True,
    training: bool = True,
    name: str | None = None,
) -> tuple[Any, None]:
    """Attention within each of many sequences of one array: [tokens, heads / kv_heads + 2, kv_heads, d].

    Returns ([tokens, heads, d], None). cu_seqlens [batch + 1] are the ends of the sequences, from 0 on: their lengths;
    varlen_padded says that each sequence has max_seqlen tokens of which the length is used, else they lie end to end.
    Tokens of no sequence give 0. Raises ShapeError for dims or lengths that do not fit, ConfigError for return_softmax,
    whose probabilities are never stored, and for a seed of its own.
    """
    what = "flash_attn_varlen_qkvpacked"
    _refuse(what, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    if return_softmax:
        raise ConfigError(f"{what}: return_softmax=True; the probabilities are never stored, leave it out")
    q, k, v = _unpack(qkv, what, 4)
    _check_lengths(what, cu_seqlens_q, max_seqlen_q, qkv.shape[0], varlen_padded)
    _check_lengths(what, cu_seqlens_k, max_seqlen_k, qkv.shape[0], varlen_padded)
    mask = ragged_mask(cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), causal)
    k, v = (ragged_rows(x, cu_seqlens_k, max_seqlen_k, varlen_padded) for x in (k, v))
    q = ragged_rows(q, cu_seqlens_q, max_seqlen_q, varlen_padded)
    out = scaled_dot_product_attention(q, k, v, mask, dropout, False, training, scale=scale)
    return ragged_tokens(out, cu_seqlens_q, qkv.shape[0], varlen_padded), None


@composite(method=False)
def flash_attention_v3_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    sm_margin: int = 0,
) -> Any:
    """Attention within each of many sequences that lie end to end: [tokens, heads, d], [keys, kv_heads, d] twice.

    Returns [tokens, heads, d]. cu_seqlens [batch + 1] are the ends of the sequences, from 0 on; seqused [batch] uses
    only so many of each. window_size (left, right): query i sees keys i - left to i + right, -1 all. causal and the
    window count from the end: the last query lies at the last key. Source: arXiv:2407.08608. Raises ShapeError for dims
    or lengths that do not fit, ConfigError for qv, the scales of float8 inputs, softcap, and how a GPU splits the work.
    """
    what = "flash_attention_v3_varlen"
    given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "pack_gqa": pack_gqa}
    refused = [n for n, value in given.items() if value is not None]
    refused += [n for n, off in (("softcap", softcap == 0), ("num_splits", num_splits == 1)) if not off]
    refused += ["sm_margin"] if sm_margin else []
    if refused:
        raise ConfigError(f"{what}: {', '.join(refused)} cannot be honoured here; leave it out")
    _check_lengths(what, cu_seqlens_q, max_seqlen_q, query.shape[0], False)
    _check_lengths(what, cu_seqlens_k, max_seqlen_k, key.shape[0], False)
    mask = ragged_mask(
        cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), causal, tuple(window_size), seqused_q, seqused_k
    )
    k, v = (ragged_rows(x, cu_seqlens_k, max_seqlen_k) for x in (key, value))
    q = ragged_rows(query, cu_seqlens_q, max_seqlen_q)
    out = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale)
    return ragged_tokens(out, cu_seqlens_q, query.shape[0], False, seqused_q)


# ---- masks by columns ----


def _column_mask(bounds: Array, queries: int, causal: bool) -> Array:
    """Bounds [b, n, t, 1, 2 or 4] -> what is seen, bool [b, n, s, t]."""
    row = jnp.arange(queries, dtype=bounds.dtype)[:, None]
    limits = [bounds[..., None, :, c] for c in range(bounds.shape[-1])]
    hidden = row >= limits[0]
    if len(limits) == 4 or (causal and len(limits) == 2):
        hidden &= row < limits[1]
    if not causal:
        hidden |= row < limits[1] if len(limits) == 2 else (row >= limits[2]) & (row < limits[3])
    return ~hidden


def _check_columns(bounds: Array, key: Array, causal: bool) -> None:
    batch, keys, kv_heads = key.shape[:3]
    columns = (1, 2) if causal else (2, 4)
    fits = bounds.ndim == 4 and bounds.shape[0] == batch and bounds.shape[1] in (1, kv_heads)
    if not fits or bounds.shape[2] != keys or bounds.shape[3] not in columns:
        raise ShapeError(
            f"flashmask_attention: startend_row_indices {list(bounds.shape)} with causal={causal}; needs "
            f"[{batch}, 1 or {kv_heads}, {keys}, {columns[0]} or {columns[1]}]"
        )
    if not dtypes.is_integer(bounds.dtype):
        raise DTypeError(f"flashmask_attention: startend_row_indices is {bounds.dtype.name}; needs int32, use astype")


def _blocks_seen(block_mask: Array, queries: int, keys: int) -> Array:
    want = (-(-queries // BLOCK_ROWS), -(-keys // BLOCK_ROWS))
    if block_mask.ndim != 4 or block_mask.shape[2:] != want:
        raise ShapeError(
            f"flashmask_attention: block_mask {list(block_mask.shape)}; needs [batch, heads, {want[0]}, {want[1]}], "
            f"one number for each {BLOCK_ROWS} queries and {BLOCK_ROWS} keys"
        )
    wide_rows = jnp.repeat(block_mask != 0, BLOCK_ROWS, 2)[:, :, :queries]
    return jnp.repeat(wide_rows, BLOCK_ROWS, 3)[..., :keys]


@op(method=False)
def column_mask(
    query: Array,
    key: Array,
    startend_row_indices: Array | None = None,
    block_mask: Array | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Array:
    """What flashmask_attention hides, as one bool mask [batch or 1, heads or 1, s, t] that is True where seen."""
    if query.ndim != 4 or key.ndim != 4:
        raise ShapeError(
            f"flashmask_attention: query {list(query.shape)}, key {list(key.shape)}; needs [batch, seq, heads, d]"
        )
    queries, keys = query.shape[1], key.shape[1]
    row, col = jnp.arange(queries, dtype=jnp.int32)[:, None], jnp.arange(keys, dtype=jnp.int32)
    seen = jnp.broadcast_to(col <= row if causal else jnp.ones((), bool), (1, 1, queries, keys))
    seen = seen if window[0] < 0 else seen & (col >= row - window[0])
    seen = seen if window[1] < 0 else seen & (col <= row + window[1])
    if startend_row_indices is not None:
        _check_columns(startend_row_indices, key, causal)
        seen = seen & _for_heads(_column_mask(startend_row_indices, queries, causal), query.shape[2])
    if block_mask is not None:
        seen = seen & _for_heads(_blocks_seen(block_mask, queries, keys), query.shape[2])
    return seen


def _for_heads(mask: Array, heads: int) -> Array:
    """A mask of 1 head, of the key heads or of all, for the query heads."""
    return mask if mask.shape[1] in (1, heads) else jnp.repeat(mask, heads // mask.shape[1], 1)


@op(amp="fp32", method=False)
def masked_logsumexp(query: Array, key: Array, mask: Array | None = None, scale: float | None = None) -> Array:
    """log of the sum of exp(scale * query key^T) over the keys seen, [batch, heads, s]; -inf for none."""
    q, k = promote_floating(query, key)
    scores = jnp.einsum("bshd,bthd->bhst", wide(q), wide(jnp.repeat(k, q.shape[2] // k.shape[2], 2)))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = None if mask is None else jnp.broadcast_to(mask, scores.shape)
    return jax.nn.logsumexp(scores, -1, where=seen)


@composite(method=False)
def flashmask_attention(
    query: Any,
    key: Any,
    value: Any,
    startend_row_indices: Any = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: Any = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Any = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Any = None,
) -> Any:
    """Attention whose mask is kept as bounds of rows for each key: [batch, s, heads, d] -> the same.

    startend_row_indices: integers [batch, kv_heads or 1, keys, columns]. Key j is hidden from the queries

    - causal, 1 column: from the first number on; 2 columns: from the first up to (not with) the second;
    - otherwise, 2 columns: from the first on, and before the second; 4 columns: from the first up to the second, and
      from the third up to the fourth.

    causal hides the keys after query i besides. window_size, w or (left, right): query i sees keys i - left to
    i + right. block_mask: [batch, heads, s / 128, t / 128], rounded up, 0 hides a block of 128 x 128; it needs
    startend_row_indices. A query that sees no key gives 0. return_softmax_lse: -> (out, logsumexp [batch, heads, s]).
    The mask is made whole, one byte a pair of query and key for each of its heads. Source: arXiv:2410.01359. Raises
    ShapeError for dims that do not fit, DTypeError for bounds that are no integers, ConfigError for a seed of its own.
    """
    what = "flashmask_attention"
    _refuse(what, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    if return_seed_offset:
        raise ConfigError(f"{what}: return_seed_offset=True; random numbers come from the default generator")
    if block_mask is not None and startend_row_indices is None:
        raise ConfigError(f"{what}: block_mask without startend_row_indices; give both")
    window = (window_size, window_size) if isinstance(window_size, int) else tuple(window_size or (-1, -1))
    plain = startend_row_indices is None and window == (-1, -1) and not causal
    mask = None if plain else column_mask(query, key, startend_row_indices, block_mask, causal, window)
    out = scaled_dot_product_attention(query, key, value, mask, dropout, False, training, scale=softmax_scale)
    return (out, masked_logsumexp(query, key, mask, softmax_scale)) if return_softmax_lse else out


# ---- masks by compressed rows ----


@op(amp="low", method=False)
def sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    sparse_csr_offset: Array,
    sparse_csr_columns: Array,
    key_padding_mask: Array | None = None,
    attn_mask: Array | None = None,
) -> Array:
    """Attention at listed pairs of query and key only: [batch, heads, s, d] three times -> the same.

    Query i of a head sees the keys sparse_csr_columns[offset[i] : offset[i + 1]]; offset: [batch, heads, s + 1],
    columns: [batch, heads, pairs]. key_padding_mask [batch, s] and attn_mask [s, s] hide where they are 0. A query that
    sees no key gives 0. Work and memory grow with the pairs. Raises ShapeError for dims that do not fit.
    """
    q, k, v = promote_floating(query, key, value)
    b, h, s = q.shape[:3]
    pairs = sparse_csr_columns.shape[-1]
    fits = q.ndim == 4 and q.shape == k.shape == v.shape and sparse_csr_offset.shape == (b, h, s + 1)
    if not fits or sparse_csr_columns.shape != (b, h, pairs):
        raise ShapeError(
            f"sparse_attention: query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}, offset "
            f"{list(sparse_csr_offset.shape)}, columns {list(sparse_csr_columns.shape)}; needs [batch, heads, s, d] "
            f"three times, [batch, heads, s + 1] and [batch, heads, pairs]"
        )
    shown = jnp.ones((b, s), bool) if key_padding_mask is None else key_padding_mask != 0
    pair_shown = None if attn_mask is None else attn_mask != 0
    one = partial(_one_sparse_head, pair_shown=pair_shown)
    over_heads = jax.vmap(one, (0, 0, 0, 0, 0, None))
    out = jax.vmap(over_heads)(wide(q), wide(k), wide(v), sparse_csr_offset, sparse_csr_columns, shown)
    return out.astype(q.dtype)


def _one_sparse_head(
    q: Array, k: Array, v: Array, offset: Array, columns: Array, shown: Array, pair_shown: Array | None
) -> Array:
    """One head: [s, d] three times, [s + 1], [pairs], [s] -> [s, d]."""
    s, d = q.shape
    at = jnp.arange(columns.shape[0], dtype=offset.dtype)
    row = jnp.searchsorted(offset, at, side="right") - 1
    seen = shown[columns] & (at < offset[-1])
    seen = seen if pair_shown is None else seen & pair_shown[row, columns]
    scores = jnp.where(seen, (q[row] * k[columns]).sum(-1) / math.sqrt(d), -jnp.inf)
    top = jax.lax.stop_gradient(jax.ops.segment_max(scores, row, s))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - top[row])
    total = jax.ops.segment_sum(weights, row, s)
    out = jax.ops.segment_sum(weights[:, None] * v[columns], row, s)
    return out / jnp.where(total == 0, 1, total)[:, None]


ALIASES: dict[str, str] = {}
