"""Contract rows of ops/attention: packed.py, columns.py and sparse.py."""

import numpy as np

from polyreme.conformance._tables.attention import attend, floats, probs, then
from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError


def unpacked(qkv):
    q = qkv[..., :-2, :, :]
    return q.reshape(*q.shape[:-3], -1, q.shape[-1]), qkv[..., -2, :, :], qkv[..., -1, :, :]


def packed(qkv, dropout=0.0, causal=False, softmax=False):
    q, k, v = unpacked(qkv)
    return (attend(q, k, v, None, causal), *([probs(q, k, causal)] if softmax else []))


def ragged(
    q, k, v, cu_q, cu_k, s, t, used_q=None, used_k=None, scale=None, causal=False, window=(-1, -1), padded=False
):
    """One sequence, one query at a time."""
    out = np.zeros(q.shape)
    for i in range(len(cu_q) - 1):
        a, b = (i * s, i * t) if padded else (cu_q[i], cu_k[i])
        n = cu_q[i + 1] - cu_q[i] if used_q is None else used_q[i]
        m = cu_k[i + 1] - cu_k[i] if used_k is None else used_k[i]
        for j in range(n):
            low = max(0, j + m - n - window[0]) if window[0] >= 0 else 0
            high = j + m - n + 1 if causal else m if window[1] < 0 else min(m, j + m - n + window[1] + 1)
            if low < high:
                one = q[None, a + j : a + j + 1], k[None, b + low : b + high], v[None, b + low : b + high]
                out[a + j] = attend(*one, scale=scale)[0, 0]
    return out


def varlen_packed(
    qkv, cu_q, cu_k, s, t, scale, dropout=0.0, causal=False, softmax=False, seed=None, rng="", padded=True
):
    return ragged(*unpacked(qkv), cu_q, cu_k, s, t, scale=scale, causal=causal, padded=padded)


def v3(*args, softmax_scale=None, causal=False, window_size=(-1, -1), seqused_q=None, seqused_k=None):
    return ragged(*args, seqused_q, seqused_k, softmax_scale, causal, window_size)


def seen_by_columns(q, k, bounds=None, blocks=None, causal=False, window=(-1, -1)):
    """One key column at a time."""
    b, s, h = q.shape[:3]
    t = k.shape[1]
    seen = np.ones((b, h, s, t), bool)
    for i, n, j in np.ndindex(b, h, t):
        column = seen[i, n, :, j]
        if bounds is not None:
            at = bounds[i, n * bounds.shape[1] // h, j]
            column[at[0] : at[1] if len(at) == 4 or (causal and len(at) == 2) else None] = False
            if not causal:
                column[slice(at[2], at[3]) if len(at) == 4 else slice(at[1])] = False
        if causal:
            column[:j] = False
        for row in range(s):
            inside = (window[0] < 0 or j >= row - window[0]) and (window[1] < 0 or j <= row + window[1])
            column[row] &= inside and (blocks is None or blocks[i, n * blocks.shape[1] // h, row // 128, j // 128] != 0)
    return seen


def columns(q, k, v, bounds, blocks, causal=False, window=(-1, -1)):
    return flashmask(q, k, v, bounds, causal, window, blocks, return_softmax_lse=True)


def segments(cu_q, cu_k, tokens, causal):
    """From which row on each key is hidden, and before which: of the rows that one_sees, one past the last, the first."""

    def one_sees(i, j):
        return any(
            a <= i < b and c <= j < d and (not causal or j - d <= i - b)
            for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
        )

    rows = [[i for i in range(cu_q[-1]) if one_sees(i, j)] for j in range(tokens)]
    assert all(row == list(range(row[0], row[-1] + 1)) for row in rows if row)
    return np.array([[row[-1] + 1, row[0]] if row else [0, 0] for row in rows])[None, None]


def flashmask(
    q, k, v, bounds=None, causal=False, window_size=None, block_mask=None, softmax_scale=None,
    return_softmax_lse=False, softcap=0,
):  # fmt: skip
    window = (window_size,) * 2 if isinstance(window_size, int) else window_size or (-1, -1)
    mask = seen_by_columns(q, k, bounds, block_mask, causal, window)
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    weights = np.exp(scores) * mask
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bhst,bthd->bshd", weights / np.where(total == 0, 1, total), v)
    return (out, np.log(total[..., 0])) if return_softmax_lse else out


def by_rows(q, k, v, offset, columns, padding=None, pair=None):
    out = np.zeros(q.shape)
    for b, h, i in np.ndindex(q.shape[:3]):
        columns_of_row = columns[b, h, offset[b, h, i] : offset[b, h, i + 1]]
        columns_of_row = columns_of_row if padding is None else columns_of_row[padding[b, columns_of_row] != 0]
        columns_of_row = columns_of_row if pair is None else columns_of_row[pair[i, columns_of_row] != 0]
        if len(columns_of_row):
            weights = np.exp(k[b, h, columns_of_row] @ q[b, h, i] / np.sqrt(q.shape[-1]))
            out[b, h, i] = weights @ v[b, h, columns_of_row] / weights.sum()
    return out


CU = np.array([0, 3, 3, 7], "int32")
LONG = np.array([0, 4, 5, 9], "int32")
TOKENS = floats((8, 4, 3), (9, 2, 3), (9, 2, 3))
QKV = floats((2, 6, 4, 3), (2, 6, 2, 3), (2, 6, 2, 3))
COLUMN = np.minimum(np.arange(6) + 1 + np.arange(12).reshape(2, 1, 6) % 4, 6).astype("int32")[..., None]
BOTH = np.concatenate([COLUMN, np.maximum(COLUMN - 3, 0)], -1)
FOUR = np.concatenate([np.minimum(COLUMN, 4), COLUMN, np.maximum(COLUMN - 4, 0), np.maximum(COLUMN - 2, 0)], -1)
FOR_HEADS = np.repeat(COLUMN, 2, 1) - np.array([0, 1], "int32").reshape(1, 2, 1, 1)
ONES = np.ones((1, 3, 1, 2), "float32")
OFFSET = np.array([[[0, 2, 2, 5], [0, 1, 3, 4]]], "int32")
COLUMNS = np.array([[[0, 2, 0, 1, 2], [1, 0, 1, 2, 0]]], "int32")
PADDING = np.array([[1, 1, 0]], "float32")
LOWER = np.tril(np.ones((3, 3), "float32"))
BHSD = floats((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
MASKS = "a mask has no gradient"

CASES = [
    Case("flash_attn_qkvpacked", then(floats((2, 5, 4, 2, 3)), 0.0, True), packed, terms=40, bad=((ONES,), ShapeError, r"\[1, 3, 1, 2\]; needs 5 dims")),
    Case("flash_attn_qkvpacked", then(floats((1, 4, 3, 2, 3)), 0.0, False, True), packed, terms=40, tag="probs", bad=((np.ones((1, 3, 2, 1, 2), "float32"),), ShapeError, "kv_heads")),
    Case("flash_attn_varlen_qkvpacked", then(floats((8, 3, 2, 3)), CU, CU, 4, 4, 0.6, 0.0, True, False, None, "", False), varlen_packed, terms=40, bad=((ONES, CU, CU, 4, 4, 1.0, 0.0, False, True), ConfigError, "return_softmax=True")),
    Case("flash_attn_varlen_qkvpacked", then(floats((13, 4, 2, 3)), CU, CU, 4, 4, 0.6), varlen_packed, terms=40, tag="padded", bad=((np.ones((8, 3, 1, 2), "float32"), CU, CU, 4, 4, 1.0), ShapeError, "3 sequences padded to 4 for 8 tokens")),
    Case("flash_attention_v3_varlen", then(TOKENS, CU, LONG, 4, 5), v3, kwargs={"causal": True, "softmax_scale": 0.8}, terms=40, bad=((ONES[0], ONES[0], ONES[0], CU, CU, 4, 4), ShapeError, "hold 7 at")),
    Case("flash_attention_v3_varlen", then(TOKENS, CU, LONG, 4, 5), v3, kwargs={"window_size": (1, 2), "seqused_q": np.array([2, 0, 4], "int32"), "seqused_k": np.array([4, 1, 2], "int32")}, terms=40, tag="window-used"),
    Case("ragged_rows", then(floats((8, 1, 2)), CU, 4), lambda x, cu, n: np.concatenate([x, np.zeros((8, 1, 2))])[cu[:-1, None] + np.arange(n)], bad=((ONES, CU, 4), ShapeError, "ragged batches")),
    Case("ragged_tokens", then(floats((3, 4, 1, 2)), CU, 8), lambda x, cu, n: np.concatenate([x[0, :3], x[2, :4], np.zeros((1, 1, 2))])),
    Case("segment_bounds", lambda rng: (CU, LONG, 10, True), segments, no_grad="numbers of rows"),
    Case("column_attention", then(QKV, FOUR, np.ones((2, 4, 1, 1), "int32")), columns, terms=40, amp_out=("bfloat16", "float32"), bad=((ONES, ONES, ONES, COLUMN[:1, :, :3].astype("float32"), None, True), DTypeError, "float32; needs int32")),
    Case("column_attention_with_dropout", then(QKV, COLUMN, None, True), lambda q, k, v, b, blocks, causal: columns(q, k, v, b, blocks, causal), terms=40, amp_out=("bfloat16", "float32")),
    Case("flashmask_attention", then(QKV, COLUMN), flashmask, kwargs={"causal": True}, terms=40, bad=((ONES, ONES, ONES, BOTH[:1]), ShapeError, r"\[1, 1, 6, 2\] with causal=True")),
    Case("flashmask_attention", then(QKV, np.concatenate([COLUMN, np.minimum(COLUMN + 2, 6)], -1)), flashmask, kwargs={"causal": True, "softmax_scale": 0.9, "return_softmax_lse": True}, terms=40, tag="causal-2", bad=((ONES, ONES, ONES, FOUR[:1, :, :3]), ShapeError, "needs .* 1 or 2")),
    Case("flashmask_attention", then(QKV, BOTH), flashmask, terms=40, tag="both-2"),
    Case("flashmask_attention", then(QKV, FOUR), flashmask, terms=40, tag="both-4"),
    Case("flashmask_attention", then(QKV, FOR_HEADS), flashmask, kwargs={"causal": True, "window_size": 2}, terms=40, tag="heads-window"),
    Case("flashmask_attention", then(QKV), flashmask, terms=40, tag="plain"),
    Case("flashmask_attention", then(QKV, COLUMN), flashmask, kwargs={"causal": True, "window_size": 3, "softcap": 0.7}, terms=40, tag="softcap"),
    Case("flashmask_attention", then(floats((1, 130, 1, 2), (1, 130, 1, 2), (1, 130, 1, 2)), np.full((1, 1, 130, 2), [130, 0], "int32")), flashmask, kwargs={"block_mask": np.array([[[[1, 0], [1, 1]]]], "int32")}, terms=300, tag="blocks"),
    Case("sparse_attention", then(BHSD, OFFSET, COLUMNS), by_rows, terms=24, bad=((ONES, ONES, ONES, OFFSET, COLUMNS), ShapeError, "sparse_attention: query")),
    Case("sparse_attention", then(BHSD, OFFSET, COLUMNS, PADDING, LOWER), by_rows, terms=24, tag="masks"),
]  # fmt: skip
