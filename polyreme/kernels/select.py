"""The backend that a kernel is traced for: the one place where kernels ask."""

import os
from typing import Any, Literal

import jax

Backend = Literal["cpu", "gpu", "tpu", "other"]
AttentionKernel = Literal["math", "flash", "efficient"]
_BACKENDS: dict[str, Backend] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


_portable = jax.make_user_context(False)
_device = jax.make_user_context(None)
_attention = jax.make_user_context(None)


def portable(wanted: bool = True) -> Any:
    """A context: programs traced inside run on any device, so every kernel takes its plain form.

    jax tells programs traced inside and outside apart, whatever it has cached.
    """
    return _portable(wanted)


def compiling_for(device: Any) -> Any:
    """A context: programs traced and compiled inside are for devices like this one, which need not be here."""
    return _device(device)


def absent_device() -> Any:
    """The device of the compiling_for in force; None outside of one."""
    return _device.value


def platform() -> str:
    """JAX's name of the kind of device that programs compiled now are for: its default device's, or compiling_for's.

    jax knows programs traced under different default devices apart.
    """
    if _device.value is not None:
        return _device.value.platform
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]  (made at run time)
    if chosen is None:
        return jax.default_backend()
    return chosen if isinstance(chosen, str) else chosen.platform


def backend() -> Backend:
    """The kind of device that programs traced now will run on: that of `platform`, "other" inside portable().

    Asked while tracing, so a compiled program keeps the kernels that were picked for it.
    A PJRT plugin whose name is not known here is "other", and gets the plain forms.
    """
    if _portable.value:
        return "other"
    return _BACKENDS.get(platform(), "other")


FEW_CORES = 2


def on_few_cores() -> bool:
    """Whether programs traced now run on this process's one device, a CPU of FEW_CORES at most."""
    if backend() != "cpu" or _device.value is not None:
        return False
    return jax.device_count() == 1 and (os.cpu_count() or 1) <= FEW_CORES


def attention_only(kernels: tuple[AttentionKernel, ...]) -> Any:
    """A context: attention traced inside runs the first of these that takes its inputs, and raises if none does."""
    return _attention(kernels)


def attention_order(free: tuple[AttentionKernel, ...] | None = None) -> tuple[AttentionKernel, ...]:
    """The kernels of attention to try in turn: those of attention_only, else `free`, what the backend does best."""
    if _attention.value is not None:
        return _attention.value
    if free is not None:
        return free
    return {"cpu": ("efficient",), "gpu": ("flash", "math")}.get(backend(), ("math",))


def attention_allows(kernel: AttentionKernel) -> bool:
    """Whether attention_only, where one is in force, names this kernel."""
    return _attention.value is None or kernel in _attention.value
