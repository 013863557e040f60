"""polyreme.compat.nn.functional: functions with the parameters and layouts of other libraries."""

from __future__ import annotations

import math
from typing import Any

from polyreme.errors import ShapeError
from polyreme.nn import functional as F
from polyreme.ops.by_dim import softmax
from polyreme.ops.manipulation import reshape, transpose


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """x @ weight^T + bias: [*b, in], [out, in], [out] -> [*b, out]."""
    return F.linear(input, transpose(weight, [1, 0]), bias)


def pad(input: Any, pad: Any, mode: str = "constant", value: float = 0.0) -> Any:
    """input with elements added before and after its dims: pairs, the last dim first.

    mode: constant (value), for any number of dims; reflect, replicate or circular for the last one, two or three.
    Raises ShapeError for pairs that do not fit.
    """
    widths = [int(n) for n in pad]
    dims = len(widths) // 2
    if len(widths) % 2 or dims > input.ndim:
        raise ShapeError(f"pad: {widths} for shape {list(input.shape)}; give pairs, for its last dims")
    if mode == "constant":
        return F.pad(input, widths + [0] * (2 * (input.ndim - dims)), mode, value or 0.0, None, False)
    if not 1 <= dims <= 3:
        raise ShapeError(f"pad: mode={mode!r} pads the last one, two or three dims, {dims} were asked for")
    outer, inner = list(input.shape)[: input.ndim - dims], list(input.shape)[input.ndim - dims :]
    layout = {1: "NCL", 2: "NCHW", 3: "NCDHW"}[dims]
    padded = F.pad(reshape(input, [1, math.prod(outer), *inner]), widths, mode, 0.0, layout)
    return reshape(padded, [*outer, *list(padded.shape)[2:]])


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(scale * query key^T + mask) value with heads before sequence: [*b, heads, s, d], [*b, kv_heads, t, d]
    twice -> query's shape.

    attn_mask broadcasts to [*b, heads, s, t]. Dropout acts whenever dropout_p is above 0. kv_heads may divide heads
    with enable_gqa. A query that sees no key gives 0. Raises ShapeError for dims that do not fit.
    """
    if query.ndim < 3:
        raise ShapeError(f"scaled_dot_product_attention takes [*b, heads, seq, d], got {list(query.shape)}")
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ShapeError(
            f"scaled_dot_product_attention: {query.shape[-3]} heads of query, {key.shape[-3]} of key; pass "
            "enable_gqa=True"
        )
    q, k, v = (transpose(reshape(t, [-1, *t.shape[-3:]]), [0, 2, 1, 3]) for t in (query, key, value))
    mask = attn_mask
    if mask is not None and mask.ndim > 4:
        mask = reshape(mask, [-1, *mask.shape[-3:]])
    done = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, True, None, scale, enable_gqa)
    return reshape(transpose(done, [0, 2, 1, 3]), [*query.shape[:-1], value.shape[-1]])


def unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    """Every window of an image as a column: [N, C, H, W] -> [N, C * kh * kw, windows]."""
    return F.unfold(input, kernel_size, stride, padding, dilation)


__all__ = ["linear", "pad", "scaled_dot_product_attention", "softmax", "unfold"]
