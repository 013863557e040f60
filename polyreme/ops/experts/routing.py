"""Tokens sent to experts and brought back: rows sorted by expert, weights by gate, and the loss that balances them.

Sources: arXiv:1701.06538, arXiv:2006.16668. s tokens, e experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor, DTypeLike
from polyreme.core.op import composite, op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.by_index import read
from polyreme.ops.ids import check_range, visible


@op(method=False)
def permuted_rows(
    hidden_states: Array,
    routemap: Array,
    probs: Array,
    scale: Array | None = None,
    starts: Sequence[int] = (),
    counts: Sequence[int] = (),
    rows: int = 0,
) -> list[Array]:
    """moe_permute's five results (four without scale): expert i has counts[i] rows from starts[i] on."""
    experts = len(counts)
    chosen = routemap[..., None] == jnp.arange(experts, dtype=routemap.dtype)
    sent = chosen.any(1)
    nth = jnp.cumsum(sent, 0, dtype=jnp.int32) - 1
    # a token over its expert's count has no row
    fits = sent & (nth < jnp.asarray(counts, jnp.int32))
    rowmap = jnp.where(fits, nth + jnp.asarray(starts, jnp.int32), -1)
    place = jnp.where(rowmap < 0, rows, rowmap)
    weight = jnp.where(chosen, probs[..., None], 0).sum(1)

    def spread(x: Array) -> Array:
        each = jnp.broadcast_to(x[:, None], (x.shape[0], experts, *x.shape[1:]))
        return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[place].set(each, mode="drop")

    unzipped = jnp.zeros((rows,), weight.dtype).at[place].set(weight, mode="drop")
    expert = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32), place.shape)
    indices = jnp.full((rows,), -1, jnp.int32).at[place].set(expert, mode="drop")
    scales = [] if scale is None else [spread(scale)]
    return [spread(hidden_states), rowmap, unzipped, *scales, indices]


@composite(method=False)
def moe_permute(
    hidden_states: AnyTensor,
    scale: AnyTensor,
    expert_routemap_topk: AnyTensor,
    expert_prob_topk: AnyTensor,
    num_experts: int,
    tokens_per_expert: Sequence[int],
    padding_alignment: int,
    do_gather: bool = True,
    using_ue8m0_scale: bool = False,
    return_expert_indices: bool = False,
    override_buffer_size: int = -1,
    name: str | None = None,
) -> tuple[AnyTensor, ...]:
    """A row for each token and expert it goes to, sorted by expert, then by token: tokens [s, width] -> [rows, width].

    expert_routemap_topk, expert_prob_topk [s, k]: the experts of each token (-1 for none) and their weights.
    tokens_per_expert: how many tokens each expert gets, which padding_alignment rounds up; rows is their sum, or
    override_buffer_size, and rows of no token are 0. scale [s, blocks], of float8 tokens, goes with them, whichever way
    it is packed. Returns (rows, row of each token and expert [s, experts] with -1 for none, weights [rows], scales of
    the rows or None), and with return_expert_indices the expert of each row, -1 for none. Raises ShapeError for
    counts that are not the routemap's, IndexError for an expert out of range, ConfigError for do_gather=False.
    """
    what = "moe_permute"
    if not do_gather:
        raise ConfigError(f"{what}: do_gather=False; what the rows then hold is not defined, leave it out")
    if padding_alignment < 1 or len(tokens_per_expert) != num_experts:
        raise ConfigError(
            f"{what}: padding_alignment={padding_alignment}, {len(tokens_per_expert)} counts for {num_experts} "
            "experts; needs an alignment of at least 1 and a count for each expert"
        )
    check_range(expert_routemap_topk, num_experts, f"{what}: expert", allowed=-1)
    seen = visible(expert_routemap_topk)
    if seen is not None:
        found = np.bincount(seen[seen >= 0].reshape(-1), minlength=num_experts).tolist()
        if found != [int(n) for n in tokens_per_expert]:
            raise ShapeError(f"{what}: tokens_per_expert={list(tokens_per_expert)}, the routemap sends {found}")
    padded = [-(-int(n) // padding_alignment) * padding_alignment for n in tokens_per_expert]
    rows = sum(padded) if override_buffer_size < 0 else override_buffer_size
    starts = [sum(padded[:i]) for i in range(num_experts)]
    made = permuted_rows(hidden_states, expert_routemap_topk, expert_prob_topk, scale, starts, tokens_per_expert, rows)
    first = (*made[:3], made[3] if scale is not None else None)
    return (*first, made[-1]) if return_expert_indices else first


@op(method=False)
def moe_unpermute(
    hidden_states_unzipped: Array,
    zipped_expertwise_rowmap: Array,
    expert_routemap_topk: Array,
    token_prob_unzipped: Array,
    total_zipped_tokens: int,
    num_experts: int,
    using_mix_precision: bool = True,
    using_weighted_combine: bool = False,
) -> tuple[Array, Array]:
    """The sum of each token's rows, and its weights: what brings moe_permute's rows back -> ([s, width], [s, k]).

    using_weighted_combine weighs the rows; using_mix_precision adds in at least float32. Raises ShapeError for a
    rowmap that is not [total_zipped_tokens, num_experts].
    """
    rows, rowmap = hidden_states_unzipped, zipped_expertwise_rowmap
    if rowmap.shape != (total_zipped_tokens, num_experts):
        raise ShapeError(
            f"moe_unpermute: zipped_expertwise_rowmap {list(rowmap.shape)}; needs "
            f"[{total_zipped_tokens}, {num_experts}]"
        )
    weights = token_prob_unzipped.reshape(-1)
    place = jnp.where(rowmap < 0, len(rows), rowmap)
    taken = (wide(rows) if using_mix_precision else rows).at[place].get(mode="fill", fill_value=0)
    weight = weights.at[place].get(mode="fill", fill_value=0)
    taken = taken * weight[..., None].astype(taken.dtype) if using_weighted_combine else taken
    chosen = jnp.take_along_axis(weight, jnp.maximum(expert_routemap_topk, 0), 1)
    return taken.sum(1).astype(rows.dtype), jnp.where(expert_routemap_topk < 0, 0, chosen)


@op(method=False)
def moe_gate_dispatch(
    x: Array, gate_logits: Array, corr_bias: Array | None, k: int, capacity: int, use_pad: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """Each token's k best experts by gate_logits + corr_bias, and room for `capacity` tokens at each expert.

    x [s, width], gate_logits [s, e] (as they are: no softmax is taken), corr_bias [e]. An expert takes all tokens'
    first choices before second ones, each in the tokens' order; what is over the capacity is dropped. Returns (rows
    [e * capacity, width], 0 where empty; weights [s, k], the gate_logits chosen, 0 if dropped; the row of each choice
    [k, s] int32, 0 if dropped; running sums of the choices of each expert [e] int64, dropped ones too; the experts
    [s, k] int32). Raises ConfigError for use_pad=False.
    """
    if not use_pad:
        raise ConfigError("moe_gate_dispatch: use_pad=False; rows are padded to the capacity here, give use_pad=True")
    s, experts = gate_logits.shape
    by = gate_logits if corr_bias is None else gate_logits + corr_bias.reshape(1, -1)
    _, expert = lax.top_k(lax.stop_gradient(by), k)
    one_hot = expert.T.reshape(-1)[:, None] == jnp.arange(experts, dtype=expert.dtype)
    nth = ((jnp.cumsum(one_hot, 0, dtype=jnp.int32) - 1) * one_hot).sum(1).reshape(k, s)
    fits = nth < capacity
    row = expert.T.astype(jnp.int32) * capacity + nth
    place = jnp.where(fits, row, experts * capacity)
    each = jnp.broadcast_to(x, (k, *x.shape))
    rows = jnp.zeros((experts * capacity, x.shape[1]), x.dtype).at[place].set(each, mode="drop")
    weights = jnp.where(fits.T, jnp.take_along_axis(gate_logits, expert, 1), 0)
    offsets = jnp.cumsum(one_hot.sum(0, dtype=jnp.int64))
    return rows, weights, jnp.where(fits, row, 0), offsets, expert.astype(jnp.int32)


@op(method=False)
def moe_combine(x: Array, combine_weights: Array, scatter_index: Array) -> Array:
    """sum over k of combine_weights[s, k] * x[scatter_index[k, s]]: [rows, width], [s, k], [k, s] -> [s, width].

    Raises ShapeError for an index that is not [k, s].
    """
    if scatter_index.shape != combine_weights.shape[::-1]:
        raise ShapeError(
            f"moe_combine: scatter_index {list(scatter_index.shape)} for combine_weights "
            f"{list(combine_weights.shape)}; needs [k, s] for [s, k]"
        )
    return jnp.einsum("ksw,sk->sw", read(wide(x), (scatter_index,)), wide(combine_weights)).astype(x.dtype)


@op(amp="fp32", method=False, real=True)
def cal_aux_loss(
    gate_prob: Array,
    dispatch_mask: Array,
    tokens_mask: Array | None,
    dispatch_tokens_mask: Array | None,
    num_experts: int,
    use_group: bool,
    moe_k: int,
    clip_min: float,
) -> tuple[Array, Array, Array]:
    """num_experts * sum of (mean gate of an expert) * (its part of the tokens), the loss that balances experts.

    gate_prob [s, e], dispatch_mask [e]: tokens sent to each. The number of tokens, n, is the sum of
    dispatch_tokens_mask, else of tokens_mask, else s, and at least clip_min; gate_prob is masked by the caller. With
    both masks the loss is scaled by n / sum of tokens_mask. use_group divides it by moe_k. Returns (loss [], n [],
    dispatch_mask / n [e]). Source: arXiv:2006.16668, section 2.2.
    """
    gate = wide(gate_prob)
    masks = [m.astype(gate.dtype).sum() for m in (dispatch_tokens_mask, tokens_mask) if m is not None]
    count = jnp.maximum(masks[0], clip_min) if masks else jnp.asarray(float(gate.shape[0]), gate.dtype)
    part = dispatch_mask.astype(gate.dtype) / count
    loss = (gate.sum(0) / count * part).sum() * num_experts
    loss = loss / moe_k if use_group else loss
    loss = loss * (count / jnp.maximum(masks[1], clip_min)) if len(masks) == 2 else loss
    return loss, count, part


@op(method=False)
def int_bincount(x: Array, low: int, high: int, dtype: DTypeLike | None = None) -> Array:
    """The number of times that each of low, ..., high - 1 occurs in the integers x, [high - low]; others are not
    counted.

    dtype: that of the counts, x's if None. Raises ConfigError for high < low.
    """
    if high < low:
        raise ConfigError(f"int_bincount: low={low}, high={high}; high must be at least low")
    kind = x.dtype if dtype is None else dtypes.as_dtype(dtype)
    at = jnp.where((x < low) | (x >= high), high - low, x - low).reshape(-1)
    return jnp.zeros((high - low,), kind).at[at].add(1, mode="drop")


ALIASES: dict[str, str] = {}
