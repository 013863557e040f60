"""Attention by query blocks with its own backward pass: the CPU path of kernels.attention.

Shape legend: b batch, n key heads, g query heads that share a key head, s queries (r in one block), t keys (e of them
needed by a block), d head dim, x width of a value. Inside, arrays are [b, n, g, s, d] (queries), [b, n, t, d] (keys)
and [b, n, t, x] (values); the arithmetic is in float32 or wider whatever the input dtype. A block has every batch entry
and head, or by_head one of each.
"""

import math
from collections.abc import Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from polyreme.kernels.columns import Columns, seen
from polyreme.kernels.custom_vjp import custom_vjp

BLOCK_QUERIES = 64  # measured best of 32, 64, 128 and 256 at seq 256, head dim 32, two cores
HEAD_QUERIES = 128  # measured best of 32, 64, 128 and 256 by head, at seq 128 and 256
HEAD_SCORES = HEAD_QUERIES * 256
"""Most scores of a block by head: with what is made of them they stay in a core's second-level cache."""
MAX_SPANS = 8  # spans are unrolled, the blocks within one run in a loop: program size stays bounded


class AttentionSpec(NamedTuple):
    """Static parameters of a trace; softcap: as of soft_capped. by_head: batch entries and key heads come one after the
    other."""

    causal: bool
    scale: float
    dropout_rate: float
    softcap: float = 0.0
    by_head: bool = False


class Draw(NamedTuple):
    """Random numbers of dropout: one for each (batch entry, head, query, key), by its place.

    key: a jax random key, as uint32 [2]. origin: uint32 [batch, head, query, key, heads]: where these arrays begin in
    the whole, and how many heads that has (0: as many as here), so that a device that holds a part draws what one
    device would draw there.
    """

    key: jax.Array
    origin: jax.Array


def draw_of(key: jax.Array | None, origin: jax.Array | None = None) -> Draw | None:
    """The Draw for a key of either kind, None for None; without origin the arrays are the whole."""
    if key is None:
        return None
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return Draw(key, jnp.zeros(5, jnp.uint32) if origin is None else origin)


def part_of(draw: Draw | None, heads: int, *, batch: Any = 0, head: Any = 0, row: Any = 0, col: Any = 0) -> Draw | None:
    """The Draw of a part of the arrays, which have `heads` query heads, that begins at these places in them."""
    if draw is None:
        return None
    places = jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in (batch, head, row, col)])
    total = draw.origin[4:]
    return draw._replace(origin=jnp.concatenate([draw.origin[:4] + places, jnp.where(total == 0, heads, total)]))


class QueryBlocks(NamedTuple):
    """Queries [start, stop) walked in equal blocks of `rows`, against the first `keys` keys."""

    start: int
    stop: int
    rows: int
    keys: int

    @property
    def blocks(self) -> int:
        """The number of blocks in the span."""
        return (self.stop - self.start) // self.rows


def suits_head(q_shape: Sequence[int], k_shape: Sequence[int]) -> bool:
    """Whether attention of q [b, s, n * g, d] and k [b, t, n, d], of known sizes, is to be walked by head.

    Measured on two cores with benchmarks/attention_by_head.py: at 64 queries both ways are even; with 512 keys by head
    takes less processor time, but all heads at once use the second core more, and are sooner on a quiet machine.
    """
    sizes = (*q_shape, *k_shape)
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    (_, s, h, _), (_, t, n, _) = q_shape, k_shape
    return s >= HEAD_QUERIES and h // n * HEAD_QUERIES * t <= HEAD_SCORES


def spans(spec: AttentionSpec, s: int, t: int) -> list[QueryBlocks]:
    """The queries cut in at most MAX_SPANS + 1 spans, each with the keys that its last query needs; in one and a rest
    where all need all keys.

    About as many spans as blocks in a span: fewer waste work on keys that are not seen, more keep more blocks alive at
    once (measured best at 256 and 1024 queries: 2 of 1, 2 and 4 spans; 4 of 1, 2, 4 and 8).

    >>> spans(AttentionSpec(True, 1.0, 0.0), 100, 100)
    [QueryBlocks(start=0, stop=64, rows=64, keys=64), QueryBlocks(start=64, stop=100, rows=36, keys=100)]
    """
    size = HEAD_QUERIES if spec.by_head else BLOCK_QUERIES
    whole, tail = divmod(s, size)
    count = min(MAX_SPANS, max(1, math.isqrt(s // BLOCK_QUERIES))) if spec.causal else 1
    step = size * -(-whole // count) or size
    edges = [*range(0, whole * size, step), whole * size]
    cuts = [(a, b, size) for a, b in pairwise(edges) if b > a]
    if tail:
        cuts.append((s - tail, s, tail))
    return [QueryBlocks(a, b, rows, max(0, min(t, b + t - s)) if spec.causal else t) for a, b, rows in cuts]


@custom_vjp(0)
def attention(spec: AttentionSpec, q, k, v, mask, draw: Draw | None) -> jax.Array:
    """q [b, s, n * g, d], k [b, t, n, d], v [b, t, n, x] -> [b, s, n * g, x]; mask and draw may be None."""
    return forward(spec, q, k, v, mask, draw)[0]


def soft_capped(x, cap: float) -> jax.Array:
    """cap * tanh(x / cap), which stays within cap; x if cap is 0. Source: arXiv:2408.00118, section 2."""
    return cap * jnp.tanh(x / cap) if cap else x


def soft_cap_grad(grad, capped, cap: float) -> jax.Array:
    """The gradient of x, given that of soft_capped(x, cap) and what this is."""
    return grad * (1 - jnp.square(capped / cap)) if cap else grad


def masked(spec: AttentionSpec, scores, mask, offset) -> jax.Array:
    """Scores [b, n, g, r, e] with -inf where a key may not be seen; query row i sees keys up to i + offset."""
    if mask is not None and mask.dtype == jnp.bool_:
        scores = jnp.where(mask, scores, -jnp.inf)
    elif mask is not None:
        scores = scores + mask.astype(scores.dtype)
    if spec.causal:
        shape = scores.shape[-2:]
        row, col = (lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (0, 1))
        scores = jnp.where(col <= row + jnp.int32(offset), scores, -jnp.inf)
    return scores


def grouped_mask(mask, n: int):
    """A mask that broadcasts to [b, h, s, t] as one that broadcasts to [b, n, g, s, t]; Columns as they are."""
    if mask is None or isinstance(mask, Columns):
        return mask
    b, h, s, t = (1,) * (4 - mask.ndim) + mask.shape
    return mask.reshape(b, 1, 1, s, t) if h == 1 else mask.reshape(b, n, h // n, s, t)


def dropout_scale(spec: AttentionSpec, draw: Draw, shape) -> jax.Array:
    """0 or 1 / (1 - rate) for every probability [b, n, g, s, t]."""
    b, n, g, s, t = shape
    batch, head, row, col, heads = draw.origin
    # a key for each query, then a counter over the two words: no two probabilities share a number, whatever the lengths
    rows = row + jnp.arange(s, dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(draw.key, rows)
    entry = (batch + jnp.arange(b, dtype=jnp.uint32)) * jnp.where(heads == 0, n * g, heads)
    pair = (entry[:, None] + head + jnp.arange(n * g, dtype=jnp.uint32)).reshape(b, n, g, 1, 1)
    place = col + jnp.arange(t, dtype=jnp.uint32)
    words = (keys[:, :1], keys[:, 1:], pair, place)
    high, low = threefry2x32_p.bind(*(jnp.broadcast_to(x, shape) for x in words))
    kept = (high ^ low) >= jnp.uint32(round(spec.dropout_rate * 2**32))
    return jnp.where(kept, jnp.float32(1 / (1 - spec.dropout_rate)), jnp.float32(0))


def group(q, n: int) -> jax.Array:
    """[b, s, n * g, d] -> [b, n, g, s, d], in float32 or wider."""
    b, s, h, d = q.shape
    acc = jnp.promote_types(q.dtype, jnp.float32)
    return q.reshape(b, s, n, h // n, d).transpose(0, 2, 3, 1, 4).astype(acc)


def _ungrouped(x, like) -> jax.Array:
    return x.transpose(0, 3, 1, 2, 4).reshape(*like.shape[:3], x.shape[-1]).astype(like.dtype)


def _keys(x) -> jax.Array:
    return x.transpose(0, 2, 1, 3).astype(jnp.promote_types(x.dtype, jnp.float32))


def _rows(x) -> jax.Array:
    # [b, n, g, r, d] -> [b, n, g * r, d]: the heads that share a key head become rows of one product.
    b, n, g, r, d = x.shape
    return x.reshape(b, n, g * r, d)


def swap(x) -> jax.Array:
    """x with its last two dims exchanged."""
    return jnp.swapaxes(x, -1, -2)


class ScoreBlock:
    """One block of scores: its mask, its dropout. mask broadcasts to [b, n, g, r, e]; row i sees keys to i + offset."""

    def __init__(self, spec: AttentionSpec, mask, offset, draw: Draw | None):
        self.spec, self.mask, self.offset, self.draw = spec, mask, offset, draw

    def unmasked(self, qi, ke) -> jax.Array:
        """Scores of what is seen and what is not: qi [b, n, g, r, d], scaled; ke [b, n, e, d] -> [b, n, g, r, e]."""
        raw = (_rows(qi) @ swap(ke)).reshape(*qi.shape[:-1], ke.shape[2])
        return soft_capped(raw, self.spec.softcap)

    def masked(self, scores) -> jax.Array:
        """unmasked(..) with -inf where a key may not be seen."""
        return masked(self.spec, scores, self.mask, self.offset)

    def keep(self, shape):
        """Dropout's factor for the block, or None."""
        if self.draw is None or self.spec.dropout_rate == 0:
            return None
        return dropout_scale(self.spec, self.draw, shape)


def _block_rows(span: QueryBlocks, start, x, dim: int = 3) -> jax.Array:
    """The rows of x of the block at start."""
    return lax.dynamic_slice_in_dim(x, start, span.rows, dim)


def _span_block(spec: AttentionSpec, span: QueryBlocks, start, offset: int, qs, mask, draw) -> ScoreBlock:
    """The block of the span's rows at start, against the keys that the span needs; mask by groups, or Columns."""
    n, g = qs.shape[1:3]
    if isinstance(mask, Columns):
        mask = grouped_mask(seen(mask, span.rows, start, span.keys), n)
    elif mask is not None:
        mask = mask if mask.shape[3] == 1 else _block_rows(span, start, mask)
        mask = mask if mask.shape[4] == 1 else mask[..., : span.keys]
    return ScoreBlock(spec, mask, start + offset, part_of(draw, n * g, row=start))


def _walk(span: QueryBlocks, body, carry) -> tuple[Any, Any]:
    # body(start, carry) -> (carry, y): unrolled for one block, a loop for more; y of the blocks are stacked.
    if span.blocks == 1:
        carry, y = body(span.start, carry)
        return carry, jax.tree.map(lambda a: a[None], y)
    starts = jnp.arange(span.start, span.stop, span.rows, dtype=jnp.int32)
    return lax.scan(lambda c, start: body(start, c), carry, starts)


def _join(stacked) -> jax.Array:
    # [blocks, b, n, g, r, x] -> [b, n, g, blocks * r, x]
    blocks, b, n, g, r, x = stacked.shape
    return jnp.moveaxis(stacked, 0, 3).reshape(b, n, g, blocks * r, x)


def forward(spec: AttentionSpec, q, k, v, mask, draw: Draw | None):
    """(out [b, s, n * g, x], logsumexp [b, n, g, s, 1]: +inf for a query that sees no key)."""
    n = k.shape[2]
    arrays = group(q, n) * spec.scale, _keys(k), _keys(v)
    out, lse = _whole_or_by_head(spec, partial(_forward, spec), arrays, grouped_mask(mask, n), draw)
    return _ungrouped(out, q), lse


def _whole_or_by_head(spec: AttentionSpec, f, arrays, mask, draw):
    """f(*arrays, mask, draw), arrays of [b, n, ...] -> a tree of the same; by head, of one batch entry and key head at
    a time, each with b and n of 1: what is made of a head's scores is then read where it was written, in the cache.
    """
    b, n, g = arrays[0].shape[:3]
    if not spec.by_head:
        return f(*arrays, mask, draw)

    def one(place, arrays):
        entry, head = place // n, place % n
        part = mask
        for dim, index in enumerate((entry, head)):
            if part is not None and part.shape[dim] > 1:
                part = lax.dynamic_slice_in_dim(part, index, 1, dim)
        return f(*arrays, part, part_of(draw, n * g, batch=entry, head=head * g))

    places = jnp.arange(b * n, dtype=jnp.int32)
    apart = jax.tree.map(lambda x: x.reshape(b * n, 1, 1, *x.shape[2:]), arrays)
    return jax.tree.map(lambda x: x.reshape(b, n, *x.shape[3:]), lax.map(lambda xs: one(*xs), (places, apart)))


def _forward(spec: AttentionSpec, qs, ks, vs, mask, draw):
    """forward of queries that are scaled, keys and values by head -> (out [b, n, g, s, x], logsumexp)."""
    s, t = qs.shape[3], ks.shape[2]
    outs, lses = [], []
    for span in spans(spec, s, t):
        ke, ve = ks[:, :, : span.keys], vs[:, :, : span.keys]

        def body(start, carry, span=span, ke=ke, ve=ve):
            block = _span_block(spec, span, start, t - s, qs, mask, draw)
            return carry, forward_block(block, _block_rows(span, start, qs), ke, ve)

        _, (out, lse) = _walk(span, body, ())
        outs.append(_join(out))
        lses.append(_join(lse))
    return jnp.concatenate(outs, 3), jnp.concatenate(lses, 3)


def forward_block(block: ScoreBlock, qi, ke, ve):
    """(out [b, n, g, r, x], logsumexp [b, n, g, r, 1]: +inf for a row that sees no key, whose probabilities are 0)."""
    scores = block.masked(block.unmasked(qi, ke))
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    keep = block.keep(scores.shape)
    dropped = weights if keep is None else weights * keep.astype(weights.dtype)
    out = (_rows(dropped) @ ve).reshape(*qi.shape[:-1], ve.shape[-1]) / safe
    return out, jnp.where(empty, jnp.inf, top + jnp.log(safe))


def _attention_fwd(spec: AttentionSpec, q, k, v, mask, draw):
    out, lse = forward(spec, q, k, v, mask, draw)
    return out, (q, k, v, mask, draw, out, lse)


def merge_weights(lse_a, lse_b) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights of two results over parts of the keys in the result over both, and its logsumexp; -inf where no key is
    seen."""
    top = jnp.maximum(lse_a, lse_b)
    safe = jnp.where(top == -jnp.inf, 0, top)
    weight_a, weight_b = jnp.exp(lse_a - safe), jnp.exp(lse_b - safe)
    total = weight_a + weight_b
    norm = jnp.where(total == 0, 1, total)
    return weight_a / norm, weight_b / norm, jnp.where(total == 0, -jnp.inf, safe + jnp.log(norm))


def backward(spec: AttentionSpec, residuals, dout, dlse=None):
    """(q, k, v, mask, draw, out, lse), dout and the gradient of lse, if it has one -> dq, dk, dv, dmask, None.

    With out and lse of all keys and k and v a part of them, the gradients are that part's: dk and dv are whole, dq is
    to be added up.
    """
    q, k, v, mask, draw, out, lse = residuals
    n, bias = k.shape[2], grouped_mask(mask, k.shape[2])
    arrays = group(q, n) * spec.scale, _keys(k), _keys(v), group(dout, n), group(out, n), lse, dlse
    dq, dk, dv, dbias = _whole_or_by_head(spec, partial(_backward, spec), arrays, bias, draw)
    dq, dk, dv = _ungrouped(dq * spec.scale, q), _keys_grad(dk, k), _keys_grad(dv, v)
    return dq, dk, dv, _mask_grad(dbias, mask, bias), None


def _backward(spec: AttentionSpec, qs, ks, vs, do, out, lse, dlse, bias, draw):
    """backward of arrays by head, the queries scaled -> the gradients of those queries [b, n, g, s, d], keys
    [b, n, d, t] and values [b, n, x, t], of keys that were seen, and that of an added mask, in its dims, or None."""
    s, t = qs.shape[3], ks.shape[2]
    # sum over keys of p dp (arXiv:2205.14135, eq. 4); YNNPACK, which sums, would multiply too, a row at a time
    delta = lax.optimization_barrier(do * out).sum(-1, keepdims=True)
    delta = delta if dlse is None else delta - dlse
    dqs, dbiases, dk, dv = [], [], None, None
    for span in spans(spec, s, t):
        ke, ve = ks[:, :, : span.keys], vs[:, :, : span.keys]

        def body(start, carry, span=span, ke=ke, ve=ve):
            block = _span_block(spec, span, start, t - s, qs, bias, draw)
            rows = partial(_block_rows, span, start)
            dq, dki, dvi, dbias = backward_block(block, rows(qs), rows(do), rows(lse), rows(delta), ke, ve)
            return jax.tree.map(jnp.add, carry, (dki, dvi)) if carry else (dki, dvi), (dq, dbias)

        empty = tuple(jnp.zeros_like(swap(x)) for x in (ke, ve))
        (dki, dvi), (dq, dbias) = _walk(span, body, empty if span.blocks > 1 else ())
        dk, dv = _grown(dk, dki), _grown(dv, dvi)
        dqs.append(_join(dq))
        dbiases.append(dbias)
    return jnp.concatenate(dqs, 3), dk, dv, _bias_grad(dbiases, bias, t)


def backward_block(block: ScoreBlock, qi, do, lse, delta, ke, ve):
    """(dq [b, n, g, r, d], dk [b, n, d, e], dv [b, n, x, e], dbias or None).

    dk and dv are made transposed: the long operand of the product then needs no transpose, which doubles its speed.
    """
    scores = block.unmasked(qi, ke)
    probs = jnp.exp(block.masked(scores) - lse)
    dprobs = (_rows(do) @ swap(ve)).reshape(probs.shape)
    keep = block.keep(probs.shape)
    dropped = probs
    if keep is not None:
        dropped, dprobs = probs * keep.astype(probs.dtype), dprobs * keep.astype(probs.dtype)
    dmasked = probs * (dprobs - delta)
    dscores = soft_cap_grad(dmasked, scores, block.spec.softcap)
    dq = (_rows(dscores) @ ke).reshape(qi.shape)
    dk, dv = swap(_rows(qi)) @ _rows(dscores), swap(_rows(do)) @ _rows(dropped)
    return dq, dk, dv, _bias_block(block, dmasked)


def has_gradient(mask) -> bool:
    """Whether a mask, None or Columns is added to the scores."""
    return mask is not None and not isinstance(mask, Columns) and mask.dtype != jnp.bool_


def _bias_block(block: ScoreBlock, dscores):
    mask = block.mask
    if not has_gradient(mask):
        return None
    dims = tuple(dim for dim in range(5) if mask.shape[dim] == 1)
    return dscores.sum(dims, keepdims=True)


def _bias_grad(parts: list, bias, t: int):
    if not has_gradient(bias):
        return None
    wide = [_pad_last(part, t) if bias.shape[4] > 1 else part for part in parts]
    if bias.shape[3] == 1:
        return reduce(jnp.add, [part.sum(0) for part in wide])
    return jnp.concatenate([_join(part) for part in wide], 3)


def _mask_grad(dbias, mask, bias):
    # by head each gives its own, also where all share one mask
    if dbias is None:
        return None
    shared = tuple(dim for dim in (0, 1) if bias.shape[dim] == 1)
    return dbias.sum(shared, keepdims=True).reshape(mask.shape).astype(mask.dtype)


def _pad_last(x, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _grown(total, part) -> jax.Array:
    # Sum of arrays whose last dim grows from span to span: one fused add and join for each.
    if total is None:
        return part
    have = total.shape[-1]
    return jnp.concatenate([total + part[..., :have], part[..., have:]], -1)


def _keys_grad(x, like) -> jax.Array:
    # [b, n, d, t] (only the keys that were seen) -> [b, t, n, d]
    return _pad_last(x, like.shape[1]).transpose(0, 3, 1, 2).astype(like.dtype)


attention.defvjp(_attention_fwd, backward)
