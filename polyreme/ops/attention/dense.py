"""Attention and rotary positions, on the fused kernels.

Layout [batch, seq, heads, head_dim]; s is the number of queries, t of keys.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote_floating
from polyreme.core.op import DRAWN, Key, composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.attention.over_devices import SegmentExchange, exchange
from polyreme.ops.by_index import bounded, read
from polyreme.ops.ids import check_range
from polyreme.ops.sharding import dim_names, without


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    causal: bool,
    scale: float | None,
    rate: float,
    key: Array | None,
    over: SegmentExchange | None,
    softcap: float,
) -> Array:
    q, k, v = promote_floating(q, k, v)
    batched = q.ndim == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
        mask = mask if mask is None or mask.ndim < 3 else mask[None]
    if mask is not None and dtypes.is_integer(mask.dtype):
        raise DTypeError(
            f"scaled_dot_product_attention: attn_mask is {mask.dtype.name}, whose 1 and 0 could mean either; "
            "use astype('bool') to keep where True, or a floating dtype to add it to the scores"
        )
    if causal and q.ndim == k.ndim == 4 and q.shape[1] != k.shape[1]:
        # the kernel lets the last query see every key, this API the first query see the first key only
        seen = lax.broadcasted_iota(jnp.int32, (q.shape[1], k.shape[1]), 1) <= jnp.arange(q.shape[1])[:, None]
        mask, causal = _combine_masks(mask, seen), False
    if q.ndim == v.ndim == 4 and 0 in (*q.shape[:3], v.shape[-1]):
        out = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        return out if batched else out[0]
    attend = kernels.attention if over is None else over.attend
    options = {"mask": mask, "dropout_key": key, "dropout_rate": rate, "softcap": softcap}
    out = attend(q, k, v, causal=causal, scale=scale, **options)
    return out if batched else out[0]


def _combine_masks(mask: Array | None, seen: Array) -> Array:
    if mask is None:
        return seen
    return mask & seen if mask.dtype == jnp.bool_ else jnp.where(seen, mask, -jnp.inf)


def _attention_rule(call: OpCall) -> ShardingRule:
    """Batches, heads and the queries' places go through, keys are whole; each key head serves a run of query heads."""
    query, key = call.shapes[0], call.shapes[1]
    batch = dim_names(query[:-3], "b")
    q, k, v = ((*batch, seq, "heads", dim) for seq, dim in (("s", "d"), ("t", "d"), ("t", "e")))
    return ShardingRule(
        call.inputs(query=q, key=k, value=v),
        ((*batch, "s", "heads", "e"),),
        whole=frozenset({"t", "d", "e"}),
        aligned=frozenset({"heads"}) if query[-2] != key[-2] else frozenset(),
        roles=(("heads", "heads"),),
    )


@op(amp="low", method=False, saves=True, rule=_attention_rule, real=True)
def attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    over: Any = None,
    softcap: float = 0.0,
) -> Array:
    """scaled_dot_product_attention without dropout; over: the Exchange of a sequence split over devices."""
    return _attend(query, key, value, attn_mask, is_causal, scale, 0.0, None, over, softcap)


@op(amp="low", method=False, saves=True, rule=_attention_rule, real=True)
def attention_with_dropout(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Key = DRAWN,
    over: Any = None,
    softcap: float = 0.0,
) -> Array:
    """scaled_dot_product_attention with dropout of the probabilities; over as in attention."""
    return _attend(query, key, value, attn_mask, is_causal, scale, dropout_p, dropout_key, over, softcap)


@composite(method=False)
def scaled_dot_product_attention(
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    attn_mask: AnyTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    training: bool = True,
    backend: Any = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    name: str | None = None,
    softcap: float = 0.0,
) -> AnyTensor:
    """softmax(scale * query key^T + mask) value -> [batch, s, heads, e].

    query [batch, s, heads, d], key [batch, t, kv_heads, d], value [batch, t, kv_heads, e].

    attn_mask broadcasts to [batch, heads, s, t]: bool keeps where True, a number is added. is_causal: query i sees the
    keys up to i; with a mask as well both hold. scale is d ** -0.5 unless given. softcap: above 0, a score x is
    softcap * tanh(x / softcap) before the mask (arXiv:2408.00118). kv_heads may divide heads (enable_gqa). A query that
    sees no key gives 0. Dropout acts on the probabilities, in training only. [seq, heads, d] is one batch entry. Under
    a plan with sep > 1 the sequence is split over devices (ops.segment). Raises ShapeError for dims that do not fit;
    ConfigError for a backend, which is chosen by the device here. Source: arXiv:1706.03762, arXiv:2307.08691.
    """
    if backend is not None:
        raise ConfigError(
            f"scaled_dot_product_attention: backend={backend!r}; the device chooses the kernel, leave it out"
        )
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise ShapeError(
            f"scaled_dot_product_attention: {query.shape[-2]} query heads, {key.shape[-2]} key heads; "
            "they differ, which needs enable_gqa=True"
        )
    over = exchange(query.shape, key.shape, causal=is_causal)
    if training and dropout_p != 0:
        return attention_with_dropout(
            query, key, value, attn_mask, is_causal, scale, dropout_p, over=over, softcap=softcap
        )
    return attention(query, key, value, attn_mask, is_causal, scale, over, softcap)


@op(amp="fp32", method=False, real=True)
def attention_probs(query: Array, key: Array, is_causal: bool = False, scale: float | None = None) -> Array:
    """softmax(scale * query key^T): [batch, s, heads, d], [batch, t, kv_heads, d] -> [batch, heads, s, t]."""
    q, k = promote_floating(query, key)
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("bshd,bthd->bhst", wide(q), wide(k)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return _softmax(scores).astype(q.dtype)


def _softmax(scores: Array) -> Array:
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


@composite(method=False)
def flash_attention(
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    dropout: float = 0.0,
    causal: bool = False,
    return_softmax: bool = False,
    *,
    fixed_seed_offset: AnyTensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
) -> tuple[AnyTensor, AnyTensor | None]:
    """scaled_dot_product_attention -> (out, probabilities [batch, heads, s, t] with return_softmax, else None).

    Raises ConfigError for fixed_seed_offset and rng_name (random numbers come from the default generator), and for
    return_softmax with dropout, whose probabilities are never stored.
    """
    if fixed_seed_offset is not None or rng_name:
        raise ConfigError(
            f"flash_attention: {fixed_seed_offset=}, {rng_name=}; random numbers come from the default generator, "
            "use seed() and leave these out"
        )
    out = scaled_dot_product_attention(query, key, value, None, dropout, causal, training, scale=softmax_scale)
    if not return_softmax:
        return out, None
    if dropout and training:
        raise ConfigError(f"flash_attention: return_softmax=True with {dropout=}; leave one of them out")
    return out, attention_probs(query, key, causal, softmax_scale)


# ---- rotary positions ----


def _rotated_rule(call: OpCall) -> ShardingRule | None:
    """All but the last dim goes through, heads if all tensors have as many; angles are whole."""
    shapes = [s for p, s in zip(call.params, call.shapes, strict=True) if p == "tensors"]
    if any(len(s) != len(shapes[0]) for s in shapes):
        return None
    whole = {3} if len({s[2] for s in shapes}) == 1 else {2, 3}
    names = without(dim_names(shapes[0]), *whole)
    return ShardingRule(call.inputs(tensors=names), (names,) * len(call.outs))


def _turned_rule(call: OpCall) -> ShardingRule:
    """All but the last dim goes through; angles are whole."""
    names = without(dim_names(call.shapes[0]), len(call.shapes[0]) - 1)
    return ShardingRule(call.inputs(x=names), (names,))


@op(amp="widest", method=False, rule=_rotated_rule)
def rotated(
    tensors: list[Array],
    sin: Array | None = None,
    cos: Array | None = None,
    position_ids: Array | None = None,
    use_neox_rotary_style: bool = True,
    time_major: bool = False,
    rotary_emb_base: float = 10000.0,
) -> list[Array]:
    """Each tensor turned by its positions' angles; parameters as in fused_rotary_position_embedding."""
    first = tensors[0]
    if any(t.ndim != 4 or t.shape[-1] % 2 for t in tensors):
        raise ShapeError(
            f"fused_rotary_position_embedding: {[list(t.shape) for t in tensors]}; each needs 4 dims, head_dim even"
        )
    seq, dim = first.shape[0 if time_major else 1], first.shape[-1]
    if (sin is None) != (cos is None):
        raise ConfigError("fused_rotary_position_embedding: one of sin and cos is given; give both or none")
    if sin is None or cos is None:
        at = jnp.arange(seq) if position_ids is None else position_ids
        sin, cos = _angles(at, dim, rotary_emb_base, use_neox_rotary_style)
    else:
        sin, cos = _table(sin, position_ids, seq, dim), _table(cos, position_ids, seq, dim)
    # [seq, dim] or [batch, seq, dim] -> broadcasts over heads
    if sin.ndim == 2:
        sin, cos = sin[None], cos[None]
    if time_major:
        sin, cos = jnp.swapaxes(sin, 0, 1), jnp.swapaxes(cos, 0, 1)
    sin, cos = sin[:, :, None], cos[:, :, None]
    turn = _pairs_turned if use_neox_rotary_style else _halves_turned
    return [(wide(t) * cos + turn(wide(t)) * sin).astype(t.dtype) for t in tensors]


@op(amp="widest", method=False, rule=_turned_rule)
def turned_by(x: Array, cos: Array, sin: Array, adjacent: bool = True) -> Array:
    """x * cos + turned(x) * sin: [..., head_dim], angles of each place that broadcast to it.

    adjacent turns neighbours (x0, x1), (x2, x3), ...; else (x_i, x_{i + head_dim / 2}).
    """
    turn = _pairs_turned if adjacent else _halves_turned
    return (wide(x) * wide(cos) + turn(wide(x)) * wide(sin)).astype(x.dtype)


def _angles(at: Array, dim: int, base: float, adjacent: bool) -> tuple[Array, Array]:
    """sin and cos of the angles at positions [*b] -> [*b, dim] each."""
    rate = jnp.asarray(base, dtypes.float32) ** (-jnp.arange(0, dim, 2, dtype=dtypes.float32) / dim)
    angle = at.astype(dtypes.float32)[..., None] * rate
    angle = jnp.repeat(angle, 2, -1) if adjacent else jnp.concatenate([angle, angle], -1)
    return jnp.sin(angle), jnp.cos(angle)


def _table(table: Array, position_ids: Array | None, seq: int, dim: int) -> Array:
    """sin or cos as [positions, dim], then those asked for."""
    single = table.ndim == 4 and table.shape[0] == table.shape[2] == 1
    if table.shape[-1] != dim or not (table.ndim == 2 or single):
        raise ShapeError(
            f"fused_rotary_position_embedding: sin or cos {list(table.shape)}; needs [positions, {dim}] or "
            f"[1, positions, 1, {dim}]"
        )
    rows = wide(table.reshape(-1, dim))
    if position_ids is not None:
        return read(rows, (bounded(position_ids, rows.shape[0], negative=False),))
    if rows.shape[0] < seq:
        raise ShapeError(
            f"fused_rotary_position_embedding: sin and cos hold {rows.shape[0]} positions, the sequence has {seq}"
        )
    return rows[:seq]


def _pairs_turned(x: Array) -> Array:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(x.shape)


def _halves_turned(x: Array) -> Array:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([-b, a], -1)


@composite(method=False)
def fused_rotary_position_embedding(
    q: AnyTensor,
    k: AnyTensor | None = None,
    v: AnyTensor | None = None,
    sin: AnyTensor | None = None,
    cos: AnyTensor | None = None,
    position_ids: AnyTensor | None = None,
    use_neox_rotary_style: bool = True,
    time_major: bool = False,
    rotary_emb_base: float = 10000.0,
) -> tuple[AnyTensor, AnyTensor | None, AnyTensor | None]:
    """q, k and v turned by angles that grow with position: x * cos + turned(x) * sin -> (q, k, v).

    None stays None. q, k, v: [batch, seq, heads, head_dim] ([seq, batch, ...] with time_major); k and v may have
    fewer heads. sin, cos: [positions, head_dim] or [1, positions, 1, head_dim]; without them angle i of position m
    is m / base^(2i / head_dim). position_ids: [batch, seq], else 0, 1, ... use_neox_rotary_style=True turns
    neighbours (x0, x1), (x2, x3), ...; False turns (x_i, x_{i + head_dim / 2}), as LLaMA does. Source:
    arXiv:2104.09864. Raises ShapeError for dims that do not fit, ConfigError for one of sin and cos without the
    other, IndexError for a position that they do not hold.
    """
    given = [t for t in (q, k, v) if t is not None]
    if sin is not None and position_ids is not None:
        positions = sin.shape[1 if len(sin.shape) == 4 else 0]
        check_range(position_ids, positions, "fused_rotary_position_embedding: position")
    turned = iter(rotated(given, sin, cos, position_ids, use_neox_rotary_style, time_major, float(rotary_emb_base)))
    first, second, third = (None if t is None else next(turned) for t in (q, k, v))
    return first, second, third


ALIASES: dict[str, str] = {}
