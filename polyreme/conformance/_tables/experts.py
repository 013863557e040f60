"""Contract rows of ops/experts/mixture.py and ops/experts/counts.py; values without a reference are PaddlePaddle's examples."""

import numpy as np
import scipy.special as sp

from polyreme.conformance._tables.attention import floats, then
from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

LOGITS = np.random.default_rng(7).permutation(np.arange(40) / 8).reshape(2, 5, 4).astype("float32")
WIDE = np.random.default_rng(8).permutation(np.arange(48) / 8).reshape(6, 8).astype("float32")
BIAS = np.random.default_rng(9).permutation(np.arange(8)).astype("float32")
ALLOWED = np.array([True, False, False, True])
CHOICES = np.array([[2, 0], [2, 1], [-1, 2], [0, 2], [2, -1]], "int32")
GATES = np.array([[0.5, 0.1], [0.9, 0.2], [0.0, 0.8], [0.3, 0.7], [0.6, 0.0]], "float32")
SCORES = {
    "softmax": lambda x: sp.softmax(x, -1),
    "sigmoid": sp.expit,
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(x, 0)),
    "relu": lambda x: np.maximum(x, 0),
    "logits": lambda x: x,
}


def choose(
    logits, bias=None, allowed=None, top_k=2, score="softmax", normalize=True, scale=1.0, groups=1, top_groups=1
):
    """One token at a time."""
    scores, e = SCORES[score](logits.astype("float64")), logits.shape[-1]
    tokens = scores.reshape(-1, e)
    choices, gates = np.full((len(tokens), top_k), -1), np.zeros((len(tokens), top_k))
    for t, row in enumerate(tokens):
        by = row + (0 if bias is None else bias)
        open_to = set(range(e) if allowed is None else np.flatnonzero(np.broadcast_to(allowed, e)))
        size = e // groups
        worth = [sum(sorted(by[g * size : (g + 1) * size])[-(1 if bias is None else 2) :]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -worth[g])[:top_groups]
        ranked = [i for i in np.argsort(-by, kind="stable") if i in open_to and i // size in best][:top_k]
        choices[t, : len(ranked)], gates[t, : len(ranked)] = ranked, row[ranked]
    gates = gates / (gates.sum(-1, keepdims=True) + 1e-20) if normalize else gates
    shape = (*logits.shape[:-1], top_k)
    return choices.reshape(shape), gates.reshape(shape) * scale, scores


def pick(logits, allowed=None, capacity=1, score="softmax", scale=1.0):
    """One expert of one sequence at a time."""
    scores = SCORES[score](logits.astype("float64"))
    choices, gates = np.full(scores.shape, -1, "int32"), np.zeros(scores.shape)
    open_to = np.broadcast_to(True if allowed is None else allowed, scores.shape)
    for *row, e in np.ndindex(*scores.shape[:-2], scores.shape[-1]):
        column = (*row, slice(None), e)
        ranked = [t for t in np.argsort(-scores[column], kind="stable") if open_to[column][t]][:capacity]
        choices[(*row, ranked, e)], gates[(*row, ranked, e)] = e, scores[column][ranked] * scale
    return choices, gates, scores


def limit(choices, gates, experts, capacity, by="order"):
    left, taken = np.full(choices.shape, -1), [0] * experts
    turn = [(t, j) for j in range(choices.shape[1]) for t in range(len(choices))]
    for t, j in turn if by == "order" else sorted(turn, key=lambda at: -gates[at]):
        expert = choices[t, j]
        if expert >= 0 and taken[expert] < capacity:
            taken[expert] += 1
            left[t, j] = expert
    return left


def balance(scores, choices, per_sequence=False, counts=None):
    if per_sequence:
        return np.mean([balance(s, c) for s, c in zip(scores, choices, strict=True)])
    e = scores.shape[-1]
    counts = np.array([(choices == i).sum() for i in range(e)]) if counts is None else counts
    part = counts / counts.sum()
    share = (scores / scores.sum(-1, keepdims=True)).reshape(-1, e).mean(0)
    return e * (part * share).sum()


def compute(
    x, choices, gates, up, down, gate=None, up_bias=0, down_bias=None, activation="silu", over=None, gate_bias=0
):
    bend = {"silu": lambda v: v * sp.expit(v), "relu": lambda v: np.maximum(v, 0), "gelu": lambda v: v * sp.ndtr(v)}
    out = np.zeros(x.shape)
    for t in np.ndindex(x.shape[:-1]):
        for e, g in zip(choices[t], gates[t], strict=True):
            if e >= 0:
                hidden = x[t] @ up[e] + (0 if up_bias is None or np.ndim(up_bias) == 0 else up_bias[e])
                hidden = (
                    bend[activation](hidden)
                    if gate is None
                    else bend[activation](x[t] @ gate[e] + (0 if np.ndim(gate_bias) == 0 else gate_bias[e])) * hidden
                )
                out[t] += g * (hidden @ down[e] + (0 if down_bias is None else down_bias[e]))
    return out


def gated(rng):
    x, up, down, gate = floats((5, 3), (3, 3, 4), (3, 4, 3), (3, 3, 4))(rng)
    return x, CHOICES, GATES, up, down, gate


def biased(rng):
    x, up, down, up_bias, down_bias = floats((5, 3), (3, 3, 4), (3, 4, 3), (3, 4), (3, 3))(rng)
    return x, CHOICES, GATES, up, down, None, up_bias, down_bias, "gelu"


def choose_tokens(x, gate, up, up_bias, down, down_bias, top_k, activation):
    share, out = sp.softmax(gate, -1), np.zeros(x.shape)
    for b, e in np.ndindex(len(x), len(up)):
        for s in np.argsort(-share[b, :, e], kind="stable")[:top_k]:
            y = np.maximum(x[b, s] @ up[e] + up_bias[e], 0) @ down[e] + down_bias[e]
            out[b, s] += share[b, s, e] * y
    return out


def counts(choices, experts):
    return np.array([(choices == e).sum() for e in range(experts)])


X = np.ones((5, 3), "float32")
UP, DOWN = np.ones((3, 3, 4), "float32"), np.ones((3, 4, 3), "float32")

PICKED = np.array([1, 3, 3, 3, 3, 2, 1, 1, -1], "int64")
BY_WORKER, ROOM = np.array([1, 2, 2, 8, 3, 6]), np.array([5, 5, 5])
VALUES, DRAWS = np.array([[0.9, 0.3], [0.8, 0.1], [0.7, 0.2]], "float32"), np.array([0.7, 0.1, 0.5], "float32")


def constant(value):
    return lambda *_: np.array(value)


CASES = [
    Case("number_count", lambda rng: (PICKED, 5), lambda x, e: counts(x, e), no_grad="counts"),
    Case("positions_by_expert", lambda rng: (PICKED, 4), constant([7, 6, 0, 5, 4, 3, 2, 1, -1]), no_grad="indices"),
    Case("assign_pos", lambda rng: (PICKED, np.array([0, 3, 4, 8])), constant([7, 6, 0, 5, 4, 3, 2, 1]), no_grad="indices", host="the length of its result is among its values", bad=((PICKED, np.array([0, 3, 4, 9])), ShapeError, r"cum_count=\[0, 3, 4, 9\], .* are \[0, 3, 4, 8\]")),
    Case("random_routing", lambda rng: (CHOICES[:3].astype("int64"), VALUES, DRAWS), constant([[2, -1], [2, 1], [-1, -1]]), no_grad="indices", bad=((CHOICES, GATES, GATES[:, 0], 3), ConfigError, "topk=3")),
    Case("random_routing", lambda rng: (CHOICES[:1], VALUES[:1], DRAWS[1:2]), constant([[2, 0]]), no_grad="indices", tag="stays", bad=((CHOICES, GATES, GATES), ShapeError, r"prob \[5, 2\]; needs")),
    Case("limit_by_capacity", lambda rng: (BY_WORKER, ROOM, 2), constant([1, 2, 2, 4, 3, 3]), no_grad="counts", bad=((BY_WORKER, ROOM, 3), ShapeError, "n_worker=3")),
    Case("prune_gate_by_capacity", lambda rng: (PICKED, np.array([0, 3, 1, 3, 0, 0, 0, 0]), 8, 1), constant([1, 3, 3, 3, -1, 2, 1, 1, -1]), no_grad="indices", bad=((PICKED, BY_WORKER, 8, 1), ShapeError, r"needs \[8\]")),
    Case("router_logits", floats((2, 3, 4), (4, 5)), lambda x, w: x.astype("float64") @ w, amp_out="float32", bad=((X, UP[0].T), ShapeError, "do not fit")),
    Case("choose_experts", lambda rng: (LOGITS,), choose, bad=((LOGITS, None, None, 5), ConfigError, "top_k=5 of 4 experts; give 1 to 4")),
    Case("choose_experts", lambda rng: (LOGITS, None, ALLOWED, 3, "sigmoid", False, 2.5), choose, tag="allowed", bad=((LOGITS, None, None, 2, "tanh"), ConfigError, "unknown score 'tanh'; one of softmax, sigmoid")),
    Case("choose_experts", lambda rng: (WIDE, BIAS, None, 3, "sigmoid", True, 1.0, 4, 2), choose, tag="groups-bias", bad=((WIDE, BIAS, None, 3, "sigmoid", True, 1.0, 4, 1), ConfigError, "top_groups of them hold top_k")),
    Case("choose_experts", lambda rng: (WIDE, None, None, 2, "sqrtsoftplus", True, 1.0, 4, 2), choose, tag="groups"),
    Case("choose_experts", lambda rng: (LOGITS - 1.1, None, None, 1, "relu", False), choose, tag="relu"),
    Case("choose_experts", lambda rng: (LOGITS, None, None, 2, "logits", False), choose, tag="logits"),
    Case("choose_tokens", lambda rng: (LOGITS, None, 2), pick, bad=((LOGITS, None, 6), ConfigError, "capacity=6 of 5 tokens; give 1 to 5")),
    Case("choose_tokens", lambda rng: (LOGITS, LOGITS > 3, 3, "sigmoid", 2.5), pick, tag="allowed", bad=((LOGITS[0, 0],), ShapeError, r"needs \[..., tokens, experts\]")),
    Case("limit_experts", lambda rng: (CHOICES, GATES, 3, 2), limit, no_grad="indices", bad=((CHOICES, GATES, 3, 0), ConfigError, "capacity=0")),
    Case("limit_experts", lambda rng: (CHOICES, GATES, 3, 2, "gate"), limit, no_grad="indices", tag="gate", bad=((CHOICES, GATES, 3, 2, "prob"), ConfigError, "by='prob'")),
    Case("expert_load", lambda rng: (CHOICES, 4), counts, no_grad="counts"),
    Case("balance_loss", lambda rng: (np.add(GATES[:, :1], [[0.1, 0.4, 0.2]]), CHOICES), balance, terms=24),
    Case("balance_loss", lambda rng: (sp.softmax(LOGITS, -1), np.argsort(-LOGITS, -1)[..., :2].astype("int32"), True), balance, terms=24, tag="sequence", bad=((WIDE, CHOICES, True), ShapeError, r"needs \[batch, seq, experts\]")),
    Case("balance_loss", lambda rng: (sp.softmax(LOGITS, -1), np.argsort(-LOGITS, -1)[..., :2].astype("int32"), False, np.array([7, 0, 2, 5], "int32")), balance, terms=24, tag="counts", bad=((WIDE, CHOICES, False, CHOICES[0]), ShapeError, r"counts \[\d\] for scores .*; needs \[")),
    Case("router_z_loss", floats((2, 3, 4)), lambda x: (sp.logsumexp(x.astype("float64"), -1) ** 2).mean(), terms=24),
    Case("experts_ffn", gated, compute, terms=24, bad=((X, CHOICES, GATES, UP, UP), ShapeError, r"down \[3, 3, 4\] .* needs \[3, 4, 3\]")),
    Case("experts_ffn", biased, compute, terms=24, tag="bias", bad=((X, CHOICES, GATES, UP, DOWN, None, None, None, "tanh"), ConfigError, "unknown activation 'tanh'")),
    Case("experts_ffn", lambda rng: (*gated(rng), None, None, "silu", *floats((3, 4))(rng)), lambda *a: compute(*a[:9], None, a[9]), terms=24, tag="gate-bias", bad=((X, CHOICES, GATES, UP, DOWN, None, None, None, "silu", UP[:, 0]), ShapeError, "gate_bias without gate")),
    Case("expert_choice", lambda rng: (*floats((2, 5, 3))(rng), LOGITS[..., :2], *floats((2, 3, 4), (2, 4), (2, 4, 3), (2, 3))(rng), 2, "relu"), choose_tokens, terms=24, bad=((X[None], X[None], UP, UP[:, 0], DOWN, DOWN[:, 0], 6, "relu"), ConfigError, "top_k=6 of 5 tokens")),
    Case("routed_experts", then(floats((2, 2, 3)), CHOICES[:4].reshape(2, 2, 2), GATES[:4].reshape(2, 2, 2), UP / 4, DOWN / 4, None, None, None, "relu"), compute, terms=24, bad=((X, CHOICES, GATES.T, UP, DOWN), ShapeError, r"gates \[2, 5\]")),
]  # fmt: skip
