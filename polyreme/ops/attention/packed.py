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

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote_floating
from polyreme.core.op import DRAWN, Key, composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels.columns import BLOCK, Columns
from polyreme.ops.activation import wide
from polyreme.ops.attention.dense import flash_attention, scaled_dot_product_attention
from polyreme.ops.attention.over_devices import SegmentExchange, exchange
from polyreme.ops.ids import check_none


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


# ---- ragged batches ----


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
    high = len_q[owner] if window[0] < 0 else jnp.clip(row + min(window[0], _FAR) + 1, 0, len_q[owner])
    used = (of >= 0) & (place < len_k[owner]) & (low < high)
    return jnp.where(used, first_q[owner] + jnp.stack([high, low]), 0).T[None, None]


_FAR = 2**30  # farther than any two tokens, so that adding it to a place does not overflow


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
    return _attend(q, k, v, bounds, None, False, (-1, -1), dropout, scale, softcap)[0].squeeze(0)


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
    _refuse(what, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
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
        used=(seqused_q, seqused_k), causal=causal, window=tuple(window_size), scale=softmax_scale,
        softcap=softcap,
    )  # fmt: skip


# ---- masks by columns ----


def _limits(bounds: Array | None, queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Array:
    """kernels.Columns.bounds, int32 [batch or 1, heads or 1, t, 2 + 2 i], of what flashmask_attention takes."""
    at = jnp.arange(keys, dtype=jnp.int32)
    right = 0 if causal else window[1]
    first = jnp.zeros_like(at) if right < 0 else at - min(right, _FAR)
    last = jnp.full_like(at, queries) if window[0] < 0 else at + min(window[0], _FAR) + 1
    first, last = first[None, None], last[None, None]
    hidden = []
    if bounds is not None:
        rows = [jnp.clip(bounds[..., c], 0, queries).astype(jnp.int32) for c in range(bounds.shape[-1])]
        if len(rows) == 4 or (causal and len(rows) == 2):
            hidden = rows
        else:
            last = jnp.minimum(last, rows[0])
            first = first if causal else jnp.maximum(first, rows[1])
    limits = jnp.broadcast_arrays(first, last, *hidden)
    return jnp.clip(jnp.stack(limits, -1), 0, queries)


def _check_columns(bounds: Array, query: Array, key: Array, causal: bool) -> None:
    batch, keys, kv_heads = key.shape[:3]
    columns, heads = (1, 2) if causal else (2, 4), (1, kv_heads, query.shape[2])
    fits = bounds.ndim == 4 and bounds.shape[0] == batch and bounds.shape[1] in heads
    if not fits or bounds.shape[2] != keys or bounds.shape[3] not in columns:
        raise ShapeError(
            f"flashmask_attention: startend_row_indices {list(bounds.shape)} with causal={causal}; needs "
            f"[{batch}, {_or(*heads)}, {keys}, {_or(*columns)}]"
        )
    if not dtypes.is_integer(bounds.dtype):
        raise DTypeError(f"flashmask_attention: startend_row_indices is {bounds.dtype.name}; needs int32, use astype")


def _check_blocks(block_mask: Array, query: Array, key: Array) -> None:
    if not dtypes.is_integer(block_mask.dtype) and block_mask.dtype != dtypes.bool_:
        raise DTypeError(
            f"flashmask_attention: block_mask is {block_mask.dtype.name}; needs integers, 0 for a block that is hidden"
        )
    batch, queries, heads = query.shape[:3]
    keys, kv_heads = key.shape[1:3]
    want = (-(-queries // BLOCK), -(-keys // BLOCK))
    shape = block_mask.shape
    fits = block_mask.ndim == 4 and shape[0] in (1, batch) and shape[1] in (1, kv_heads, heads)
    if not fits or shape[2:] != want:
        raise ShapeError(
            f"flashmask_attention: block_mask {list(shape)}; needs [{batch}, {_or(1, kv_heads, heads)}, {want[0]}, "
            f"{want[1]}], one number for each {BLOCK} queries and {BLOCK} keys"
        )


def _or(*sizes: int) -> str:
    return " or ".join(dict.fromkeys(map(str, sizes)))


def _columns(
    query: Array, key: Array, bounds: Array | None, blocks: Array | None, causal: bool, window: tuple[int, int]
) -> Columns:
    """The mask of flashmask_attention as Columns; raises its errors for dims and dtypes."""
    if query.ndim != 4 or key.ndim != 4:
        raise ShapeError(
            f"flashmask_attention: query {list(query.shape)}, key {list(key.shape)}; needs [batch, seq, heads, d]"
        )
    if bounds is not None:
        _check_columns(bounds, query, key, causal)
    if blocks is not None:
        _check_blocks(blocks, query, key)
        blocks = blocks != 0
    return Columns(_limits(bounds, query.shape[1], key.shape[1], causal, window), blocks)


def _columns_rule(call: OpCall) -> ShardingRule:
    """Batches and heads go through, queries' and keys' places are whole; each key head serves a run of query heads."""
    query, key = call.shapes[0], call.shapes[1]
    return ShardingRule(
        call.inputs(query=("b", "s", "heads", "d"), key=("b", "t", "heads", "d"), value=("b", "t", "heads", "d")),
        (("b", "s", "heads", "d"), ("b", "heads", "s")),
        whole=frozenset({"s", "t", "d"}),
        aligned=frozenset({"heads"}) if query[-2] != key[-2] else frozenset(),
        roles=(("heads", "heads"),),
    )


def _attend_columns(
    qkv: tuple[Array, Array, Array], columns: Columns, scale: float | None, over: SegmentExchange | None, **options: Any
) -> tuple[Array, Array]:
    q, k, v = promote_floating(*qkv)
    attend = kernels.column_attention if over is None else over.attend_columns
    return attend(q, k, v, columns, scale=scale, **options)


@op(amp="low", method=False, saves=True, rule=_columns_rule, real=True)
def column_attention(
    query: Array,
    key: Array,
    value: Array,
    startend_row_indices: Array | None = None,
    block_mask: Array | None = None,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    over: Any = None,
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    """flashmask_attention without dropout -> (out, logsumexp [batch, heads, s], in float32 or wider).

    over: the SegmentExchange of arrays that a plan lays over devices.
    """
    columns = _columns(query, key, startend_row_indices, block_mask, is_causal, window)
    return _attend_columns((query, key, value), columns, scale, over, softcap=softcap)


@op(amp="low", method=False, saves=True, rule=_columns_rule, real=True)
def column_attention_with_dropout(
    query: Array,
    key: Array,
    value: Array,
    startend_row_indices: Array | None = None,
    block_mask: Array | None = None,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Key = DRAWN,
    over: Any = None,
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    """column_attention with dropout of the probabilities."""
    columns = _columns(query, key, startend_row_indices, block_mask, is_causal, window)
    options = {"dropout_rate": dropout_p, "dropout_key": dropout_key, "softcap": softcap}
    return _attend_columns((query, key, value), columns, scale, over, **options)


def _attend(
    query: Any, key: Any, value: Any, bounds: Any, blocks: Any, causal: bool, window: tuple[int, int], dropout: float,
    scale: float | None, softcap: float,
) -> tuple[Any, Any]:  # fmt: skip
    over = exchange(query.shape, key.shape, whole=True, causal=causal)
    if dropout != 0:
        return column_attention_with_dropout(
            query, key, value, bounds, blocks, causal, window, scale, dropout, over=over, softcap=softcap
        )
    return column_attention(query, key, value, bounds, blocks, causal, window, scale, over, softcap)


def _check_counted(bounds: Any, queries: int) -> None:
    """Raise ShapeError for a row number below 0, which slices of rows and comparisons read differently."""

    def describe(value: int, at: tuple[int, ...]) -> Exception:
        return ShapeError(
            f"flashmask_attention: startend_row_indices holds {value} at {list(at)}; rows count from 0, give 0 to "
            f"{queries}, {queries} for no row"
        )

    check_none(lambda _, rows: rows < 0, [bounds], describe)


@composite(method=False)
def flashmask_attention(
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    startend_row_indices: AnyTensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: Any = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: AnyTensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: AnyTensor | None = None,
    softcap: float = 0.0,
) -> Any:
    """Attention whose mask is kept as bounds of rows for each key: [batch, s, heads, d] -> the same.

    startend_row_indices: integers [batch, 1 or kv_heads or heads, keys, columns]. Key j is hidden from the queries

    - causal, 1 column: from the first number on; 2 columns: from the first up to (not with) the second;
    - otherwise, 2 columns: from the first on, and before the second; 4 columns: from the first up to the second, and
      from the third up to the fourth.

    causal hides the keys after query i besides. window_size, w or (left, right): query i sees keys i - left to
    i + right. block_mask: [batch, heads, s / 128, t / 128], rounded up, 0 hides a block of 128 x 128; it needs
    startend_row_indices. A query that sees no key gives 0. return_softmax_lse: -> (out, logsumexp [batch, heads, s],
    -inf for such a query). Blocks of 128 queries and 128 keys of which no pair is seen are skipped, forward and
    backward, so time grows with what is seen and memory with s + keys. Under a plan, batches and heads lie as the plan
    says; a sequence that is split (sep) is exchanged as by scaled_dot_product_attention, whose softcap this has too.
    Source: arXiv:2410.01359. Raises ShapeError for dims that do not fit and for a row below 0, DTypeError for bounds
    that are no integers, ConfigError for a seed of its own.

    >>> q = paddle.ones([1, 4, 2, 8])
    >>> ends = paddle.to_tensor([2, 2, 4, 4], dtype="int32").reshape([1, 1, 4, 1])  # two documents of two tokens
    >>> paddle.nn.functional.flashmask_attention(q, q, q, ends, causal=True).shape == [1, 4, 2, 8]
    True
    """
    what = "flashmask_attention"
    _refuse(what, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    if return_seed_offset:
        raise ConfigError(f"{what}: return_seed_offset=True; random numbers come from the default generator")
    if block_mask is not None and startend_row_indices is None:
        raise ConfigError(f"{what}: block_mask without startend_row_indices; give both")
    window = (window_size, window_size) if isinstance(window_size, int) else tuple(window_size or (-1, -1))
    rate = dropout if training else 0.0
    square = tuple(query.shape[-3:-2]) == tuple(key.shape[-3:-2])
    if startend_row_indices is None and window == (-1, -1) and not return_softmax_lse and (square or not causal):
        return scaled_dot_product_attention(query, key, value, None, rate, causal, scale=softmax_scale, softcap=softcap)
    if startend_row_indices is not None:
        _check_counted(startend_row_indices, query.shape[1])
    args = (startend_row_indices, block_mask, causal, window, rate, softmax_scale, softcap)
    out, lse = _attend(query, key, value, *args)
    return (out, lse) if return_softmax_lse else out


# ---- masks by compressed rows ----


@op(amp="low", method=False, real=True)
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
