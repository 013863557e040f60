"""Attention under masks that are kept as row bounds for each key: flashmask_attention.

Layout [batch, seq, heads, head_dim].
"""

from __future__ import annotations

from typing import Any

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
from polyreme.ops.attention.dense import scaled_dot_product_attention
from polyreme.ops.attention.over_devices import SegmentExchange, exchange
from polyreme.ops.ids import check_none

FAR = 2**30  # farther than any two tokens, so that adding it to a place does not overflow


def refuse_generators(what: str, **settings: Any) -> None:
    """Raise ConfigError for settings that ask for another source of random numbers than the default generator."""
    given = {name: value for name, value in settings.items() if value is not None and value != ""}
    if given:
        shown = ", ".join(f"{n}={v!r}" for n, v in given.items())
        raise ConfigError(f"{what}: {shown}; random numbers come from the default generator, use seed(), leave it out")


def window_of(what: str, window_size: Any) -> tuple[int, int]:
    """(left, right) of a window given as both, as one number, or None for none. Raises ConfigError for another form."""
    sides = (window_size, window_size) if isinstance(window_size, int) else tuple(window_size or (-1, -1))
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise ConfigError(f"{what}: window_size={window_size!r}; give (left, right), whole numbers, -1 for all keys")
    return sides


def _limits(bounds: Array | None, queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Array:
    """kernels.Columns.bounds, int32 [batch or 1, heads or 1, t, 2 + 2 i], of what flashmask_attention takes."""
    at = jnp.arange(keys, dtype=jnp.int32)
    right = 0 if causal else window[1]
    first = jnp.zeros_like(at) if right < 0 else at - min(right, FAR)
    last = jnp.full_like(at, queries) if window[0] < 0 else at + min(window[0], FAR) + 1
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


def _compute(
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
    return _compute((query, key, value), columns, scale, over, softcap=softcap)


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
    return _compute((query, key, value), columns, scale, over, **options)


def attend_columns(
    query: Any, key: Any, value: Any, bounds: Any, blocks: Any, causal: bool, window: tuple[int, int], dropout: float,
    scale: float | None, softcap: float,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, logsumexp) of attention under row bounds, by the op with or without dropout, over devices if need be."""
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
    refuse_generators(what, fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    if return_seed_offset:
        raise ConfigError(f"{what}: return_seed_offset=True; random numbers come from the default generator")
    if block_mask is not None and startend_row_indices is None:
        raise ConfigError(f"{what}: block_mask without startend_row_indices; give both")
    window = window_of(what, window_size)
    rate = dropout if training else 0.0
    square = tuple(query.shape[-3:-2]) == tuple(key.shape[-3:-2])
    if startend_row_indices is None and window == (-1, -1) and not return_softmax_lse and (square or not causal):
        return scaled_dot_product_attention(query, key, value, None, rate, causal, scale=softmax_scale, softcap=softcap)
    if startend_row_indices is not None:
        _check_counted(startend_row_indices, query.shape[1])
    args = (startend_row_indices, block_mask, causal, window, rate, softmax_scale, softcap)
    out, lse = attend_columns(query, key, value, *args)
    return (out, lse) if return_softmax_lse else out
