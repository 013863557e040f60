"""Attention under a mask in compressed rows: sparse_attention."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core.dtype import promote_floating
from polyreme.core.op import op
from polyreme.errors import ShapeError
from polyreme.ops.activation import wide


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
