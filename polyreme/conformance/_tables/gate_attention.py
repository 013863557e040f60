"""Contract rows of ops/attention/gated.py against its formula; PaddlePaddle 3.3.1's CPU wheel has no kernel for it."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

B, M, Q, K, A, C, H, D = 2, 2, 3, 4, 4, 5, 2, 3


def attend(
    query, key=None, query_weight=None, key_weight=None, value_weight=None, qkv_weight=None, gate_linear_weight=None,
    gate_linear_bias=None, out_linear_weight=None, out_linear_bias=None, nonbatched_bias=None, attn_mask=None,
    has_gating=True, merge_qkv=True, use_flash_attn=False,
):  # fmt: skip
    key = query if key is None else key
    if merge_qkv:
        query_weight, key_weight, value_weight = (w.transpose(2, 0, 1) for w in qkv_weight)
    q = np.einsum("bmra,ahd->bmrhd", query, query_weight) / np.sqrt(query_weight.shape[2])
    k, v = (np.einsum("bmra,ahd->bmrhd", key, w) for w in (key_weight, value_weight))
    scores = np.einsum("bmqhd,bmkhd->bmhqk", q, k)
    scores = scores + (0 if attn_mask is None else attn_mask) + (0 if nonbatched_bias is None else nonbatched_bias)
    mixed = np.einsum("bmhqk,bmkhd->bmqhd", sp.softmax(scores, -1), v)
    if has_gating:
        mixed = mixed * sp.expit(np.einsum("bmra,ahd->bmrhd", query, gate_linear_weight) + gate_linear_bias)
    return np.einsum("bmqhd,hdo->bmqo", mixed, out_linear_weight) + out_linear_bias


# names of the signature in order -> shapes; None leaves one out
WHOLE = {"query": (B, M, K, A), "qkv_weight": (3, H, D, A)}
APART = {
    "query": (B, M, Q, A), "key": (B, M, K, C), "query_weight": (A, H, D), "key_weight": (C, H, D),
    "value_weight": (C, H, D),
}  # fmt: skip
GATE = {"gate_linear_weight": (A, H, D), "gate_linear_bias": (H, D)}
OUT = {"out_linear_weight": (H, D, C), "out_linear_bias": (C,)}
TENSORS = (
    "query", "key", "query_weight", "key_weight", "value_weight", "qkv_weight", *GATE, *OUT, "nonbatched_bias",
    "attn_mask",
)  # fmt: skip


def arrays(shapes, *attributes):
    def make(rng):
        return *(
            rng.standard_normal(shapes[n]).astype("float32") if n in shapes else None for n in TENSORS
        ), *attributes

    return make


def bad(shapes, match, *attributes, error=ConfigError):
    return arrays(shapes, *attributes)(np.random.default_rng(0)), error, match


def case(shapes, *attributes, **more):
    return Case("fused_gate_attention", arrays(shapes, *attributes), attend, terms=B * K * A, **more)


MERGED = {**WHOLE, **GATE, **OUT, "nonbatched_bias": (B, 1, H, K, K), "attn_mask": (B, M, 1, 1, K)}
PLAIN = {**APART, **OUT, "attn_mask": (B, M, 1, 1, K)}
CASES = [
    case(MERGED, bad=bad({**WHOLE, **OUT}, "has_gating=True needs gate_linear_weight, gate_linear_bias")),
    case(PLAIN, False, False, tag="apart", bad=bad({**PLAIN, **WHOLE}, "no use for qkv_weight", False, False)),
    case(
        {**MERGED, "nonbatched_bias": (1, 1, H, K, K)}, True, True, True, tag="blocks",
        bad=bad({**MERGED, "key": (B, M, Q, C)}, "attends to query"),
    ),
    case(
        {**WHOLE, **OUT}, False, True, True, tag="blocks_plain",
        bad=bad({**WHOLE, **OUT, "query": (B, M, K, C)}, "needs .width, heads, head_dim", False, error=ShapeError),
    ),
]  # fmt: skip
