"""auto_cast: run ops in float16 or bfloat16 where their declared class allows it.

Each op declares its class ("low", "fp32" or "widest") where it is defined; core.amp_policy says what it
means.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from polyreme.core import amp_policy
from polyreme.core import dtype as dtypes
from polyreme.core.amp_policy import Policy
from polyreme.core.devices import place as places
from polyreme.core.operator_names import newer_names
from polyreme.errors import ArgumentTypeError, ConfigError, did_you_mean
from polyreme.ops import OPS

_log = logging.getLogger("polyreme.amp")
LEVELS = ("O0", "OD", "O1", "O2")
_CROSS_ENTROPY = ("cross_entropy_of_classes", "softmax_and_cross_entropy")
_ATTENTION = ("attention", "attention_with_dropout")
_CARRIED_OUT_BY = {
    **dict.fromkeys(["cross_entropy", "softmax_with_cross_entropy", "c_softmax_with_cross_entropy"], _CROSS_ENTROPY),
    **dict.fromkeys(["embedding", "c_embedding"], ("embedding_rows", "embedding_within")),
    **dict.fromkeys(["flash_attention", "flash_attn", "flash_attn_unpadded", "flash_attn_varlen"], _ATTENTION),
    **dict.fromkeys(["flashmask_attention", "scaled_dot_product_attention"], _ATTENTION),
    **dict.fromkeys(["batch_norm", "sync_batch_norm"], ("batch_norm_train", "batch_norm_eval")),
    "instance_norm": ("instance_norm_train",),
    "dropout": ("dropout_train",),
    "nll_loss": ("nll_of_classes",),
    "mul": ("matmul",),
    "fused_gemm_epilogue": ("linear",),
    "depthwise_conv2d": ("conv2d",),
    "pool2d": ("max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d"),
    "max_pool2d_with_index": ("max_pool2d",),
    "deformable_conv": ("deform_conv2d",),
    "grid_sampler": ("grid_sample",),
    "flatten_contiguous_range": ("flatten",),
    "tanh_shrink": ("tanhshrink",),
    "huber_loss": ("smooth_l1_loss",),
    "kldiv_loss": ("kl_div",),
    "bce_loss": ("binary_cross_entropy",),
    "sigmoid_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "warpctc": ("ctc_loss",),
    "warprnnt": ("rnnt_loss",),
    **dict.fromkeys(["p_norm", "pnorm", "frobenius_norm"], ("norm", "vector_norm", "matrix_norm")),
    **{f"{mode}_interp": ("interpolate",) for mode in ("bilinear", "nearest", "bicubic", "trilinear", "linear")},
}
"""Functions and operators that are no op themselves -> the ops that compute them."""
_COMPOSED = (
    "fused_attention", "fused_feedforward", "fused_rotary_position_embedding", "fused_dropout_add", "fused_bias_act",
    "fused_rms_norm", "fused_moe", "fused_linear_param_grad_add", "fused_softmax_mask",
    "fused_softmax_mask_upper_triangle", "memory_efficient_attention", "margin_cross_entropy", "softmin", "rnn",
    "c_softmax_with_multi_label_cross_entropy", "squared_l2_norm", "fake_quantize_dequantize_abs_max",
    "fake_quantize_dequantize_moving_average_abs_max",
)  # fmt: skip
"""Operators in lists of PaddlePaddle and its projects that are several ops here, each cast by its own class."""


@contextmanager
def auto_cast(
    enable: bool = True,
    custom_white_list: Iterable[str] | None = None,
    custom_black_list: Iterable[str] | None = None,
    level: str = "O1",
    dtype: Any = "float16",
    use_promote: bool = True,
) -> Iterator[None]:
    """Inside the block ops cast their floating inputs; use as a context manager or a decorator.

    O1: matrix products and convolutions run in dtype, numerically delicate ops in float32, the others in the widest
    dtype of their inputs. OD: the others run in float32. O2: as O1, for a model that `decorate` has cast; with
    use_promote=False the others run in dtype even if an input is float32. O0 and enable=False: no casts. The custom
    lists name ops that run in dtype, or in float32, whatever their class; PaddlePaddle's names of operators
    (elementwise_div, reduce_sum, lookup_table_v2) are taken too. float64, integer and complex inputs are
    never cast.

    Raises ConfigError for an unknown level, dtype or op, and for an op in both lists.

    >>> from polyreme.ops.creation import ones
    >>> with auto_cast(dtype="bfloat16"):
    ...     (ones([2, 2]) @ ones([2, 2])).dtype.name
    'bfloat16'
    """
    policy = policy_of(enable, custom_white_list, custom_black_list, level, dtype, use_promote)
    outer, amp_policy.active.policy = amp_policy.active.policy, policy
    try:
        yield
    finally:
        amp_policy.active.policy = outer


amp_guard = auto_cast


def policy_of(enable: bool, white: Any, black: Any, level: str, dtype: Any, promote: bool) -> Policy | None:
    """The policy that auto_cast's arguments stand for, None if it is not enabled; raises ConfigError."""
    if isinstance(enable, str):
        raise ArgumentTypeError(f"auto_cast: enable={enable!r}; it is True or False, and the level is level={enable!r}")
    check_level("auto_cast", level, LEVELS)
    low = low_dtype("auto_cast", dtype)
    white, black = _names("custom_white_list", white), _names("custom_black_list", black)
    both = sorted(white & black)
    if both:
        raise ConfigError(f"auto_cast: {both} are in custom_white_list and in custom_black_list; keep each in one")
    if not enable or level == "O0":
        return None
    return Policy(low, level, white, black, bool(promote))  # type: ignore[arg-type]


def _names(what: str, given: Any) -> frozenset[str]:
    if isinstance(given, str):
        raise ConfigError(f"auto_cast: {what} is a set or list of op names, got the string {given!r}")
    return frozenset(op for name in sorted(given or (), key=str) for op in _ops(what, name))


def _ops(what: str, name: Any) -> list[str]:
    """The ops of a function's or operator's name."""
    for newer in newer_names(str(name)):
        ops = [op for op in _CARRIED_OUT_BY.get(newer, (newer,)) if hasattr(OPS.get(op), "op")]
        if ops:
            return ops
    if name in _COMPOSED:
        _log.warning("auto_cast: %s names %r, which is several ops here: each is cast by its own class", what, name)
        return []
    raise ConfigError(f"auto_cast: {what} names the op {name!r}, which is not one{_near(name)}")


def _near(name: Any) -> str:
    # hundreds of ops: only a close one is worth showing
    text = did_you_mean(name, OPS)
    return text if text.startswith("; did") else ""


def check_level(what: str, level: Any, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError for a level that is not allowed."""
    if level not in allowed:
        raise ConfigError(f"{what}: level={level!r}{did_you_mean(level, allowed)}")


def low_dtype(what: str, dtype: Any) -> np.dtype:
    """float16 or bfloat16 as a dtype; ConfigError for any other."""
    low = dtypes.as_dtype(dtype)
    if low not in (dtypes.float16, dtypes.bfloat16):
        raise ConfigError(f"{what}: dtype is float16 or bfloat16, got {low.name}")
    return low


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """True inside an auto_cast block that casts; device_type is accepted, autocast being the same on every device."""
    return amp_policy.active.policy is not None


def get_autocast_dtype(device_type: str | None = None) -> str:
    """Name of the dtype of the auto_cast block in force, "float16" (its default) outside one."""
    policy = amp_policy.active.policy
    return "float16" if policy is None else policy.low.name


get_autocast_cpu_dtype = get_autocast_gpu_dtype = get_autocast_dtype


def is_bfloat16_supported(device: Any = None) -> bool:
    """True if the device (the default one if None) computes with bfloat16: CPU, TPU, and GPUs from capability 8.0."""
    return _supports(device, 8.0)


def is_float16_supported(device: Any = None) -> bool:
    """True if the device (the default one if None) computes with float16: CPU, GPUs from capability 5.3; not TPU."""
    found = _device(device)
    return found.platform != "tpu" and _supports(device, 5.3)


def _supports(device: Any, capability: float) -> bool:
    # the CPU computes both through float32, with the rounding of the narrow dtype
    have = getattr(_device(device), "compute_capability", None)
    return have is None or float(have) >= capability


def _device(device: Any) -> Any:
    return (places.default_place() if device is None else places.as_place(device)).device()
