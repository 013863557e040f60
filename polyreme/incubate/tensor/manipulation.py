"""Copies of Tensors between the devices' memory and the host's that run while the devices compute."""

from __future__ import annotations

from typing import Any

import jax

from polyreme.core import state
from polyreme.core.meshes import HOST
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, ShapeError


class AsyncLoad:
    """Starts copies between the two memories; jax orders them after what makes the values, so that it keeps nothing."""

    def offload(self, src: Tensor) -> tuple[Tensor, CopyTask]:
        """src in the host's memory, and what waits for it."""
        return _copied("async_offload", src, HOST)

    def reload(self, src: Tensor) -> tuple[Tensor, CopyTask]:
        """src in the devices' memory, and what waits for it."""
        return _copied("async_reload", src, "device")


class CopyTask:
    """A copy on its way. Using what it gives waits for it by itself; these are for who counts time or frees memory."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def is_completed(self) -> bool:
        """Whether the copy is there."""
        return self._array.is_ready()

    def cpu_wait(self) -> None:
        """Wait, on the host, until the copy is there."""
        jax.block_until_ready(self._array)

    def cuda_wait(self) -> None:
        """Have the devices wait for the copy: they do by themselves, before they read it."""


def create_async_load() -> AsyncLoad:
    """What async_offload and async_reload take."""
    return AsyncLoad()


def async_offload(src: Any, async_load: AsyncLoad) -> tuple[Tensor, CopyTask]:
    """A copy of a Tensor in the host's memory (pinned), laid out over its devices as it is; -> it, and its CopyTask.

    It does not wait, is not taped, and src stays. Ops take what lies in the host's memory only after async_reload.
    Raises ConfigError for what is no Tensor or no AsyncLoad, CaptureError in a captured function.

    >>> from polyreme.eager.tensor import to_tensor
    >>> away, task = async_offload(to_tensor([1.0, 2.0]), create_async_load())
    >>> task.cpu_wait()
    >>> away.sharding.memory_kind, away.numpy().tolist()
    ('pinned_host', [1.0, 2.0])
    """
    return _loader("async_offload", async_load).offload(src)


def async_reload(src: Any, async_load: AsyncLoad) -> tuple[Tensor, CopyTask]:
    """A copy in the devices' memory of a Tensor that async_offload gave; otherwise as that."""
    return _loader("async_reload", async_load).reload(src)


def async_offload_with_offset(
    src_tensor: Any, dst_tensor: Any, src_offset: int, dst_offset: int, offload_size: int, async_loader: AsyncLoad
) -> CopyTask:
    """Copy offload_size elements of src_tensor from src_offset on over those of dst_tensor, which async_offload gave,
    from dst_offset on; both have one dim. -> its CopyTask. Raises ShapeError for elements that are not there."""
    _loader("async_offload_with_offset", async_loader)
    for name, tensor, start in (("src", src_tensor, src_offset), ("dst", dst_tensor, dst_offset)):
        _check("async_offload_with_offset", tensor)
        if tensor.ndim != 1 or not 0 <= start <= start + offload_size <= tensor.shape[0]:
            raise ShapeError(
                f"async_offload_with_offset: {offload_size} elements from {start} on of {name}_tensor, whose shape is "
                f"{list(tensor.shape)}; give a Tensor of one dim, and elements that it has"
            )
    where = dst_tensor.sharding
    near = jax.device_put(state.read(dst_tensor), where.with_memory_kind("device"))
    part = state.read(src_tensor)[src_offset : src_offset + offload_size].astype(near.dtype)
    state.write(dst_tensor, jax.device_put(near.at[dst_offset : dst_offset + offload_size].set(part), where))
    return CopyTask(dst_tensor._array)


def _copied(what: str, src: Any, kind: str) -> tuple[Tensor, CopyTask]:
    _check(what, src)
    array = state.read(src)
    copy = jax.device_put(array, array.sharding.with_memory_kind(kind), may_alias=False)
    return Tensor(copy), CopyTask(copy)


def _check(what: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{what}: a Tensor is copied, got {type(tensor).__name__}; give to_tensor(...) of it")
    if isinstance(tensor._array, state.Tracer):
        raise CaptureError(f"{what} in a captured function, which has no values yet; call it outside")


def _loader(what: str, async_load: Any) -> AsyncLoad:
    if not isinstance(async_load, AsyncLoad):
        raise ConfigError(f"{what}: async_load is {async_load!r}; give what create_async_load() returns")
    return async_load


__all__ = ["async_offload", "async_offload_with_offset", "async_reload", "create_async_load"]
