"""polyreme.cuda: devices by the names of the CUDA-first API. Without a GPU they speak of the default device."""

from typing import NoReturn

from polyreme.core.devices.place import default_place, is_compiled_with_cuda
from polyreme.core.rng import get_rng_state, set_rng_state
from polyreme.core.rng import seed as manual_seed
from polyreme.device import (
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    Event,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    ShortTensor,
    Stream,
    StreamContext,
    current_stream,
    device,
    empty_cache,
    get_device_capability,
    get_device_name,
    get_device_properties,
    get_stream_from_external,
    ipc_collect,
    is_bf16_supported,
    max_memory_allocated,
    memory_allocated,
    memory_reserved,
    reset_peak_memory_stats,
    set_device,
    set_stream,
    synchronize,
)
from polyreme.device.cuda import device_count
from polyreme.device.memory import mem_get_info
from polyreme.errors import DeviceError

manual_seed_all = manual_seed
"""One generator serves all devices."""
stream = StreamContext
is_available = is_compiled_with_cuda


def is_initialized() -> bool:
    """Whether GPUs are ready: asking for them makes them so, so the same as is_available()."""
    return is_compiled_with_cuda()


def current_device() -> int:
    """Index, on its platform, of the device that new Tensors go to."""
    return default_place().index


def check_error(res: int) -> None:
    """Raise DeviceError if a result of a call into CUDA is not 0."""
    if int(res) != 0:
        raise DeviceError(f"check_error: CUDA call returned error {int(res)}")


def cudart() -> NoReturn:
    """Raises NotImplementedError: CUDA's runtime is XLA's, and not handed out."""
    raise NotImplementedError(
        "cudart(): the CUDA runtime belongs to XLA and is not handed out; kernels of one's own come in through "
        "utils.register_op (docs/custom_ops.md)"
    )


__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "Event",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
    "Stream",
    "StreamContext",
    "check_error",
    "cudart",
    "current_device",
    "current_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_stream_from_external",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]
