"""Attention under the paths that models import it from."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.ops.attention.packed import segment_attention


class LowerTriangularMask:
    """A mask for memory_efficient_attention: query i sees the keys up to i."""


def memory_efficient_attention(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: float | None = None,
    training: bool = True,
) -> Any:  # fmt: skip
    """softmax(scale * query key^T + attn_bias) value, all [batch, seq, heads, head_dim]."""
    causal = isinstance(attn_bias, LowerTriangularMask)
    return F.scaled_dot_product_attention(
        query, key, value, None if causal else attn_bias, p, causal, training, scale=scale
    )


def fused_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scaling_factor: float | None = None, training: bool = True, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    """scaled_dot_product_attention with the scale by its other name."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, training, scale=scaling_factor
    )


def flash_attn_unpadded(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    scale: float, dropout: float = 0.0, causal: bool = False, return_softmax: bool = False,
    fixed_seed_offset: Any = None, rng_name: str = "", training: bool = True, name: str | None = None,
) -> tuple[Any, None]:  # fmt: skip
    """Attention within each of many sequences that lie end to end: [tokens, heads, head_dim] -> (the same, None).

    cu_seqlens [batch + 1]: the ends of the sequences, from 0 on.
    """
    if return_softmax or fixed_seed_offset is not None or rng_name:
        raise ConfigError("flash_attn_unpadded: leave return_softmax, fixed_seed_offset and rng_name out; use seed()")
    out = segment_attention(
        "flash_attn_unpadded", (query, key, value), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
        causal=causal, dropout=dropout if training else 0.0, scale=scale,
    )  # fmt: skip
    return out, None


def _select_sdp(head_dim: int) -> str:
    """ "math": the device chooses the kernel."""
    return "math"
