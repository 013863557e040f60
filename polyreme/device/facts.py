"""What devices there are, and what they are.

Names of hardware that XLA has no backend for here (Kunlun XPU, Graphcore IPU) say so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from polyreme import version
from polyreme.core.devices.place import Place, as_place, default_place, is_compiled_with_cuda
from polyreme.core.engine import plugins
from polyreme.device.chosen import place_of
from polyreme.device.memory import mem_get_info
from polyreme.errors import DeviceError

_CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # as Linux names them, the last on Arm


def _accelerators() -> list[Place]:
    places = map(as_place, (*jax.local_devices(), *plugins.devices()))
    return list(dict.fromkeys(p for p in places if not p.is_cpu_place()))


def get_all_device_type() -> list[str]:
    """Platforms of accelerators here, such as ["gpu"]; [] where there is only the processor."""
    return sorted({p.platform for p in _accelerators()})


def get_all_custom_device_type() -> list[str]:
    """Platforms of accelerators other than GPUs, such as ["tpu"], and names of registered plugins."""
    return [p for p in get_all_device_type() if p != "gpu"]


def get_available_custom_device() -> list[str]:
    """Accelerators other than GPUs, such as ["tpu:0", "tpu:1"]."""
    return [f"{p.platform}:{p.index}" for p in _accelerators() if not p.is_gpu_place()]


def is_available() -> bool:
    """Whether there is an accelerator."""
    return bool(_accelerators())


def is_compiled_with_cinn() -> bool:
    """False: XLA is the compiler."""
    return False


def is_compiled_with_custom_device(device_type: str) -> bool:
    """Whether there are devices of this platform, by its name in PJRT or the one it was registered under."""
    return device_type in get_all_custom_device_type()


def is_compiled_with_distribute() -> bool:
    """True: training over several processes is part of every installation."""
    return True


def is_compiled_with_ipu() -> bool:
    """False: XLA has no backend for Graphcore IPUs here."""
    return False


def is_compiled_with_rocm() -> bool:
    """Whether the GPUs here are AMD's."""
    return is_compiled_with_cuda() and any(
        "rocm" in d.client.platform_version.lower() for d in jax.local_devices(backend="gpu")
    )


def is_compiled_with_xpu() -> bool:
    """False: XLA has no backend for Kunlun XPUs here."""
    return False


def XPUPlace(dev_id: int) -> Place:
    """Raises DeviceError: XLA has no backend for Kunlun XPUs here."""
    raise DeviceError(f"XPUPlace({dev_id}): XLA has no backend for Kunlun XPUs here; {_instead()}")


def IPUPlace() -> Place:
    """Raises DeviceError: XLA has no backend for Graphcore IPUs here."""
    raise DeviceError(f"IPUPlace(): XLA has no backend for Graphcore IPUs here; {_instead()}")


def _instead() -> str:
    return "use CPUPlace(), CUDAPlace(i) or CustomPlace(platform, i) of a PJRT platform"


def get_cudnn_version() -> int | None:
    """The cuDNN that the CUDA plugin of jax runs with, 90100 for 9.1.0; None without it."""
    text = version.cudnn()
    if not text[0].isdigit():
        return None
    major, minor, patch = (int(p) for p in (*text.split("."), "0", "0")[:3])
    return major * (10000 if major >= 9 else 1000) + minor * 100 + patch


@dataclass(frozen=True)
class DeviceProperties:
    """name; total_memory in bytes; multi_processor_count: a GPU's multiprocessors, a processor's hardware threads;
    major, minor: a GPU's compute capability, None elsewhere.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int | None = None
    minor: int | None = None


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Facts about a device, by default the one new Tensors go to."""
    place = place_of(device)
    jax_device: Any = place.device()
    total = mem_get_info(place)[1]
    if place.is_cpu_place():
        return DeviceProperties(_processor_name(), total, os.cpu_count() or 1)
    capability = getattr(jax_device, "compute_capability", None)
    major, minor = (int(p) for p in str(capability).split(".")[:2]) if capability else (None, None)
    return DeviceProperties(jax_device.device_kind, total, getattr(jax_device, "core_count", 1), major, minor)


def get_device_name(device: Any = None) -> str:
    """The name its maker gave the device."""
    place = place_of(device)
    return _processor_name() if place.is_cpu_place() else place.device().device_kind


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """(major, minor) of a GPU's compute capability. Raises DeviceError for a device that has none."""
    found = get_device_properties(device)
    if found.major is None or found.minor is None:
        raise DeviceError(f"get_device_capability: {place_of(device)} is no GPU with a compute capability")
    return found.major, found.minor


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the device computes in bfloat16: XLA always can; without emulation, whether the hardware does."""
    if including_emulation:
        return True
    place = default_place()
    if place.is_cpu_place():
        return any(
            word in _processor().get("flags", _processor().get("Features", "")).split() for word in _CPU_BFLOAT16
        )
    if place.is_gpu_place() and not is_compiled_with_rocm():
        return get_device_capability() >= (8, 0)
    return True


def _processor() -> dict[str, str]:
    """What Linux says of the first processor; {} elsewhere."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().partition("\n\n")[0] if path.exists() else ""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _processor_name() -> str:
    return _processor().get("model name", "cpu")
