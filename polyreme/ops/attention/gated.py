"""Gated attention of the Evoformer as one op. Source: Jumper et al., 2021, supplement, algorithms 7, 8, 13 and 14.

Shape legend: b batch, m rows that attend each by itself, q queries and k keys of a row, a and c widths, h heads, d
head dim, o output width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from polyreme import kernels
from polyreme.core.op import op
from polyreme.errors import ConfigError, ShapeError


@op(amp="low", method=False)
def fused_gate_attention(
    query: Array,
    key: Array | None = None,
    query_weight: Array | None = None,
    key_weight: Array | None = None,
    value_weight: Array | None = None,
    qkv_weight: Array | None = None,
    gate_linear_weight: Array | None = None,
    gate_linear_bias: Array | None = None,
    out_linear_weight: Array | None = None,
    out_linear_bias: Array | None = None,
    nonbatched_bias: Array | None = None,
    attn_mask: Array | None = None,
    has_gating: bool = True,
    merge_qkv: bool = True,
    use_flash_attn: bool = False,
) -> Array:
    """out(sigmoid(gate(query)) * softmax(q k / sqrt(d) + attn_mask + nonbatched_bias) v): [b, m, q, a] -> [b, m, q, o].

    merge_qkv: one qkv_weight [3, h, d, a], and query is what is attended to as well. Else query_weight [a, h, d], and
    key_weight and value_weight [c, h, d] of key [b, m, k, c] (query itself if None). gate_linear_weight [a, h, d] and
    gate_linear_bias [h, d] with has_gating; out_linear_weight [h, d, o], out_linear_bias [o].
    attn_mask broadcasts to [b, m, h, q, k], as nonbatched_bias, whose m is 1, does; both are added to the scores, which
    are float32 at least. use_flash_attn: scores are never whole, and are computed again in backward.

    Raises ConfigError for a weight that is missing or has no use, ShapeError for weights that do not fit.
    """
    weights = {"query_weight": query_weight, "key_weight": key_weight, "value_weight": value_weight}
    _check_weights(weights, {"qkv_weight": qkv_weight}, merge_qkv, "merge_qkv")
    gates = {"gate_linear_weight": gate_linear_weight, "gate_linear_bias": gate_linear_bias}
    _check_weights({}, gates, has_gating, "has_gating")
    outs = {"out_linear_weight": out_linear_weight, "out_linear_bias": out_linear_bias}
    _check_weights({}, outs, True, "the output")
    if merge_qkv and key is not None and key.shape != query.shape:
        raise ConfigError(
            f"fused_gate_attention: key {list(key.shape)} beside query {list(query.shape)} with merge_qkv=True, which "
            "attends to query; leave key out, or give query_weight, key_weight and value_weight with merge_qkv=False"
        )
    memory = query if key is None or merge_qkv else key
    if query.ndim != 4 or memory.ndim != 4:
        raise ShapeError(
            f"fused_gate_attention: query {list(query.shape)} and key {list(memory.shape)}; each needs 4 dims "
            "[batch, rows, places, width]"
        )
    if merge_qkv:
        assert qkv_weight is not None
        w_q, w_k, w_v = (jnp.transpose(w, (2, 0, 1)) for w in qkv_weight)
    else:
        w_q, w_k, w_v = query_weight, key_weight, value_weight
    q = _project("query", query, w_q)
    k, v = _project("key", memory, w_k), _project("value", memory, w_v)
    attend = _attend_by_blocks if use_flash_attn else _attend
    mixed = attend(q, k, v, attn_mask, nonbatched_bias)
    if has_gating:
        assert gate_linear_bias is not None
        mixed = mixed * jax.nn.sigmoid(_project("gate", query, gate_linear_weight) + gate_linear_bias)
    assert out_linear_weight is not None
    assert out_linear_bias is not None
    if out_linear_weight.shape[:2] != mixed.shape[3:]:
        raise ShapeError(
            f"fused_gate_attention: out_linear_weight {list(out_linear_weight.shape)} for "
            f"{mixed.shape[3]} heads of width {mixed.shape[4]}; needs [heads, head_dim, out]"
        )
    return jnp.einsum("bmqhd,hdo->bmqo", mixed, out_linear_weight) + out_linear_bias


def _check_weights(without: dict, needed: dict, setting: bool, name: str) -> None:
    """ConfigError unless the weights for a setting are there, and those for its opposite are not."""
    wanted, unused = (needed, without) if setting else (without, needed)
    missing = [n for n, w in wanted.items() if w is None]
    extra = [n for n, w in unused.items() if w is not None]
    what = name if name.startswith("the") else f"{name}={setting}"
    if missing:
        raise ConfigError(f"fused_gate_attention: {what} needs {', '.join(missing)}; give all of them")
    if extra:
        raise ConfigError(f"fused_gate_attention: {what} has no use for {', '.join(extra)}; leave it out")


def _project(what: str, x: Array, weight: Array | None) -> Array:
    """[b, m, r, a] by [a, h, d] -> [b, m, r, h, d]."""
    assert weight is not None
    if weight.ndim != 3 or weight.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"fused_gate_attention: {what} weight {list(weight.shape)} for width {x.shape[-1]}; needs "
            "[width, heads, head_dim] (qkv_weight: [3, heads, head_dim, width])"
        )
    return jnp.einsum("bmra,ahd->bmrhd", x, weight)


def _attend(q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None) -> Array:
    acc = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bmqhd,bmkhd->bmhqk", q * q.shape[-1] ** -0.5, k, preferred_element_type=acc)
    for term in (mask, bias):
        scores = scores if term is None else scores + term
    return jnp.einsum("bmhqk,bmkhd->bmqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def _attend_by_blocks(q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None) -> Array:
    b, m = q.shape[:2]
    added = mask if bias is None else bias if mask is None else mask + bias
    if added is not None:
        rows = (1, 1) if added.shape[:2] == (1, 1) else (b, m)
        added = jnp.broadcast_to(added, (*rows, *added.shape[2:])).reshape(-1, *added.shape[2:])
    flat = (x.reshape(b * m, *x.shape[2:]) for x in (q, k, v))
    return kernels.attention(*flat, causal=False, mask=added).reshape(q.shape[:4] + v.shape[4:])
