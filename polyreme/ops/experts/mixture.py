"""Mixtures of experts: which experts a token goes to, what balances them, and what they compute.

Numbers of routing are float32 at least. Sources: arXiv:1701.06538, arXiv:2101.03961 (balance loss), arXiv:2202.08906 (z
loss), arXiv:2401.06066 (shared experts), arXiv:2405.04434 (groups), arXiv:2408.15664 (selection bias).
Shape legend: e experts, k choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, export, lax

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.annotations import AnyTensor
from polyreme.core.dtype import promote_floating
from polyreme.core.op import composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels.experts import ACTIVATIONS, ExpertWeights, Groups
from polyreme.ops.activation import wide
from polyreme.ops.experts.exchange import exchange
from polyreme.ops.ids import check_range
from polyreme.ops.sharding import dim_names

SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    # exp(x / 2) where softplus is exp(x): the square root of what is rounded to 0 has no derivative
    "sqrtsoftplus": lambda x: jnp.where(x < -40, jnp.exp(x / 2), jnp.sqrt(jax.nn.softplus(jnp.maximum(x, -40)))),
    "relu": jax.nn.relu,
    "logits": lambda x: x,
}
"""What gates are made of, by name."""


@op(amp="fp32", method=False)
def router_logits(x: Array, weight: Array) -> Array:
    """x weight, [..., d] and [d, e] -> [..., e], in float32 at least: rounding there sends tokens to other experts.

    Raises ShapeError for dims that do not fit.
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            f"router_logits: x {list(x.shape)} and weight {list(weight.shape)} do not fit; needs [..., d] and [d, e]"
        )
    # the plain product leaves batch and sequence apart, so that both may be split over devices
    return kernels.linear_plain(*promote_floating(wide(x), wide(weight)))


@op(amp="fp32", method=False)
def choose_experts(
    logits: Array,
    selection_bias: Array | None = None,
    allowed: Array | None = None,
    top_k: int = 2,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Array, Array, Array]:
    """The top_k experts of each token -> choices [..., k] int32, best first; gates [..., k]; scores [..., e].

    logits [..., e]; scores are one of SCORES of them. selection_bias [e] is added to scores for the choice alone;
    allowed, bool, broadcasts to [..., e]: a choice among fewer than top_k allowed experts is -1, with gate 0.
    groups: of that many groups of neighbours only the top_groups best are chosen from, by their best score, or with
    selection_bias by the sum of their two best. Of equal scores the first expert is chosen. gates are the scores
    chosen, divided by their sum with normalize, times scale. Raises ConfigError for numbers that do not fit e,
    DTypeError for an `allowed` of numbers, ShapeError for one that does not broadcast to the logits.
    """
    e = logits.shape[-1]
    check_choice("choose_experts", e, top_k, score, groups, top_groups)
    _check_allowed("choose_experts", allowed, logits)
    scores = SCORES[score](wide(logits))
    select_by = lax.stop_gradient(scores)
    if selection_bias is not None:
        select_by = select_by + lax.stop_gradient(wide(selection_bias))
    if allowed is not None:
        select_by = jnp.where(allowed, select_by, -jnp.inf)
    if top_groups < groups:
        parts = select_by.reshape(*logits.shape[:-1], groups, e // groups)
        best = _best(parts, 1 if selection_bias is None else min(2, e // groups))
        group_score = jnp.where(best[0][..., 0] < 0, -jnp.inf, best[1].sum(-1))
        chosen = (_best(group_score, top_groups)[0][..., None] == jnp.arange(groups)).any(-2)
        select_by = jnp.where(chosen[..., None], parts, -jnp.inf).reshape(select_by.shape)
    choices, _ = _best(select_by, top_k)
    # by comparing and not by index: XLA would collect all tokens on every device for the latter
    picked = choices[..., None] == jnp.arange(e, dtype=choices.dtype)
    gates = jnp.where(picked, scores[..., None, :], 0).sum(-1)
    if normalize:
        # about 1 first: the derivative of a quotient divides by the square of a sum that may be tiny
        top = lax.stop_gradient(gates.max(-1, keepdims=True))
        gates = gates / jnp.where((top > 0) & jnp.isfinite(top), top, 1)
        gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)
    return choices, gates * scale, scores


def check_choice(what: str, experts: int, top_k: int, score: str, groups: int, top_groups: int) -> None:
    """Raise ConfigError, beginning with `what`, for settings of choose_experts that do not fit so many experts."""
    if score not in SCORES:
        raise ConfigError(f"{what}: unknown score {score!r}; one of {', '.join(SCORES)}")
    check_counts(what, num_experts=experts, top_k=top_k, groups=groups, top_groups=top_groups)
    if top_k > experts:
        raise ConfigError(f"{what}: top_k={top_k} of {experts} experts; give 1 to {experts}")
    if experts % groups or top_groups > groups or top_groups * (experts // groups) < top_k:
        raise ConfigError(
            f"{what}: groups={groups} and top_groups={top_groups} for top_k={top_k} of {experts} experts; groups must "
            "divide the experts, and top_groups of them hold top_k"
        )


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def check_counts(what: str, **counts: Any) -> None:
    """Raise ConfigError, beginning with `what`, for what is no whole number of at least 1."""
    for name, count in counts.items():
        is_whole = isinstance(count, Integral) or export.is_symbolic_dim(count)
        if isinstance(count, bool) or not is_whole or count < 1:
            raise ConfigError(f"{what}: {name}={count!r}; give a whole number of at least 1")


def check_choices(what: str, choices: Any) -> None:
    """Raise DTypeError, beginning with `what`, for choices that are no integers."""
    if not dtypes.is_integer(choices.dtype):
        raise DTypeError(f"{what}: choices are {choices.dtype}; give integers, the numbers of experts, -1 for none")


def _best(x: Array, k: int) -> tuple[Array, Array]:
    """Indices, int32, and values of the k greatest along the last dim; index -1 and value 0 where only -inf is left.

    k passes: lax.top_k would collect a split batch on every device.
    """
    indices, values = [], []
    for _ in range(k):
        top = x.max(-1)
        at = jnp.where(top == -jnp.inf, -1, x.argmax(-1).astype(jnp.int32))
        indices.append(at)
        values.append(jnp.where(at < 0, 0, top))
        x = jnp.where(at[..., None] == jnp.arange(x.shape[-1], dtype=at.dtype), -jnp.inf, x)
    return jnp.stack(indices, -1), jnp.stack(values, -1)


@op(amp="fp32", method=False)
def choose_tokens(
    logits: Array, allowed: Array | None = None, capacity: int = 1, score: str = "softmax", scale: float = 1.0
) -> tuple[Array, Array, Array]:
    """The `capacity` tokens that each expert chooses -> choices, gates, scores [..., s, e], as choose_experts gives.

    logits [..., s, e], each entry of the leading dims on its own; scores are one of SCORES of them. A token's choices
    are the experts that chose it, by number, and -1, with gate 0, in place of the others; its gates are its scores
    there times scale. allowed, bool, broadcasts to [..., s, e]: tokens that an expert may choose, else it takes fewer.
    Of equal scores the first token is chosen. Raises ConfigError for a capacity outside 1 .. s and an unknown score,
    ShapeError for logits of one dim, DTypeError for an `allowed` of numbers. Source: arXiv:2202.09368, section 3.2.
    """
    if logits.ndim < 2:
        raise ShapeError(f"choose_tokens: logits {list(logits.shape)}; needs [..., tokens, experts]")
    s, e = logits.shape[-2:]
    check_choice("choose_tokens", e, 1, score, 1, 1)
    if not isinstance(capacity, Integral) or not 1 <= capacity <= max(1, s):
        raise ConfigError(f"choose_tokens: capacity={capacity} of {s} tokens; give 1 to {s}")
    _check_allowed("choose_tokens", allowed, logits)
    scores = SCORES[score](wide(logits))
    select_by = lax.stop_gradient(scores)
    if allowed is not None:
        select_by = jnp.where(allowed, select_by, -jnp.inf)
    if s == 0:
        return jnp.zeros(scores.shape, jnp.int32), scores, scores
    least = jnp.sort(select_by, -2)[..., s - capacity : s - capacity + 1, :]
    above, level = select_by > least, select_by == least
    room = capacity - above.sum(-2, keepdims=True, dtype=jnp.int32)
    chosen = above | (level & (jnp.cumsum(level, -2, dtype=jnp.int32) <= room))
    chosen &= select_by > -jnp.inf
    return jnp.where(chosen, jnp.arange(e, dtype=jnp.int32), -1), jnp.where(chosen, scores, 0) * scale, scores


def _check_allowed(what: str, allowed: Array | None, logits: Array) -> None:
    if allowed is None:
        return
    if dtypes.is_inexact(allowed.dtype):
        raise DTypeError(f"{what}: allowed is {allowed.dtype}; give bool, True where a token may choose")
    if not _broadcasts(allowed.shape, logits.shape):
        raise ShapeError(
            f"{what}: allowed {list(allowed.shape)} for logits {list(logits.shape)}; it must broadcast to them: what "
            "counts for whole sequences is [batch, 1, experts]"
        )


@op(amp="fp32", method=False)
def limit_experts(choices: Array, gates: Array, num_experts: int, capacity: int, by: str = "order") -> Array:
    """choices [..., k] without those over an expert's capacity: an expert keeps `capacity` of them, the rest are -1.

    by: "order" keeps all tokens' first choices before their second ones, each in the tokens' order; "gate" those with
    the greatest gates [..., k], and of equal ones the first. Raises ConfigError for another and for a capacity that is
    no whole number above 0, DTypeError for choices that are no integers.
    """
    if by not in ("order", "gate"):
        raise ConfigError(f"limit_experts: by={by!r}; give 'order' or 'gate'")
    check_counts("limit_experts", num_experts=num_experts, capacity=capacity)
    check_choices("limit_experts", choices)
    k = choices.shape[-1]
    first = choices.reshape(-1, k).T.reshape(-1).astype(jnp.int32)
    n = first.shape[0]
    if by == "gate":
        weakness = -lax.stop_gradient(wide(gates)).reshape(-1, k).T.reshape(-1)
        _, turn = lax.sort((weakness, lax.iota(jnp.int32, n)), num_keys=1, is_stable=True)
    else:
        turn = lax.iota(jnp.int32, n)
    expert = first[turn]
    fits = count_before(expert, num_experts) < capacity
    left = jnp.zeros_like(first).at[turn].set(jnp.where(fits, expert, -1), unique_indices=True)
    return jnp.where(choices < 0, -1, left.reshape(k, -1).T.reshape(choices.shape).astype(choices.dtype))


def count_before(expert: Array, num_experts: int) -> Array:
    """The number of earlier choices of the same expert, for each of the choices [n]; at least n for a choice of
    none."""
    ranked = Groups.of(expert, num_experts, expert.shape[0])
    starts = jnp.cumsum(ranked.sizes) - ranked.sizes
    is_one = (expert >= 0) & (expert < num_experts)
    return ranked.place - jnp.where(is_one, starts[jnp.clip(expert, 0, num_experts - 1)], 0)


@op(method=False)
def expert_load(choices: Array, num_experts: int) -> Array:
    """The number of choices [..., k] that fell on each expert, int32 [e]. Raises DTypeError for choices that are no
    integers, ConfigError for a num_experts below 1."""
    check_counts("expert_load", num_experts=num_experts)
    check_choices("expert_load", choices)
    return (choices.reshape(-1, 1) == jnp.arange(num_experts, dtype=choices.dtype)).sum(0, dtype=jnp.int32)


@op(amp="fp32", method=False)
def balance_loss(scores: Array, choices: Array, per_sequence: bool = False, counts: Array | None = None) -> Array:
    """e * sum over experts of (part of the choices it got) * (its mean share of the scores), 1 where all are equal.

    scores [..., e], at least 0; choices [..., k], as they were before a capacity left some out. per_sequence: the mean
    over the first dim of the loss of each of its entries. counts [e]: how many choices each expert got, of more tokens
    than these. Sources: arXiv:2101.03961, section 2.2; arXiv:2412.19437, section 2.1.2; for counts arXiv:2501.11873.
    Raises ShapeError for choices of other tokens and counts of other experts, DTypeError for choices that are no
    integers, ConfigError for counts with per_sequence.
    """
    check_choices("balance_loss", choices)
    e = scores.shape[-1]
    if counts is not None and per_sequence:
        raise ConfigError("balance_loss: counts with per_sequence; a sequence has its own, leave one of them out")
    if counts is not None and counts.shape != (e,):
        raise ShapeError(f"balance_loss: counts {list(counts.shape)} for scores {list(scores.shape)}; needs [{e}]")
    if per_sequence and scores.ndim != 3:
        raise ShapeError(f"balance_loss: per_sequence with scores {list(scores.shape)}; needs [batch, seq, experts]")
    if choices.shape[:-1] != scores.shape[:-1]:
        raise ShapeError(
            f"balance_loss: scores {list(scores.shape)} and choices {list(choices.shape)}; needs [..., experts] and "
            "[..., k] of the same tokens"
        )
    dims = (1,) if per_sequence else tuple(range(scores.ndim - 1))
    scores = wide(scores)
    if 0 in scores.shape:
        return jnp.zeros((), scores.dtype)
    share = (scores / (scores.sum(-1, keepdims=True) + 1e-20)).mean(dims)
    if counts is None:
        counts = (choices[..., None] == jnp.arange(e, dtype=choices.dtype)).sum((*dims, -2))
    hits = counts.astype(share.dtype)
    part = hits / jnp.maximum(hits.sum(-1, keepdims=True), 1)
    return (e * (part * share).sum(-1)).mean()


@op(amp="fp32", method=False)
def router_z_loss(logits: Array) -> Array:
    """The mean of logsumexp(logits [..., e])^2, which keeps logits small; 0 of no tokens. Source:
    arXiv:2202.08906, equation 5."""
    if 0 in logits.shape:
        return jnp.zeros((), wide(logits).dtype)
    return (jax.nn.logsumexp(wide(logits), -1) ** 2).mean()


def _experts_rule(call: OpCall) -> ShardingRule:
    """Each token goes its own way; experts are whole."""
    tokens = dim_names(call.shapes[0][:-1], "b")
    names = (*tokens, None)
    return ShardingRule(call.inputs(x=names, choices=names, gates=names), (names,), piecewise=True)


@op(amp="low", method=False, saves=True, uncast=("gates",), rule=_experts_rule)
def routed_experts(
    x: Array,
    choices: Array,
    gates: Array,
    up: Array,
    down: Array,
    gate: Array | None = None,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: str = "silu",
    over: Any = None,
    gate_bias: Array | None = None,
    row_capacity: int | None = None,
) -> Array:
    """experts_ffn; over: the ExpertExchange of tokens and experts split over devices. row_capacity: each expert is
    chosen by at most so many of the s tokens of an entry of x [..., s, d]."""
    arrays = {"up": up, "down": down, "gate": gate, "up_bias": up_bias, "down_bias": down_bias}
    arrays["gate_bias"] = gate_bias
    there = {name: array for name, array in arrays.items() if array is not None}
    x, *promoted = promote_floating(x, *there.values())
    weights = ExpertWeights(**dict(zip(there, promoted, strict=True)))
    compute = kernels.experts if over is None else over.compute
    return compute(x, choices, gates, weights, activation, row_capacity)


@composite(method=False)
def experts_ffn(
    x: AnyTensor,
    choices: AnyTensor,
    gates: AnyTensor,
    up: AnyTensor,
    down: AnyTensor,
    gate: AnyTensor | None = None,
    up_bias: AnyTensor | None = None,
    down_bias: AnyTensor | None = None,
    activation: str = "silu",
    gate_bias: AnyTensor | None = None,
) -> AnyTensor:
    """sum over j of gates[..., j] * expert[choices[..., j]](x): [..., d], choices and gates [..., k] -> [..., d].

    An expert is activation(x up + up_bias) down + down_bias, or with gate (activation(x gate + gate_bias) * (x up +
    up_bias)) down + down_bias: up and gate [e, d, f], down [e, f, d], up_bias and gate_bias [e, f], down_bias [e, d]. A
    choice of -1 is none, and a token's choices differ. activation: silu, gelu, gelu_tanh or relu. No token is dropped,
    and none computed for an expert that it did not choose. Under a plan that splits experts over devices the plan's
    expert_dispatch says how tokens reach them. Raises ShapeError for dims that do not fit and for more choices than
    experts, IndexError for an expert that there is not, DTypeError for choices that are no integers, ConfigError for
    another activation.
    """
    check_choices("experts_ffn", choices)
    check_range(choices, up.shape[0], "experts_ffn: expert", allowed=-1)
    return chosen_experts(x, choices, gates, up, down, gate, up_bias, down_bias, activation, gate_bias)


def chosen_experts(
    x: Any,
    choices: Any,
    gates: Any,
    up: Any,
    down: Any,
    gate: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    activation: str = "silu",
    gate_bias: Any = None,
    row_capacity: int | None = None,
) -> Any:
    """experts_ffn of choices that choose_experts gave, which are in range: eager code need not wait to see them.

    row_capacity: as of routed_experts, for choices that choose_tokens gave.
    """
    k = choices.shape[-1]
    if row_capacity is not None:
        k = -(-k * row_capacity // max(1, x.shape[-2]))  # of a token on the mean
    over = exchange(x.shape, up.shape, k)
    weights = (up, down, gate, up_bias, down_bias)
    return routed_experts(x, choices, gates, *weights, activation, over, gate_bias, row_capacity)


@op(amp="low", method=False, uncast=("gate",))
def expert_choice(
    x: Array, gate: Array, up: Array, up_bias: Array, down: Array, down_bias: Array, top_k: int, activation: str
) -> Array:
    """sum over the experts that choose a token of its softmax(gate)[e] * (activation(x up + up_bias) down + down_bias).

    x [b, s, d], gate [b, s, e], up [e, d, f], up_bias [e, f], down [e, f, d], down_bias [e, d] -> [b, s, d]. In each
    row of the batch an expert chooses the top_k tokens that have the greatest share for it. Raises ShapeError for dims
    that do not fit, ConfigError for top_k outside 1 .. s and an unknown activation. Source: arXiv:2202.09368.
    """
    b, s, d = x.shape if x.ndim == 3 else (0, 0, 0)
    e, _, f = up.shape if up.ndim == 3 else (0, 0, 0)
    shapes = {"gate": (gate, (b, s, e)), "up": (up, (e, d, f)), "up_bias": (up_bias, (e, f))}
    shapes |= {"down": (down, (e, f, d)), "down_bias": (down_bias, (e, d))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape or x.ndim != 3:
            raise ShapeError(
                f"expert_choice: {name} {list(array.shape)} for x {list(x.shape)} and up {list(up.shape)}; needs "
                f"{list(shape)} for x [batch, seq, width]"
            )
    if not 1 <= top_k <= s or activation not in ACTIVATIONS:
        raise ConfigError(
            f"expert_choice: top_k={top_k} of {s} tokens, activation={activation!r}; give 1 to {s}, and one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    x, up, up_bias, down, down_bias = promote_floating(x, up, up_bias, down, down_bias)
    share, token = lax.top_k(jax.nn.softmax(wide(gate)).transpose(0, 2, 1), top_k)
    row = jnp.arange(b)[:, None, None]
    hidden = jnp.einsum("bekd,edf->bekf", x[row, token], up, preferred_element_type=wide(x).dtype).astype(x.dtype)
    hidden = ACTIVATIONS[activation](hidden + up_bias[:, None])
    y = jnp.einsum("bekf,efd->bekd", hidden, down, preferred_element_type=wide(x).dtype) + down_bias[:, None]
    return jnp.zeros(x.shape, wide(x).dtype).at[row, token].add(y * share[..., None]).astype(x.dtype)


ALIASES: dict[str, str] = {}
"""Names under which these functions are called elsewhere."""
