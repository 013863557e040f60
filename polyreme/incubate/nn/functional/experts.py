"""Mixtures of experts that Paddle fuses by hand: in one call, or as dispatch, experts and reduction."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.ops.arithmetic import cast
from polyreme.ops.creation import arange, ones
from polyreme.ops.experts.counts import number_count
from polyreme.ops.experts.mixture import chosen_experts
from polyreme.ops.experts.routing import moe_combine
from polyreme.ops.indices.gather import gather, where
from polyreme.ops.manipulation import chunk, flatten, reshape, squeeze, transpose, unsqueeze
from polyreme.ops.scan import cumsum
from polyreme.ops.search import argsort, searchsorted


def fused_moe(
    x: Any,
    gate_weight: Any,
    ffn1_weight: Any,
    ffn2_weight: Any,
    ffn1_bias: Any = None,
    ffn1_scale: Any = None,
    ffn2_bias: Any = None,
    ffn2_scale: Any = None,
    quant_method: str = "None",
    moe_topk: int = 2,
    norm_topk_prob: bool = True,
    group_moe: bool = False,
) -> Any:
    """Each token through its moe_topk experts, swiglu(x ffn1_weight) ffn2_weight, weighed by the gate's softmax.

    x [batch, seq, d] -> the same. gate_weight: a weight [d, e], or the logits [batch, seq, e] themselves. ffn1_weight
    [e, d, 2 * f] joins the gate, which swish is taken of, and what it multiplies; ffn2_weight [e, f, d], ffn1_bias
    [e, 1, 2 * f], ffn2_bias [e, 1, d]. norm_topk_prob divides weights by their sum. group_moe: the experts are
    moe_topk groups of neighbours, a softmax is taken of each, and its best chosen. Raises ConfigError for a
    quantization, ShapeError for dims that do not fit.

    >>> import polyreme as pr
    >>> fused_moe(pr.ones([1, 3, 4]), pr.ones([4, 2]), pr.ones([2, 4, 6]), pr.ones([2, 3, 4])).shape
    paddle.Size([1, 3, 4])
    """
    _check_plain("fused_moe", quant_method, ffn1_scale=ffn1_scale, ffn2_scale=ffn2_scale)
    logits = F.router_logits(x, gate_weight) if len(gate_weight.shape) == 2 else gate_weight
    if list(logits.shape[:-1]) != list(x.shape[:-1]) or logits.shape[-1] != ffn1_weight.shape[0]:
        raise ShapeError(
            f"fused_moe: gate_weight {list(gate_weight.shape)} for x {list(x.shape)} and {ffn1_weight.shape[0]} "
            "experts; needs [width, experts], or the logits [batch, seq, experts]"
        )
    choices, gates = _choose(logits, moe_topk, norm_topk_prob, group_moe, "softmax")
    return _swiglu_experts(x, choices, gates, ffn1_weight, ffn2_weight, ffn1_bias, ffn2_bias)


def moe_dispatch(
    x: Any, gating_output: Any, moe_topk: int, group_moe: bool = False, topk_only_mode: bool = False
) -> tuple[Any, Any, Any, Any, Any]:
    """A row for each token and expert it goes to, sorted by expert, then by token: x [t, d], gating_output [t, e].

    Returns (rows [t * moe_topk, d]; tokens of each expert [e] int64; the row of each choice [moe_topk, t] int32; the
    weights of choices [t, moe_topk]; their experts [t, moe_topk] int32). Weights are the softmax of gating_output, or
    with topk_only_mode gating_output itself; group_moe: see fused_moe.

    >>> import polyreme as pr
    >>> rows, counts, *_ = moe_dispatch(pr.ones([3, 4]), pr.to_tensor([[1.0, 0], [0, 1], [2, 0]]), 1)
    >>> rows.shape, counts.tolist()
    (paddle.Size([3, 4]), [2, 1])
    """
    experts = gating_output.shape[-1]
    if len(x.shape) != 2 or len(gating_output.shape) != 2 or x.shape[0] != gating_output.shape[0]:
        raise ShapeError(
            f"moe_dispatch: x {list(x.shape)} and gating_output {list(gating_output.shape)}; needs [tokens, width] and "
            "[tokens, experts]"
        )
    choices, gates = _choose(gating_output, moe_topk, False, group_moe, "logits" if topk_only_mode else "softmax")
    order = argsort(flatten(choices), stable=True)
    place = transpose(reshape(argsort(order), choices.shape), [1, 0])
    counts = number_count(cast(choices, "int64"), experts)
    return gather(x, order // moe_topk), counts, cast(place, "int32"), gates, choices


def moe_ffn(
    permute_input: Any,
    token_nums_per_expert: Any,
    ffn1_weight: Any,
    ffn2_weight: Any,
    ffn1_bias: Any = None,
    ffn1_scale: Any = None,
    ffn2_scale: Any = None,
    quant_method: str = "None",
) -> Any:
    """swiglu(row ffn1_weight + ffn1_bias) ffn2_weight of the expert that each row is of: [rows, d] -> the same.

    token_nums_per_expert [e]: rows of each expert, in order; rows after them give 0. Weights are fused_moe's.
    """
    _check_plain("moe_ffn", quant_method, ffn1_scale=ffn1_scale, ffn2_scale=ffn2_scale)
    rows = permute_input.shape[0]
    ends = cumsum(cast(token_nums_per_expert, "int64"), 0)
    expert = searchsorted(ends, arange(rows, dtype="int64"), right=True)
    expert = unsqueeze(where(expert < ffn1_weight.shape[0], expert, -1), 1)
    return _swiglu_experts(permute_input, expert, ones([rows, 1]), ffn1_weight, ffn2_weight, ffn1_bias, None)


def moe_reduce(
    ffn_out: Any,
    expert_scales_float: Any,
    permute_indices_per_token: Any,
    top_k_indices: Any,
    ffn2_bias: Any = None,
    norm_topk_prob: bool = False,
    routed_scaling_factor: float = 1.0,
) -> Any:
    """The weighted sum of each token's rows, what brings moe_dispatch's rows back: [t * k, d] -> [t, d].

    expert_scales_float [t, k] weights, divided by their sum with norm_topk_prob, times routed_scaling_factor;
    permute_indices_per_token [k, t] rows; top_k_indices [t, k] experts, whose ffn2_bias [e, 1, d] is added to rows.
    """
    weights = reshape(expert_scales_float, top_k_indices.shape)
    if norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routed_scaling_factor
    out = moe_combine(ffn_out, weights, permute_indices_per_token)
    if ffn2_bias is None:
        return out
    return out + moe_combine(squeeze(ffn2_bias, 1), weights, transpose(top_k_indices, [1, 0]))


TOKENS_PER_CHOICE = 16
"""Of so many tokens of a sequence each expert of fused_ec_moe chooses one: PaddlePaddle's number."""


def fused_ec_moe(
    x: Any, gate: Any, bmm0_weight: Any, bmm0_bias: Any, bmm1_weight: Any, bmm1_bias: Any, act_type: str
) -> Any:
    """x plus what the experts that choose a token give it, weighed by softmax(gate): [batch, seq, d] -> the same.

    In each sequence an expert, act(x bmm0_weight + bmm0_bias) bmm1_weight + bmm1_bias, takes the seq // 16 tokens with
    the greatest share for it. gate [batch, seq, e] logits, bmm0_weight [e, d, f], bmm0_bias [e, 1, f], bmm1_weight
    [e, f, d], bmm1_bias [e, 1, d]; act_type: gelu or relu. Raises ConfigError for another, ShapeError for sequences
    shorter than 16. Source: arXiv:2202.09368.
    """
    _check_act("fused_ec_moe", act_type)
    if len(x.shape) != 3 or x.shape[1] < TOKENS_PER_CHOICE:
        raise ShapeError(
            f"fused_ec_moe: x {list(x.shape)}; needs [batch, seq, width] with seq of at least {TOKENS_PER_CHOICE}, as "
            f"each expert takes seq // {TOKENS_PER_CHOICE} tokens"
        )
    biases = squeeze(bmm0_bias, 1), squeeze(bmm1_bias, 1)
    top_k = x.shape[1] // TOKENS_PER_CHOICE
    return x + F.expert_choice(x, gate, bmm0_weight, biases[0], bmm1_weight, biases[1], top_k, act_type)


def _choose(logits: Any, top_k: int, normalize: bool, groups: bool, score: str) -> tuple[Any, Any]:
    if not groups:
        return F.choose_experts(logits, top_k=top_k, score=score, normalize=normalize)[:2]
    experts = logits.shape[-1]
    if experts % top_k:
        raise ConfigError(f"group_moe: moe_topk={top_k} groups of {experts} experts; give a number that divides them")
    parts = reshape(logits, [*logits.shape[:-1], top_k, experts // top_k])
    choices, gates, _ = F.choose_experts(parts, top_k=1, score=score, normalize=False)
    choices = squeeze(choices, -1) + arange(0, experts, experts // top_k, dtype="int32")
    gates = squeeze(gates, -1)
    return choices, gates / gates.sum(-1, keepdim=True) if normalize else gates


def _swiglu_experts(x: Any, choices: Any, gates: Any, ffn1: Any, ffn2: Any, bias1: Any, bias2: Any) -> Any:
    gate, up = chunk(ffn1, 2, axis=-1)
    gate_bias, up_bias = (None, None) if bias1 is None else chunk(squeeze(bias1, 1), 2, axis=-1)
    down_bias = None if bias2 is None else squeeze(bias2, 1)
    return chosen_experts(x, choices, gates, up, ffn2, gate, up_bias, down_bias, gate_bias=gate_bias)


def _check_act(what: str, act_type: str) -> None:
    if act_type not in ("gelu", "relu"):
        raise ConfigError(f"{what}: act_type={act_type!r}; give 'gelu' or 'relu'")


def _check_plain(what: str, quant_method: str, **scales: Any) -> None:
    there = [name for name, scale in scales.items() if scale is not None]
    if quant_method != "None" or there:
        raise ConfigError(
            f"{what}: quant_method={quant_method!r}{''.join(f', {name}' for name in there)}; weights are not quantized "
            "here: multiply them by their scales, and give quant_method='None'"
        )
