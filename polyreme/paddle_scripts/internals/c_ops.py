"""paddle._C_ops: calls of PaddlePaddle's kernels, by the functions of the same mathematics.

A kernel takes all of its arguments by position. Those whose order is that of a public function are that function; the
others are below. What a kernel returns beside its result for its own backward is None here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from polyreme import api, fft, geometric, incubate, linalg
from polyreme.distributed.communication import collectives
from polyreme.distributed.communication.group import groups
from polyreme.errors import ConfigError
from polyreme.incubate.nn import functional as fused
from polyreme.nn import functional as F
from polyreme.ops import creation, manipulation, random, scan, slicing
from polyreme.paddle_scripts.absent import Absent, absent
from polyreme.paddle_scripts.internals import attention, clipping
from polyreme.vision import ops as vision

KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels whose arguments come in another order than the public function's, by name."""


def refuse(kernel: str, **settings: Any) -> None:
    """Raise ConfigError for a setting that would change the result and has no meaning here."""
    for name, value in settings.items():
        if not (value is None or value is False or (isinstance(value, str) and not value)):
            shown = value if isinstance(value, (bool, str)) else f"a {type(value).__name__}"
            raise ConfigError(f"_C_ops.{kernel}: {name}={shown!r} has no meaning in polyreme; leave it out")


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    KERNELS[function.__name__[1:]] = function
    return function


@_kernel
def _full(shape: Any, value: Any, dtype: Any = None, place: Any = None) -> Any:
    return creation.full(shape, value, dtype)


@_kernel
def _full_(output: Any, shape: Any, value: Any, dtype: Any = None, place: Any = None) -> Any:
    return output.fill_(value)


@_kernel
def _full_like(x: Any, value: Any, dtype: Any = None, place: Any = None) -> Any:
    return creation.full_like(x, value, dtype)


@_kernel
def _arange(start: Any, end: Any, step: Any, dtype: Any, place: Any = None) -> Any:
    return creation.arange(start, end, step, dtype)


@_kernel
def _linspace(start: Any, stop: Any, num: Any, dtype: Any, place: Any = None) -> Any:
    return creation.linspace(start, stop, num, dtype)


@_kernel
def _ones(shape: Any, dtype: Any, place: Any = None) -> Any:
    return creation.ones(shape, dtype)


@_kernel
def _zeros(shape: Any, dtype: Any, place: Any = None) -> Any:
    return creation.zeros(shape, dtype)


@_kernel
def _uniform(shape: Any, dtype: Any, min: float, max: float, seed: int = 0, place: Any = None) -> Any:
    return api.uniform(shape, dtype, min, max, seed)


@_kernel
def _gaussian(shape: Any, mean: float, std: float, seed: int, dtype: Any, place: Any = None) -> Any:
    return random.gaussian(shape, mean, std, seed, dtype)


@_kernel
def _randint(low: int, high: int, shape: Any, dtype: Any, place: Any = None) -> Any:
    return api.randint(low, high, shape, dtype)


@_kernel
def _randperm(n: int, dtype: Any, place: Any = None) -> Any:
    return api.randperm(n, dtype)


@_kernel
def _prod(x: Any, axis: Any, keepdim: bool = False, reduce_all: bool = False) -> Any:
    return api.prod(x, None if reduce_all else axis, keepdim)


@_kernel
def _argmax(x: Any, axis: Any, keepdims: bool = False, flatten: bool = False, dtype: Any = "int64") -> Any:
    return api.argmax(x, None if flatten else axis, keepdims, dtype)


@_kernel
def _argmin(x: Any, axis: Any, keepdims: bool = False, flatten: bool = False, dtype: Any = "int64") -> Any:
    return api.argmin(x, None if flatten else axis, keepdims, dtype)


@_kernel
def _argsort(x: Any, axis: int = -1, descending: bool = False, stable: bool = False) -> tuple[Any, Any]:
    order = api.argsort(x, axis, descending, stable)
    return api.take_along_axis(x, order, axis), order


@_kernel
def _cumsum(x: Any, axis: int = -1, flatten: bool = False, exclusive: bool = False, reverse: bool = False) -> Any:
    axis = 0 if flatten else axis
    x = manipulation.reshape(x, [-1]) if flatten else x
    x = manipulation.flip(x, axis) if reverse else x
    sums = scan.cumsum(x, axis) - x if exclusive else scan.cumsum(x, axis)
    return manipulation.flip(sums, axis) if reverse else sums


@_kernel
def _split_with_num(x: Any, num: int, axis: Any) -> list[Any]:
    return manipulation.split(x, num, axis)


@_kernel
def _slice(x: Any, axes: Any, starts: Any, ends: Any, infer_flags: Any = None, decrease_axis: Any = ()) -> Any:
    out = slicing.slice(x, axes, starts, ends)
    return manipulation.squeeze(out, list(decrease_axis)) if decrease_axis else out


@_kernel
def _pad3d(x: Any, paddings: Any, mode: str, pad_value: float, data_format: str) -> Any:
    return F.pad(x, paddings, mode, pad_value, data_format)


@_kernel
def _embedding(x: Any, weight: Any, padding_idx: int = -1, sparse: bool = False) -> Any:
    return F.embedding(x, weight, padding_idx=None if padding_idx == -1 else padding_idx)


@_kernel
def _dropout(
    x: Any, seed_tensor: Any, p: Any, is_test: bool, mode: str, seed: int = 0, fix_seed: bool = False
) -> tuple[Any, None]:
    if not is_test:
        refuse("dropout", seed_tensor=seed_tensor, fix_seed=fix_seed)
    return F.dropout(x, p, training=not is_test, mode=mode), None


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
KERNELS["sync_batch_norm_"] = _batch_norm


@_kernel
def _instance_norm(x: Any, scale: Any, bias: Any, epsilon: float) -> Any:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@_kernel
def _prelu(x: Any, alpha: Any, data_format: str, mode: str) -> Any:
    return F.prelu(x, alpha, data_format)


@_kernel
def _logsumexp(x: Any, axis: Any, keepdim: bool, reduce_all: bool) -> Any:
    return api.logsumexp(x, None if reduce_all else axis, keepdim)


@_kernel
def _layer_norm(x: Any, scale: Any, bias: Any, epsilon: float, begin_norm_axis: int) -> tuple[Any, None, None]:
    return F.layer_norm(x, x.shape[begin_norm_axis:], scale, bias, epsilon), None, None


@_kernel
def _group_norm(x: Any, scale: Any, bias: Any, epsilon: float, groups: int, data_format: str) -> tuple[Any, None, None]:
    return F.group_norm(x, groups, epsilon, scale, bias, data_format=data_format), None, None


@_kernel
def _conv2d(
    x: Any, filter: Any, strides: Any, paddings: Any, padding_algorithm: str, dilations: Any, groups: int,
    data_format: str,
) -> Any:  # fmt: skip
    named = padding_algorithm in ("SAME", "VALID")
    return F.conv2d(x, filter, None, strides, padding_algorithm if named else paddings, dilations, groups, data_format)


@_kernel
def _depthwise_conv2d(
    x: Any, filter: Any, strides: Any, paddings: Any, padding_algorithm: str, groups: int, dilations: Any,
    data_format: str,
) -> Any:  # fmt: skip
    return _conv2d(x, filter, strides, paddings, padding_algorithm, dilations, groups, data_format)


@_kernel
def _pool2d(
    x: Any, kernel_size: Any, strides: Any, paddings: Any, ceil_mode: bool, exclusive: bool, data_format: str,
    pooling_type: str, global_pooling: bool, adaptive: bool, padding_algorithm: str, use_cudnn: bool = True,
) -> Any:  # fmt: skip
    if global_pooling or adaptive:
        pool = F.adaptive_avg_pool2d if pooling_type == "avg" else F.adaptive_max_pool2d
        return pool(x, [1, 1] if global_pooling else kernel_size)
    padding = padding_algorithm if padding_algorithm in ("SAME", "VALID") else paddings
    if pooling_type == "max":
        return F.max_pool2d(x, kernel_size, strides, padding, ceil_mode=ceil_mode, data_format=data_format)
    return F.avg_pool2d(x, kernel_size, strides, padding, ceil_mode, exclusive, data_format=data_format)


@_kernel
def _cross_entropy_with_softmax(
    input: Any, label: Any, soft_label: bool, use_softmax: bool, numeric_stable_mode: bool, ignore_index: int, axis: int
) -> tuple[Any, Any]:
    probs = F.softmax(input, axis) if use_softmax else input
    loss = F.cross_entropy(
        input, label, None, ignore_index, "none", soft_label, axis, use_softmax=use_softmax
    )  # fmt: skip
    return probs, loss if loss.ndim == input.ndim else manipulation.unsqueeze(loss, axis)


@_kernel
def _squared_l2_norm(x: Any) -> Any:
    return clipping._squared_l2_norm(x)


@_kernel
def _p_norm(x: Any, porder: float, axis: int, epsilon: float, keepdim: bool, asvector: bool) -> Any:
    return linalg.norm(x, porder, None if asvector else axis, keepdim)


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
) -> tuple[Any, None, None, None]:  # fmt: skip
    refuse("flash_attn_unpadded", attn_mask=attn_mask, return_softmax=return_softmax)
    if dropout and not is_test:
        refuse("flash_attn_unpadded", fixed_seed_offset=fixed_seed_offset, rng_name=rng_name)
    out, _ = attention.flash_attn_unpadded(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout, causal, training=not is_test
    )
    return out, None, None, None


@_kernel
def _roi_align(
    x: Any, boxes: Any, boxes_num: Any, pooled_height: int, pooled_width: int, spatial_scale: float,
    sampling_ratio: int, aligned: bool,
) -> Any:  # fmt: skip
    return vision.roi_align(x, boxes, boxes_num, (pooled_height, pooled_width), spatial_scale, sampling_ratio, aligned)


@_kernel
def _roi_pool(
    x: Any, boxes: Any, boxes_num: Any, pooled_height: int, pooled_width: int, spatial_scale: float
) -> tuple[Any, None]:
    return vision.roi_pool(x, boxes, boxes_num, (pooled_height, pooled_width), spatial_scale), None


@_kernel
def _prior_box(
    input: Any, image: Any, min_sizes: Any, max_sizes: Any, aspect_ratios: Any, variances: Any, flip: bool, clip: bool,
    step_w: float, step_h: float, offset: float, min_max_aspect_ratios_order: bool,
) -> Any:  # fmt: skip
    return vision.prior_box(
        input, image, min_sizes, max_sizes or None, aspect_ratios, variances, flip, clip, (step_w, step_h), offset,
        min_max_aspect_ratios_order,
    )  # fmt: skip


@_kernel
def _generate_proposals(
    scores: Any, bbox_deltas: Any, im_shape: Any, anchors: Any, variances: Any, pre_nms_top_n: int, post_nms_top_n: int,
    nms_thresh: float, min_size: float, eta: float, pixel_offset: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    return vision.generate_proposals(
        scores, bbox_deltas, im_shape, anchors, variances, pre_nms_top_n, post_nms_top_n, nms_thresh, min_size, eta,
        pixel_offset, return_rois_num=True,
    )  # fmt: skip


@_kernel
def _matrix_nms(
    bboxes: Any, scores: Any, score_threshold: float, nms_top_k: int, keep_top_k: int, post_threshold: float = 0.0,
    use_gaussian: bool = False, gaussian_sigma: float = 2.0, background_label: int = 0, normalized: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    out, rois_num, index = vision.matrix_nms(
        bboxes, scores, score_threshold, post_threshold, nms_top_k, keep_top_k, use_gaussian, gaussian_sigma,
        background_label, normalized, return_index=True, return_rois_num=True,
    )  # fmt: skip
    return out, index, rois_num


@_kernel
def _all_reduce(x: Any, ring_id: int = 0, reduce_type: int = 0) -> Any:
    out = x.clone()
    collectives.all_reduce(out, reduce_type, groups.by_id.get(ring_id))
    return out


@_kernel
def _c_identity(x: Any, *_: Any) -> Any:
    return x


KERNELS.update(dict.fromkeys(["c_concat", "c_split", "mp_allreduce_sum", "mp_allreduce_sum_"], _c_identity))

# where functions are that kernels are called after
_HOMES = (api, F, linalg, fft, vision, fused, geometric, incubate)


@functools.cache
def kernel(name: str) -> Any:
    """The function that a kernel of this name is; a stand-in that says so where there is none."""
    if name in KERNELS:
        return KERNELS[name]
    for home in _HOMES:
        value = getattr(home, name, None)
        if callable(value) and not isinstance(value, Absent):
            return value
    return absent(f"_C_ops.{name}", "it is a kernel of PaddlePaddle that no public function here is called after")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return kernel(name)
