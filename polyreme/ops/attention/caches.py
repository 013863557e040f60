"""Caches of keys and values that attention reads and grows: one row a sequence, or blocks that sequences share.

b batch, n key heads, d head_dim. Writes give the new cache; callers write it in place with out=.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyreme.core.op import op
from polyreme.errors import ShapeError
from polyreme.kernels import select
from polyreme.kernels.attention_blocked import soft_capped
from polyreme.ops.by_index import bounded, read


@op(method=False)
def cache_written(cache: Array, keys: Array, values: Array, start: Array) -> Array:
    """cache [2, b, n, places, d] with keys and values [b, s, n, d] at the places from start ([b] or [1]) on.

    What would lie past the last place is left out. Raises ShapeError for dims that do not fit.
    """
    b, s, n, d = keys.shape
    if keys.shape != values.shape or cache.shape != (2, b, n, cache.shape[3], d):
        raise ShapeError(
            f"cache {list(cache.shape)} for keys {list(keys.shape)} and values {list(values.shape)}; needs "
            f"[2, {b}, {n}, places, {d}]"
        )
    first = bounded(start.reshape(-1, 1), cache.shape[3], negative=False)
    place = jnp.broadcast_to(first, (b, 1)) + jnp.arange(s, dtype=jnp.int32)
    new = jnp.stack([keys, values]).astype(cache.dtype)
    # advanced indices on both sides of a slice put their dims first: [b, s, 2, n, d]
    return cache.at[:, jnp.arange(b)[:, None], :, place].set(jnp.transpose(new, (1, 2, 0, 3, 4)), mode="drop")


@op(method=False)
def tokens_cached(cache: Array, new: Array, start: Array) -> Array:
    """cache [b, n, places, d] with new [b, s, n, d] at the places from start [b] on.

    What would lie past the last place is left out. Raises ShapeError for dims that do not fit.
    """
    b, s, n, d = new.shape
    if cache.shape != (b, n, cache.shape[2], d) or start.shape != (b,):
        raise ShapeError(
            f"cache {list(cache.shape)} from {list(start.shape)} on for {list(new.shape)}; needs [{b}, {n}, places, "
            f"{d}] and [{b}]"
        )
    new = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    if b == 1 and s == 1:  # one slice, in place; it would move where it did not fit
        place = jnp.minimum(start[0], cache.shape[2] - 1)
        held = lax.dynamic_slice_in_dim(cache, place, 1, 2)
        written = lax.optimization_barrier(jnp.where(place == start[0], new, held))
        # without barriers XLA would write once for who reads the cache and once for the result, and copy it five times
        return lax.optimization_barrier(lax.dynamic_update_slice_in_dim(cache, written, place, 2))
    place = bounded(start[:, None], cache.shape[2], negative=False) + jnp.arange(s, dtype=jnp.int32)
    # advanced indices on both sides of a slice put their dims first: [b, s, n, d]
    rows = jnp.arange(b, dtype=jnp.int32)[:, None]
    return cache.at[rows, :, place].set(jnp.swapaxes(new, 1, 2), mode="drop")


@op(method=False)
def rows_put(held: Array, new: Array, rows: Array) -> Array:
    """held [n, ...] with new [b, ...] in the rows [b]; those of rows below 0 are left out. Raises ShapeError for dims
    that do not fit."""
    if held.shape[1:] != new.shape[1:] or rows.shape != new.shape[:1]:
        raise ShapeError(
            f"rows_put: {list(new.shape)} into {list(rows.shape)} rows of {list(held.shape)}; needs [b, ...], [b] and "
            "[n, ...]"
        )
    return held.at[jnp.where(rows < 0, held.shape[0], rows)].set(new.astype(held.dtype), mode="drop")


@op(method=False)
def token_codes(x: Array) -> tuple[Array, Array]:
    """Tokens [..., d] in 8 bits: codes, int8 [..., d], and float32 scales [..., 1], the largest number of each being
    127 scales. A token of zeros has the scale 0."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    codes = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return codes, scale.astype(jnp.float32)


@op(amp="low", method=False)
def attend_cached(
    query: Array,
    keys: Array,
    values: Array,
    start: Array,
    window: int = 0,
    scale: float | None = None,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    softcap: float = 0.0,
    place_bias: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention of queries at the places start, start + 1, ... to the places of a cache up to their own.

    query [b, s, h, d], keys [b, n, places, d], values [b, n, places, e], start [b] -> [b, s, h, e]. window: so many
    places, its own the last of them; all if 0. scale is d ** -0.5 unless given; softcap: as of
    scaled_dot_product_attention. key_scales, value_scales: what codes of token_codes are multiplied by, [b, n, places,
    1]. place_bias: what is added to the scores of the key at each place, [h, places or more]. sinks: as of sink_share,
    [h]. Scores are computed in at least float32. Raises ShapeError for dims that do not fit.
    """
    b, s, h, d = query.shape
    n, places = keys.shape[1:3]
    if keys.shape != (b, n, places, d) or values.shape[:3] != (b, n, places) or h % n or start.shape != (b,):
        raise ShapeError(
            f"attend_cached: query {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}, start "
            f"{list(start.shape)}; needs [b, s, h, d], [b, n, places, d], [b, n, places, e] and [b], n dividing h"
        )
    acc = jnp.promote_types(query.dtype, jnp.float32)
    keys, values = _levels(keys, query.dtype), _levels(values, query.dtype)
    grouped = jnp.transpose(query.reshape(b, s, n, h // n, d), (0, 2, 3, 1, 4)).reshape(b, n, h // n * s, d)
    scores = jnp.einsum("bnrd,bntd->bnrt", grouped, keys, preferred_element_type=acc)
    scores = _scaled(scores, key_scales)
    scores = scores.reshape(b, n, h // n, s, places) * (d**-0.5 if scale is None else scale)
    scores = soft_capped(scores, softcap)
    if place_bias is not None:
        scores = scores + place_bias[:, :places].reshape(n, h // n, 1, places).astype(acc)
    place = start.reshape(b, 1, 1, 1, 1).astype(jnp.int32) + jnp.arange(s, dtype=jnp.int32)[:, None]
    key = jnp.arange(places, dtype=jnp.int32)
    seen = (key <= place) & (key > place - window) if window else key <= place
    scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        weights = weights * _shares(jax.nn.logsumexp(scores, axis=-1), sinks, n)[..., None]
    weights = weights.reshape(b, n, h // n * s, places)
    weights = _scaled(weights, value_scales).astype(values.dtype)
    out = jnp.einsum("bnrt,bnte->bnre", weights, values, preferred_element_type=acc)
    out = jnp.transpose(out.reshape(b, n, h // n, s, -1), (0, 3, 1, 2, 4))
    return out.reshape(b, s, h, values.shape[-1]).astype(query.dtype)


def _shares(logsumexp: Array, sinks: Array, kv_heads: int) -> Array:
    """sink_share of logsumexp [b, n, h / n, s]."""
    return jax.nn.sigmoid(logsumexp - sinks.astype(logsumexp.dtype).reshape(kv_heads, -1, 1))


@op(amp="fp32", method=False)
def sink_share(logsumexp: Array, sinks: Array) -> Array:
    """The part of attention that keys have where each head has a sink besides, a score that takes its part of the
    softmax and gives nothing: [b, h, s] of the logarithms of sums of exponentials of scores, and sinks [h], -> the
    same.

    Source: arXiv:2309.17453; learned for each head, arXiv:2508.10925. Raises ShapeError for dims that do not fit.
    """
    if logsumexp.ndim != 3 or sinks.shape != logsumexp.shape[1:2]:
        raise ShapeError(
            f"sink_share: logsumexp {list(logsumexp.shape)} and sinks {list(sinks.shape)}; needs [b, h, s] and [h]"
        )
    return jax.nn.sigmoid(logsumexp - sinks.astype(logsumexp.dtype)[:, None])


def _levels(codes: Array, dtype: Any) -> Array:
    """The values of codes before scaling, exact in any floating dtype of 8 bits and more; other values as they are."""
    return codes.astype(dtype) if codes.dtype == jnp.int8 else codes


def _scaled(scores: Array, scales: Array | None) -> Array:
    """scores [b, n, r, t] times scales [b, n, t, 1]."""
    return scores if scales is None else scores * jnp.swapaxes(scales, 2, 3).astype(scores.dtype)


@op(method=False)
def cache_mask(start: Array, queries: int, keys: int, mask: Array | None = None) -> Array:
    """The mask of a cache for queries at the places start, start + 1, ...: the places up to their own, [b, 1, s, keys].

    Bool, or with a mask [b or 1, 1 or heads, s, up to keys] that is added: it, with -inf for what is not seen.
    Raises ShapeError for a mask of more keys.
    """
    query = jnp.arange(queries, dtype=jnp.int32)[:, None]
    seen = jnp.arange(keys, dtype=jnp.int32) <= start.reshape(-1, 1, 1, 1).astype(jnp.int32) + query
    if mask is None:
        return seen
    if mask.ndim != 4 or mask.shape[-1] > keys:
        raise ShapeError(f"attention mask {list(mask.shape)} for a cache of {keys} places; needs [batch, 1, s, keys]")
    mask = jnp.pad(mask, [(0, 0)] * 3 + [(0, keys - mask.shape[-1])], constant_values=mask.dtype == jnp.bool_)
    if mask.dtype == jnp.bool_:
        return seen & mask
    return jnp.where(seen, mask, jnp.asarray(-jnp.inf, mask.dtype))


@op(method=False)
def token_places(cumulated: Array, start: Array, tokens: int) -> tuple[Array, Array]:
    """The sequence of each token, of sequences that lie end to end, and its place counted from the sequence's start
    [b].

    Both [tokens]; a token past the last sequence gets the sequence b, which there is not. cumulated: [b + 1].
    """
    ends = cumulated.reshape(-1).astype(jnp.int32)
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends[1:], token, side="right").astype(jnp.int32)
    first = ends.at[sequence].get(mode="clip")
    return sequence, token - first + start.reshape(-1).astype(jnp.int32).at[sequence].get(mode="clip")


@op(method=False)
def blocks_written(cache: Array, new: Array, block_tables: Array, sequence: Array, place: Array) -> Array:
    """cache [blocks, n, block_size, d] with the tokens new [tokens, n, d] at their place in their sequence's blocks.

    block_tables [b, blocks of a sequence]: sequence i keeps places block_size * j on in block block_tables[i, j].
    Tokens of no sequence, or of a block that is below 0, are left out.
    """
    blocks, size = cache.shape[0], cache.shape[2]
    block = block_tables.at[sequence, place // size].get(mode="fill", fill_value=blocks)
    return cache.at[bounded(block, blocks, negative=False), :, place % size].set(new.astype(cache.dtype), mode="drop")


@op(method=False)
def blocks_gathered(cache: Array, block_tables: Array) -> Array:
    """Each sequence's places in order: [blocks, n, block_size, d], [b, count] -> [b, count * block_size, n, d]."""
    b, count = block_tables.shape
    found = read(cache, (jnp.maximum(block_tables, 0),))
    return jnp.swapaxes(found, 2, 3).reshape(b, count * cache.shape[2], cache.shape[1], cache.shape[3])


_PLACES_A_ROUND = 128
"""Places of each sequence whose scores are computed at once; measured on a CPU, 256 are no faster."""
_GPU_PLACES_A_ROUND = 4096
"""The same on a GPU, where the host waits for the device before each round of a number that is not known."""


@op(amp="low", method=False)
def attend_blocks(
    query: Array,
    keys: Array,
    values: Array,
    block_tables: Array,
    start: Array,
    window: int = 0,
    scale: float | None = None,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    softcap: float = 0.0,
    place_bias: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention of queries at the places start, start + 1, ... to their sequence's places, in blocks, up to theirs.

    query [b, s, h, d], keys [blocks, n, block_size, d], values [blocks, n, block_size, e], block_tables [b, count] as
    of blocks_written, start [b] -> [b, s, h, e]. window, scale: as of attend_cached; key_scales, value_scales likewise,
    [blocks, n, block_size, 1]; softcap, place_bias and sinks too. A round takes the same places of
    all sequences, and there are as many rounds as the longest needs: to a shorter one the later rounds add exact zeros,
    so that its bits do not depend on the others. What lies in a block past a sequence's end counts for nothing, be it
    NaN. Raises ShapeError for dims that do not fit.
    """
    b, s, h, d = query.shape
    blocks, n, size, width = values.shape
    if keys.shape != (blocks, n, size, d) or h % n or start.shape != (b,) or block_tables.shape[:-1] != (b,):
        raise ShapeError(
            f"attend_blocks: query {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}, tables "
            f"{list(block_tables.shape)}, start {list(start.shape)}; needs [b, s, h, d], [blocks, n, size, d], "
            "[blocks, n, size, e], [b, count] and [b], n dividing h"
        )
    acc = jnp.promote_types(query.dtype, jnp.float32)
    start = start.astype(jnp.int32)
    places_a_round = _GPU_PLACES_A_ROUND if select.backend() == "gpu" else _PLACES_A_ROUND
    together = min(max(1, places_a_round // size), block_tables.shape[1])
    tables = jnp.maximum(jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % together)), constant_values=-1), 0)
    places, rows = together * size, h // n * s
    grouped = jnp.transpose(query.reshape(b, s, n, h // n, d), (0, 2, 3, 1, 4)).reshape(b, n, rows, d)
    scaling = d**-0.5 if scale is None else scale
    query_place = start[:, None] + jnp.arange(s, dtype=jnp.int32)
    query_place = jnp.broadcast_to(query_place[:, None], (b, h // n, s)).reshape(b, 1, rows, 1)

    biases = None
    if place_bias is not None:
        most_places = tables.shape[1] * size
        padding = max(0, most_places - place_bias.shape[1])
        biases = jnp.pad(place_bias.astype(acc), ((0, 0), (0, padding)))[:, :most_places]
        biases = jnp.repeat(biases.reshape(n, h // n, most_places), s, 1)

    def fetch(cache: Array, ids: Array) -> Array:
        return _levels(jnp.swapaxes(read(cache, (ids,), "clip"), 1, 2), query.dtype).reshape(
            b, n, places, cache.shape[-1]
        )

    def attend(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, mixed = state
        ids = lax.dynamic_slice_in_dim(tables, number * together, together, 1)
        place = number * places + jnp.arange(places, dtype=jnp.int32)
        scores = jnp.einsum("bnrd,bntd->bnrt", grouped, fetch(keys, ids), preferred_element_type=acc)
        scores = scores if key_scales is None else _scaled(scores, fetch(key_scales, ids))
        seen = (place <= query_place) & (place > query_place - window) if window else place <= query_place
        scores = soft_capped(scores * scaling, softcap)
        if biases is not None:
            scores = scores + lax.dynamic_slice_in_dim(biases, number * places, places, 2)
        scores = jnp.where(seen, scores, -jnp.inf)
        is_in = (place < start[:, None] + s)[:, None, :, None]
        rows_of_values = jnp.where(is_in, fetch(values, ids), jnp.zeros((), query.dtype))
        larger = jnp.maximum(most, scores.max(-1))
        base = jnp.where(larger == -jnp.inf, 0, larger)
        weights, factor = jnp.exp(scores - base[..., None]), jnp.exp(most - base)
        scaled = weights if value_scales is None else _scaled(weights, jnp.where(is_in, fetch(value_scales, ids), 0))
        added = jnp.einsum(
            "bnrt,bnte->bnre", scaled.astype(rows_of_values.dtype), rows_of_values, preferred_element_type=acc
        )
        return larger, total * factor + weights.sum(-1), mixed * factor[..., None] + added

    empty = jnp.full((b, n, rows), -jnp.inf, acc), jnp.zeros((b, n, rows), acc), jnp.zeros((b, n, rows, width), acc)
    rounds = jnp.minimum((start.max() + s + places - 1) // places, tables.shape[1] // together)
    first = jnp.maximum(start.min() - window + 1, 0) // places if window else 0
    is_one = tables.shape[1] == together
    most, total, mixed = attend(jnp.int32(0), empty) if is_one else lax.fori_loop(first, rounds, attend, empty)
    out = (mixed / total[..., None]).reshape(b, n, h // n, s, width)
    if sinks is not None:
        out = out * _shares((most + jnp.log(total)).reshape(b, n, h // n, s), sinks, n)[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, s, h, width).astype(query.dtype)


@op(method=False)
def block_angles(rope_emb: Array, sequence: Array, place: Array, adjacent: bool = True) -> tuple[Array, Array]:
    """cos and sin of each token, [tokens, 1, d]: rope_emb [2, b or 1, places, 1, d / 2] is that of pairs."""
    if rope_emb.ndim != 5 or rope_emb.shape[0] != 2 or rope_emb.shape[3] != 1:
        raise ShapeError(
            f"rope_emb {list(rope_emb.shape)}; needs [2, batch or 1, places, 1, head_dim / 2], cosines and sines"
        )
    row = sequence if rope_emb.shape[1] > 1 else jnp.zeros_like(sequence)
    found = rope_emb[:, :, :, 0].at[:, row, place].get(mode="clip")
    full = jnp.repeat(found, 2, -1) if adjacent else jnp.concatenate([found, found], -1)
    return full[0][:, None], full[1][:, None]


@op(method=False)
def stage_mask(new: Array, longest: tuple[int, int], mask: Array | None = None, later: Array | None = None) -> Array:
    """mask for sequences with new > 0, later for the others, 0 past the end of either: [b, 1, s, t] for longest (s, t).

    new: [b, 1]. mask [b, 1, *, *] and later [b, 1, 1, *] are added to scores; None adds nothing.
    """
    given = [x for x in (mask, later) if x is not None]

    def fitted(x: Array | None) -> Array:
        if x is None:
            return jnp.zeros((), given[0].dtype)
        x = x[:, :, : longest[0], : longest[1]]
        rows = 0 if x.shape[2] == 1 else longest[0] - x.shape[2]
        return jnp.pad(x, [(0, 0), (0, 0), (0, rows), (0, longest[1] - x.shape[3])])

    return jnp.where(new.reshape(-1, 1, 1, 1) > 0, fitted(mask), fitted(later))


@op(method=False)
def padded_seen(
    queries: Array, keys: Array, longest: tuple[int, int], causal: bool = False, before: int = 0
) -> tuple[Array, Array]:
    """The mask of padded sequences of these lengths [b, 1], bool [b, 1, s or 1, t], and their queries, bool [b, 1, s,
    1].

    causal: query i sees the keys up to i + before.
    """
    query = jnp.arange(longest[0], dtype=jnp.int32)[:, None]
    key = jnp.arange(longest[1], dtype=jnp.int32)
    seen = key < keys.reshape(-1, 1, 1, 1)
    return seen & (key <= query + before) if causal else seen, query < queries.reshape(-1, 1, 1, 1)


ALIASES: dict[str, str] = {}
