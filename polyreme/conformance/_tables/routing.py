"""Contract rows of ops/experts/routing.py; moe_gate_dispatch and cal_aux_loss gave PaddlePaddle 3.3.1's numbers by hand too."""

import numpy as np

from polyreme.conformance._tables.attention import floats, then
from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

ROUTES = np.array([[2, -1], [0, 2], [-1, 0], [2, 1]], "int32")
PROBS = np.arange(1, 9, dtype="float32").reshape(4, 2) / 8
COUNTS, PADDED = [2, 1, 3], [2, 2, 4]
ROWMAP = np.array([[-1, -1, 4], [0, -1, 5], [1, -1, -1], [-1, 2, 6]], "int32")
DRAWN = np.random.default_rng(3)
GATES = np.array([[0.9, 0.3, 0.1], [0.8, 0.1, 0.4], [0.7, 0.2, 0.6], [0.2, 0.5, 0.3]], "float32")
MASKS = (np.array([2, 1, 2], "int64"), np.array([1, 1, 0, 1], "float32"), np.array([1, 1, 1, 0, 1, 1], "float32"))
PUBLISHED = np.array([[0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]], "float32")


def permuted(x, routes, probs, scale=None, starts=(0, 2, 4), counts=COUNTS, rows=8):
    out, rowmap, weights = np.zeros((rows, *x.shape[1:])), np.full((len(x), len(counts)), -1), np.zeros(rows)
    scales, experts = None if scale is None else np.zeros((rows, scale.shape[1])), np.full(rows, -1)
    for e, place in enumerate(starts):
        for token, j in np.argwhere(routes == e):
            out[place], rowmap[token, e], weights[place], experts[place] = x[token], place, probs[token, j], e
            if scale is not None:
                scales[place] = scale[token]
            place += 1
    return [r for r in (out, rowmap, weights, scales, experts) if r is not None]


def permute(x, scale, routes, probs, *_, return_expert_indices=False):
    made = permuted(x, routes, probs, scale)
    return made if return_expert_indices else made[:-1]


def unpermuted(rows, rowmap, routes, weights, s, e, mix=True, weighted=False):
    out, probs = np.zeros((s, rows.shape[1])), np.zeros(routes.shape)
    for token in range(s):
        for row in rowmap[token][rowmap[token] >= 0]:
            out[token] += rows[row] * (weights[row] if weighted else 1)
        for j, expert in enumerate(routes[token]):
            probs[token, j] = weights[rowmap[token, expert]] if expert >= 0 else 0
    return out, probs


def dispatch(x, gates, bias, k, capacity, pad):
    by = gates if bias is None else gates + bias
    s, e = gates.shape
    experts = np.argsort(-by, 1, kind="stable")[:, :k]
    rows, weights, index, count = np.zeros((e * capacity, x.shape[1])), np.zeros((s, k)), np.zeros((k, s), int), [0] * e
    for j, token in np.ndindex(k, s):
        expert = experts[token, j]
        if count[expert] < capacity:
            index[j, token] = expert * capacity + count[expert]
            rows[index[j, token]], weights[token, j] = x[token], gates[token, expert]
        count[expert] += 1
    return rows, weights, index, np.cumsum(count), experts


def aux(gate, sent, tokens, dispatched, experts, group, k, clip):
    n = len(gate) if tokens is None else tokens.sum() if dispatched is None else dispatched.sum()
    loss = experts * sum(gate[:, i].sum() / n * sent[i] / n for i in range(experts)) / (k if group else 1)
    loss = loss * n / max(tokens.sum(), clip) if dispatched is not None else loss
    return loss, float(n), sent / n


PERMUTE = (ROUTES, PROBS, 3, COUNTS, 2)
ONES = np.ones((4, 2), "float32")

CASES = [
    Case("permuted_rows", then(floats((4, 3)), ROUTES, PROBS, None, [0, 2, 4], COUNTS, 8), permuted),
    Case("moe_permute", then(floats((4, 3)), None, *PERMUTE), permute, kwargs={"return_expert_indices": True}, bad=((ONES, None, ROUTES, PROBS, 3, [2, 2, 2], 2), ShapeError, r"sends \[2, 1, 3\]")),
    Case("moe_permute", then(floats((4, 3), (4, 2)), *PERMUTE), permute, tag="scales", bad=((ONES, None, ROUTES, PROBS, 3, COUNTS, 2, False), ConfigError, "do_gather=False")),
    Case("moe_unpermute", lambda rng: (*floats((8, 3))(rng), ROWMAP, ROUTES, np.abs(floats((8,))(rng)[0]), 4, 3, True, True), unpermuted, bad=((ONES, ROWMAP, ROUTES, PROBS, 5, 3), ShapeError, r"needs \[5, 3\]")),
    Case("moe_gate_dispatch", then(floats((4, 2)), GATES, None, 2, 2, True), dispatch, bad=((ONES, GATES, None, 2, 2, False), ConfigError, "use_pad=False")),
    Case("moe_gate_dispatch", then(floats((4, 2)), GATES, np.array([0, 0.45, 0.13], "float32"), 2, 3, True), dispatch, tag="bias"),
    Case("moe_combine", then(floats((6, 3), (4, 2)), np.array([[0, 1, 2, 3], [5, 4, 0, 0]], "int32")), lambda x, w, at: np.einsum("ksw,sk->sw", x[at], w), bad=((ONES, ONES, ROUTES), ShapeError, r"scatter_index \[4, 2\]")),
    Case("cal_aux_loss", lambda rng: (np.abs(GATES), *MASKS, 3, True, 2, 1e-6), aux, terms=24),
    Case("cal_aux_loss", lambda rng: (PUBLISHED, np.array([2, 1, 2, 1], "int64"), np.array([1, 1, 0], "float32"), None, 4, False, 2, 1e-6), lambda *_: (np.float64(4.7), np.float64(2.0), np.array([1, 0.5, 1, 0.5])), no_ref_grad="numbers", terms=24, tag="by-hand"),
    Case("int_bincount", lambda rng: (np.array([3, 1, 1, 5, 7, 4], "int32"), 1, 5), lambda x, *_: np.array([2, 0, 1, 1]), no_grad="counts", bad=((ROUTES, 3, 1), ConfigError, "low=3, high=1")),
]  # fmt: skip
