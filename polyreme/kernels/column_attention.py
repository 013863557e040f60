"""Attention under a mask of row bounds for each key: only blocks that hold a seen pair are computed, in any pass.

For each block of queries a loop walks the blocks of keys that it sees, as many as the bounds leave, and merges what
they give by logsumexp; blocks that are seen whole use no mask. Memory grows with s + t. Sources: arXiv:2410.01359;
arXiv:2307.08691, algorithms 1 and 2.

Shape legend: b batch, h query heads, n key heads, m mask heads, s queries, t keys, d head dim; an entry is a batch
entry and a mask head, with p key heads of g query heads each; r queries or keys of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from polyreme.errors import ConfigError
from polyreme.kernels import attention_blocked, select
from polyreme.kernels.attention import check, plain_with_logsumexp
from polyreme.kernels.attention_blocked import AttentionSpec, Draw, ScoreBlock
from polyreme.kernels.columns import (
    BLOCK,
    FULL,
    HIDDEN,
    NEVER,
    PARTIAL,
    Columns,
    kinds,
    seen,
    seen_between,
    without_empty,
)
from polyreme.kernels.custom_vjp import custom_vjp


def column_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    columns: Columns,
    *,
    scale: float | None = None,
    dropout_key: jax.Array | None = None,
    dropout_rate: float = 0.0,
    origin: jax.Array | None = None,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """kernels.attention of q [b, s, h, d], k and v [b, t, n, d] under a mask of 1, n or h heads -> out, logsumexp.

    The logsumexp of the scores is [b, h, s], in float32 or wider, -inf for a query that sees no key, which gives 0.
    Reverse mode of any order; from the second on it goes through attention_blocked and keeps the scores. The same loop
    runs on every device; arrays of open sizes or none, and select.attention_only, take the plain form. Raises as
    attention does.

    >>> q = k = v = jnp.ones((1, 3, 2, 4))
    >>> first_two = Columns(jnp.array([[0, 2], [0, 2], [2, 3]], jnp.int32)[None, None])
    >>> column_attention(q, k, v, first_two)[1].shape
    (1, 2, 3)
    """
    check(q, k, v, None, dropout_key, dropout_rate)
    spec = AttentionSpec(False, float(q.shape[-1] ** -0.5) if scale is None else scale, dropout_rate, softcap)
    draw = attention_blocked.draw_of(dropout_key, origin) if dropout_rate > 0 else None
    in_blocks = all(isinstance(size, int) and size > 0 for size in (*q.shape, *k.shape))
    for kernel in select.attention_order(free=("efficient",)):
        if kernel == "efficient" and in_blocks:
            out, lse = attend(spec, q, k, v, columns, draw)
            return out, shown_logsumexp(lse)
        if kernel in ("efficient", "math"):
            return column_attention_plain(q, k, v, columns, spec=spec, draw=draw)
    raise ConfigError(
        f"attention by columns: q {list(q.shape)}, k {list(k.shape)}; FLASH_ATTENTION takes no mask, allow "
        "EFFICIENT_ATTENTION or MATH"
    )


def column_attention_plain(q, k, v, columns: Columns, *, spec: AttentionSpec, draw: Draw | None):
    """The plain twin of column_attention: the mask is made whole."""
    mask = seen(columns.alike(), q.shape[1])
    m, h = mask.shape[1], q.shape[2]
    mask = mask if m in (1, h) else jnp.repeat(mask, h // m, 1)
    return plain_with_logsumexp(spec, q, k, v, mask, draw)


def shown_logsumexp(lse) -> jax.Array:
    """[b, n, g, s, 1], +inf for a query without a key -> [b, n * g, s], -inf there."""
    b, n, g, s, _ = lse.shape
    return jnp.where(lse == jnp.inf, -jnp.inf, lse).reshape(b, n * g, s)


@custom_vjp(0)
def attend(spec: AttentionSpec, q, k, v, columns: Columns, draw: Draw | None) -> tuple[jax.Array, jax.Array]:
    """-> out as q, logsumexp [b, n, h / n, s, 1]: +inf for a row without a key. spec.causal is not read."""
    return _BlockWalk(spec, q, k, v, columns, draw).forward()


def _forward(spec: AttentionSpec, q, k, v, columns, draw):
    # the function itself, so that a derivative of this pass meets its rule again, not a loop of unknown length
    out, lse = attend(spec, q, k, v, columns, draw)
    return (out, lse), (q, k, v, columns, draw, out, lse)


def _backward(spec: AttentionSpec, residuals, cotangents):
    return (*pull(spec, *residuals, *cotangents), None, None)


attend.defvjp(_forward, _backward)


@custom_vjp(0)
def pull(spec: AttentionSpec, q, k, v, columns: Columns, draw: Draw | None, out, lse, dout, dlse) -> tuple:
    """-> dq, dk, dv of attend; with out and lse of more keys than these, what these add."""
    return _BlockWalk(spec, q, k, v, columns, draw).backward(out, lse, dout, dlse)


def _pull_forward(spec: AttentionSpec, *inputs):
    return pull(spec, *inputs), inputs


def _pull_backward(spec: AttentionSpec, inputs, cotangents):
    q, k, v, columns, draw, *rest = inputs

    def by_spans(q, k, v, out, lse, dout, dlse):
        residuals = (q, k, v, columns, draw, out, lse)
        return attention_blocked.backward(spec._replace(causal=False), residuals, dout, dlse)[:3]

    dq, dk, dv, *others = jax.vjp(by_spans, q, k, v, *rest)[1](cotangents)
    return dq, dk, dv, None, None, *others


pull.defvjp(_pull_forward, _pull_backward)


class _BlockCounts(NamedTuple):
    """Counts: mask heads and key parts of a batch entry, heads of an entry, lengths and numbers of blocks."""

    mask_heads: int
    parts: int
    p: int
    g: int
    queries: int
    rows: int
    keys: int
    columns: int


class _BlockWalk:
    """The arrays cut in entries and blocks, so that one index finds a block, and the loops over them.

    Queries lie as [b * m * rows, p, g, r, d], keys and values as [b * parts * columns, p, r, d].
    """

    def __init__(self, spec: AttentionSpec, q, k, v, columns: Columns, draw: Draw | None):
        (b, s, h, _), (t, n) = q.shape, k.shape[1:3]
        self.spec, self.draw, self.q, self.k = spec._replace(causal=False), draw, q, k
        columns = columns.alike()
        m = columns.bounds.shape[1]
        parts = min(m, n)
        queries, keys = min(BLOCK, s), min(BLOCK, t)
        heads = (m, parts, n // parts, h * parts // (m * n))
        self.cut = _BlockCounts(*heads, queries, -(-s // queries), keys, -(-t // keys))
        self.bounds = self._bounds(columns.bounds, b, t)
        self.least, self.most = self.bounds.min(2), self.bounds.max(2)
        blocks = columns.blocks
        self.blocks = None if blocks is None else jnp.broadcast_to(blocks, (b, *blocks.shape[1:]))
        self.qs, self.ks, self.vs = self._by_rows(q) * spec.scale, self._by_columns(k), self._by_columns(v)

    def forward(self):
        """Forward pass: out and logsumexp as column_attention returns them."""

        def row(carry, block):
            place, qi = block

            def step(column, masked, so_far):
                ke, ve = self._keys(place, column)
                part, lse = attention_blocked.forward_block(self._block(place, column, masked), qi[None], ke, ve)
                lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
                weight, part_weight, lse = attention_blocked.merge_weights(so_far[1], lse[0])
                return so_far[0] * weight + part[0] * part_weight, lse

            nothing = (
                jnp.zeros((*qi.shape[:-1], self.vs.shape[-1]), qi.dtype),
                jnp.full((*qi.shape[:-1], 1), -jnp.inf, qi.dtype),
            )
            return carry, self._over_columns(place, step, nothing)

        _, (out, lse) = lax.scan(row, (), (self._places(), self.qs))
        lse = self._whole(jnp.where(lse == -jnp.inf, jnp.inf, lse))
        return self._whole(out).astype(self.q.dtype), attention_blocked.group(lse, self.k.shape[2])

    def backward(self, out, lse, dout, dlse):
        """Backward pass: dq, dk, dv, shaped as q, k, v."""
        do, lse = self._by_rows(dout), self._by_rows(_ungrouped(lse), jnp.inf)
        delta = (do * self._by_rows(out)).sum(-1, keepdims=True) - self._by_rows(_ungrouped(dlse))

        def row(carry, block):
            place, qi, *rest = block

            def step(column, masked, sums):
                ke, ve = self._keys(place, column)
                inputs = (x[None] for x in (qi, *rest))
                dq, dk, dv, _ = attention_blocked.backward_block(self._block(place, column, masked), *inputs, ke, ve)
                key_place = self._key_place(place, column)
                return sums[0] + dq[0], _added(sums[1], dk, key_place), _added(sums[2], dv, key_place)

            dq, *carry = self._over_columns(place, step, (jnp.zeros_like(qi), *carry))
            return tuple(carry), dq

        empty = tuple(jnp.zeros_like(attention_blocked.swap(x)) for x in (self.ks, self.vs))
        (dk, dv), dq = lax.scan(row, empty, (self._places(), self.qs, do, lse, delta))
        dq = (self._whole(dq) * self.spec.scale).astype(self.q.dtype)
        return dq, self._whole_keys(dk), self._whole_keys(dv)

    # ---- one block ----

    def _over_columns(self, place, step, state):
        """step(column, masked, state) -> state, for each block of keys that the block of queries sees."""
        entry, row = place // self.cut.rows, place % self.cut.rows
        start = row * self.cut.queries
        kind = kinds(self.least[entry], self.most[entry], start, jnp.minimum(start + self.cut.queries, self.q.shape[1]))
        if self.blocks is not None:
            shown = self.blocks[entry // self.cut.mask_heads, entry % self.cut.mask_heads, row]
            kind = jnp.where(shown, kind, HIDDEN)
        order = jnp.argsort(kind, stable=True).astype(jnp.int32)
        partial, full = ((kind == what).sum(dtype=jnp.int32) for what in (PARTIAL, FULL))
        state = lax.fori_loop(0, partial, lambda i, state: step(order[i], True, state), state)
        return lax.fori_loop(partial, partial + full, lambda i, state: step(order[i], False, state), state)

    def _block(self, place, column, masked: bool) -> ScoreBlock:
        entry, row = place // self.cut.rows, place % self.cut.rows
        start = row * self.cut.queries
        mask = None
        if masked:
            mask = seen_between(self.bounds[entry, column], start + jnp.arange(self.cut.queries, dtype=jnp.int32))
        heads = self.q.shape[2]
        mask_heads = self.cut.mask_heads
        origin = {"batch": entry // mask_heads, "head": entry % mask_heads * (heads // mask_heads)}
        origin |= {"row": start, "col": column * self.cut.keys}
        return ScoreBlock(self.spec, mask, 0, attention_blocked.part_of(self.draw, heads, **origin))

    def _key_place(self, place, column):
        """The index of a block of keys."""
        entry, m = place // self.cut.rows, self.cut.mask_heads
        part = entry // m * self.cut.parts + entry % m * self.cut.parts // m
        return part * self.cut.columns + column

    def _keys(self, place, column):
        key_place = self._key_place(place, column)
        return self.ks[key_place][None], self.vs[key_place][None]

    # ---- cutting and joining ----

    def _places(self):
        return jnp.arange(self.qs.shape[0], dtype=jnp.int32)

    def _bounds(self, bounds, b: int, t: int):
        """-> [b * m, columns, r, 2 + 2 i]; keys that only fill the last block are seen by no row."""
        _, m, _, limits = bounds.shape
        filled = self.cut.columns * self.cut.keys
        nobody = jnp.broadcast_to(jnp.array([NEVER, 0] * (limits // 2), jnp.int32), (b, m, filled - t, limits))
        bounds = jnp.broadcast_to(without_empty(bounds), (b, m, t, limits))
        bounds = jnp.concatenate([bounds, nobody], 2)
        return bounds.reshape(b * m, self.cut.columns, self.cut.keys, limits)

    def _by_rows(self, x, fill=0.0):
        """[b, s, h, x] -> [b * m * rows, p, g, r, x], in float32 or wider."""
        b, s, _, width = x.shape
        m, p, g, r, rows = self.cut.mask_heads, self.cut.p, self.cut.g, self.cut.queries, self.cut.rows
        x = jnp.pad(x, ((0, 0), (0, rows * r - s), (0, 0), (0, 0)), constant_values=fill)
        x = x.reshape(b, rows, r, m, p, g, width).transpose(0, 3, 1, 4, 5, 2, 6)
        return _wide(x.reshape(b * m * rows, p, g, r, width))

    def _whole(self, x):
        """The inverse of _by_rows."""
        b, s, h, _ = self.q.shape
        m, p, g, r, rows = self.cut.mask_heads, self.cut.p, self.cut.g, self.cut.queries, self.cut.rows
        x = x.reshape(b, m, rows, p, g, r, -1).transpose(0, 2, 5, 1, 3, 4, 6)
        return x.reshape(b, rows * r, h, -1)[:, :s]

    def _by_columns(self, x):
        """[b, t, n, d] -> [b * parts * columns, p, r, d], in float32 or wider."""
        b, t, _, d = x.shape
        _, parts, p, _, _, _, r, columns = self.cut
        x = jnp.pad(x, ((0, 0), (0, columns * r - t), (0, 0), (0, 0)))
        x = x.reshape(b, columns, r, parts, p, d).transpose(0, 3, 1, 4, 2, 5)
        return _wide(x.reshape(b * parts * columns, p, r, d))

    def _whole_keys(self, x):
        """[b * parts * columns, p, d, r] -> [b, t, n, d]"""
        b, t, n, _ = self.k.shape
        _, parts, p, _, _, _, r, columns = self.cut
        x = x.reshape(b, parts, columns, p, -1, r).transpose(0, 2, 5, 1, 3, 4)
        return x.reshape(b, columns * r, n, -1)[:, :t].astype(self.k.dtype)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _ungrouped(x):
    """[b, n, g, s, 1] -> [b, s, n * g, 1]."""
    b, n, g, s, _ = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, s, n * g, 1)


def _added(total, part, place):
    """total [blocks, ...] with part [1, ...] added to one of them."""
    return lax.dynamic_update_index_in_dim(total, total[place] + part[0], place, 0)
