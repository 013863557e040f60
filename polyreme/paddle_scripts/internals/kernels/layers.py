"""Kernels of layers: embedding, dropout, norms, activations with parameters, attention."""

from __future__ import annotations

import math
from typing import Any

from polyreme import api, incubate
from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate.nn import functional as fused
from polyreme.nn import functional as F
from polyreme.ops import manipulation
from polyreme.paddle_scripts.internals import attention
from polyreme.paddle_scripts.internals.kernels.registry import Kernels, listing, refuse

KERNELS: Kernels = {}
_kernel = listing(KERNELS)


@_kernel
def _embedding(x: Any, weight: Any, padding_idx: int = -1, sparse: bool = False) -> Any:
    return F.embedding(x, weight, padding_idx=None if padding_idx == -1 else padding_idx)


@_kernel
def _dropout(x: Any, seed_tensor: Any, p: Any, is_test: bool, mode: str, seed: int = 0, fix_seed: bool = False) -> Any:
    if not is_test:
        refuse("dropout", seed_tensor=seed_tensor, fix_seed=fix_seed)
    mode = "downscale_in_infer" if mode == "downgrade_in_infer" else mode
    return F.dropout(x, p, training=not is_test, mode=mode)


@_kernel
def _fused_dropout_add(
    x: Any, y: Any, seed_tensor: Any, p: Any, is_test: bool, mode: str, seed: int = 0, fix_seed: bool = False
) -> tuple[Any, None]:
    if not is_test:
        refuse("fused_dropout_add", seed_tensor=seed_tensor, fix_seed=fix_seed)
    return fused.fused_dropout_add(x, y, p, not is_test, mode), None


@_kernel
def _fused_bias_dropout_residual_layer_norm(
    x: Any, residual: Any, bias: Any = None, ln_scale: Any = None, ln_bias: Any = None, dropout_rate: float = 0.5,
    is_test: bool = False, dropout_fix_seed: bool = True, dropout_seed: int = 0,
    dropout_implementation: str = "downscale_in_infer", ln_epsilon: float = 1e-5,
) -> Any:  # fmt: skip
    if not is_test:
        refuse("fused_bias_dropout_residual_layer_norm", dropout_fix_seed=dropout_fix_seed)
    return fused.fused_bias_dropout_residual_layer_norm(
        x, residual, bias, ln_scale, ln_bias, dropout_rate, ln_epsilon, not is_test, dropout_implementation
    )


@_kernel
def _rrelu(x: Any, lower: float, upper: float, is_test: bool) -> Any:
    return F.rrelu(x, lower, upper, not is_test)


@_kernel
def _mish(x: Any, threshold: float = 20.0) -> Any:
    return x * F.tanh(F.softplus(x, 1, threshold))


@_kernel
def _tanh_shrink(x: Any) -> Any:
    return F.tanhshrink(x)


@_kernel
def _fused_gemm_epilogue(
    x: Any, y: Any, bias: Any, trans_x: bool = False, trans_y: bool = False, activation: str = "none"
) -> Any:
    out = fused.fused_matmul_bias(x, y, bias, trans_x, trans_y)
    return out if activation == "none" else getattr(F, activation)(out)


@_kernel
def _fused_softmax_mask(x: Any, mask: Any) -> Any:
    return incubate.softmax_mask_fuse(x, mask)


@_kernel
def _fused_softmax_mask_upper_triangle(X: Any) -> Any:
    return incubate.softmax_mask_fuse_upper_triangle(X)


@_kernel
def _batch_norm(
    x: Any, mean: Any, variance: Any, scale: Any, bias: Any, is_test: bool, momentum: float, epsilon: float,
    data_format: str, use_global_stats: bool, trainable_statistics: bool,
) -> tuple[Any, Any, Any, None, None, None]:  # fmt: skip
    by_running = use_global_stats or (is_test and not trainable_statistics)
    out = F.batch_norm(
        x, mean, variance, scale, bias, not by_running, momentum, epsilon, data_format, use_global_stats=by_running
    )
    return out, mean, variance, None, None, None


# a Tensor is global, and so are the statistics of its batch
KERNELS["sync_batch_norm"] = KERNELS["sync_batch_norm_"] = KERNELS["batch_norm_"] = _batch_norm


@_kernel
def _instance_norm(x: Any, scale: Any, bias: Any, epsilon: float) -> Any:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@_kernel
def _prelu(x: Any, alpha: Any, data_format: str = "NCHW", mode: str = "all") -> Any:
    if mode not in ("all", "channel", "element"):
        raise ConfigError(f"_C_ops.prelu: mode={mode!r}; it is 'all', 'channel' or 'element'")
    channels = x.shape[1 if data_format[1] == "C" else -1] if x.ndim > 1 else 1
    shape = {"all": [1], "channel": [channels], "element": x.shape[1:]}[mode]
    if math.prod(alpha.shape) != math.prod(shape):
        raise ShapeError(f"_C_ops.prelu: alpha {list(alpha.shape)} for x {list(x.shape)}; mode={mode!r} needs {shape}")
    alpha = manipulation.reshape(alpha, shape)
    return api.where(x > 0, x, x * alpha) if mode == "element" else F.prelu(x, alpha, data_format)


@_kernel
def _layer_norm(x: Any, scale: Any, bias: Any, epsilon: float, begin_norm_axis: int) -> Any:
    return F.layer_norm(x, x.shape[begin_norm_axis:], scale, bias, epsilon)


@_kernel
def _rms_norm(x: Any, scale: Any, normalized_shape: Any, epsilon: float) -> tuple[Any, None]:
    return F.rms_norm(x, normalized_shape, scale, epsilon), None


@_kernel
def _group_norm(x: Any, scale: Any, bias: Any, epsilon: float, groups: int, data_format: str) -> Any:
    return F.group_norm(x, groups, epsilon, scale, bias, data_format=data_format)


@_kernel
def _swiglu(x: Any, y: Any = None) -> Any:
    return F.swiglu(x, y)


@_kernel
def _flash_attn(
    q: Any, k: Any, v: Any, fixed_seed_offset: Any = None, attn_mask: Any = None, dropout: float = 0.0,
    causal: bool = False, return_softmax: bool = False, is_test: bool = False, rng_name: str = "",
) -> tuple[Any, None, None, None]:  # fmt: skip
    refuse("flash_attn", return_softmax=return_softmax)
    if dropout and not is_test:
        refuse("flash_attn", fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, not is_test)
    return out, None, None, None


@_kernel
def _flash_attn_unpadded(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, fixed_seed_offset: Any, attn_mask: Any,
    max_seqlen_q: int, max_seqlen_k: int, scale: float, dropout: float = 0.0, causal: bool = False,
    return_softmax: bool = False, is_test: bool = False, rng_name: str = "",
) -> tuple[Any, None]:  # fmt: skip
    refuse("flash_attn_unpadded", attn_mask=attn_mask, return_softmax=return_softmax)
    if dropout and not is_test:
        refuse("flash_attn_unpadded", fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    out, _ = attention.flash_attn_unpadded(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout, causal, training=not is_test
    )
    return out, None


@_kernel
def _flash_attn_qkvpacked(
    qkv: Any, fixed_seed_offset: Any, attn_mask: Any, dropout: float, causal: bool, return_softmax: bool,
    is_test: bool, rng_name: str = "",
) -> tuple[Any, None, None, None]:  # fmt: skip
    refuse("flash_attn_qkvpacked", attn_mask=attn_mask, return_softmax=return_softmax)
    if dropout and not is_test:
        refuse("flash_attn_qkvpacked", fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    return F.flash_attn_qkvpacked(qkv, dropout, causal, training=not is_test)[0], None, None, None


@_kernel
def _flash_attn_varlen_qkvpacked(
    qkv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, fixed_seed_offset: Any, attn_mask: Any, max_seqlen_q: int,
    max_seqlen_k: int, scale: float, dropout: float, causal: bool, return_softmax: bool, is_test: bool,
    rng_name: str = "", varlen_padded: bool = True,
) -> tuple[Any, None]:  # fmt: skip
    refuse("flash_attn_varlen_qkvpacked", attn_mask=attn_mask, return_softmax=return_softmax)
    if dropout and not is_test:
        refuse("flash_attn_varlen_qkvpacked", fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    out, _ = F.flash_attn_varlen_qkvpacked(
        qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout, causal,
        varlen_padded=varlen_padded, training=not is_test,
    )  # fmt: skip
    return out, None


@_kernel
def _flashmask_attention(
    q: Any, k: Any, v: Any, startend_row_indices: Any, fixed_seed_offset: Any, dropout: float, causal: bool,
    return_softmax: bool, is_test: bool, rng_name: str = "",
) -> tuple[Any, None, None, None]:  # fmt: skip
    refuse("flashmask_attention", return_softmax=return_softmax)
    if dropout and not is_test:
        refuse("flashmask_attention", fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    out = F.flashmask_attention(
        q, k, v, startend_row_indices, dropout=dropout, causal=causal, training=not is_test
    )  # fmt: skip
    return out, None, None, None
