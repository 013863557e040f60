"""Kernels of losses."""

from __future__ import annotations

from typing import Any

from polyreme import api
from polyreme.nn import functional as F
from polyreme.ops import manipulation
from polyreme.paddle_scripts.internals.kernels.registry import Kernels, group_of, listing, refuse

KERNELS: Kernels = {}
_kernel = listing(KERNELS)


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
def _huber_loss(input: Any, label: Any, delta: float) -> Any:
    return F.smooth_l1_loss(input, label, "none", delta)


@_kernel
def _bce_loss(input: Any, label: Any) -> Any:
    return F.binary_cross_entropy(input, label, reduction="none")


@_kernel
def _kldiv_loss(x: Any, label: Any, reduction: str = "mean", log_target: bool = False) -> Any:
    return F.kl_div(x, label, reduction, log_target)


@_kernel
def _sigmoid_cross_entropy_with_logits(
    x: Any, label: Any, pos_weight: Any = None, normalize: bool = False, ignore_index: int = -100
) -> Any:
    counted = api.not_equal(label, api.full_like(label, ignore_index))
    loss = F.binary_cross_entropy_with_logits(x, label, reduction="none", pos_weight=pos_weight)
    loss = api.where(counted, loss, api.zeros_like(loss))
    return loss / api.clip(api.sum(counted.astype(x.dtype)), min=1.0) if normalize else loss


@_kernel
def _nll_loss(
    input: Any, label: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[Any, None]:
    return F.nll_loss(input, label, weight, ignore_index, reduction), None


@_kernel
def _hsigmoid_loss(
    x: Any, label: Any, w: Any, bias: Any, path: Any, code: Any, num_classes: int, is_sparse: bool = False
) -> tuple[Any, None, None]:
    return F.hsigmoid_loss(x, label, num_classes, w, bias, path, code, is_sparse), None, None


@_kernel
def _warpctc(
    logits: Any, label: Any, logits_length: Any, labels_length: Any, blank: int = 0, norm_by_times: bool = False
) -> Any:
    loss = F.ctc_loss(logits, label, logits_length, labels_length, blank, "none", norm_by_times)
    return manipulation.reshape(loss, [-1, 1])


@_kernel
def _warprnnt(
    input: Any, label: Any, input_lengths: Any, label_lengths: Any, blank: int = 0, fastemit_lambda: float = 0.0
) -> Any:
    return F.rnnt_loss(input, label, input_lengths, label_lengths, blank, fastemit_lambda, "none")


@_kernel
def _margin_cross_entropy(
    logits: Any, label: Any, return_softmax: bool = False, ring_id: int = 0, rank: int = 0, nranks: int = 1,
    margin1: float = 1.0, margin2: float = 0.5, margin3: float = 0.0, scale: float = 64.0,
) -> tuple[Any, Any]:  # fmt: skip
    loss, probs = F.margin_cross_entropy(
        logits, label, margin1, margin2, margin3, scale, group_of(ring_id), return_softmax=True, reduction=None
    )
    return probs, loss


@_kernel
def _class_center_sample(
    label: Any, num_classes: int, num_samples: int, ring_id: int = 0, rank: int = 0, nranks: int = 1,
    fix_seed: bool = False, seed: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    refuse("class_center_sample", fix_seed=fix_seed)
    return F.class_center_sample(label, num_classes, num_samples, group_of(ring_id))
