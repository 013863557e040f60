"""Automatic mixed precision."""

from polyreme.amp import debugging
from polyreme.amp.auto_cast import (
    amp_guard,
    auto_cast,
    get_autocast_cpu_dtype,
    get_autocast_dtype,
    get_autocast_gpu_dtype,
    is_autocast_enabled,
    is_bfloat16_supported,
    is_float16_supported,
)
from polyreme.amp.decorate import amp_decorate, decorate
from polyreme.amp.grad_scaler import AmpScaler, GradScaler
from polyreme.module_names import suggest_names

__all__ = [
    "AmpScaler",
    "GradScaler",
    "amp_decorate",
    "amp_guard",
    "auto_cast",
    "debugging",
    "decorate",
    "get_autocast_cpu_dtype",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype",
    "is_autocast_enabled",
    "is_bfloat16_supported",
    "is_float16_supported",
]

suggest_names(__name__)
