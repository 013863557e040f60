"""Attributes of PaddlePaddle's Tensors that trainers of large models use: memory, gradients and hooks by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.eager.tensor import HookHandle
from polyreme.fluid.host_array import HostArray
from polyreme.paddle_scripts.internals.dtypes import DType


class TensorNames:
    """Attributes of Tensor and Parameter."""

    _home = "paddle"  # libraries of several frameworks tell them apart by type(x).__module__
    _replaces = ("dtype", "numpy")
    _init_func = None

    @property
    def dtype(self: Any) -> DType:
        """NumPy's dtype under PaddlePaddle's name."""
        return DType.of(self._array.dtype)

    def numpy(self: Any, *_: Any) -> np.ndarray:
        """A copy of the value; float() and the like take one of one element, whatever its dims."""
        value = np.array(state.host(self, "Tensor.numpy()"))
        return value.view(HostArray) if value.size == 1 and value.ndim else value

    @property
    def is_parameter(self: Any) -> bool:
        """Whether a layer trains it, or could."""
        return hasattr(self, "optimize_attr")

    def _to(
        self: Any, device: Any = None, dtype: Any = None, blocking: bool | None = None, copy_tensor: bool | None = None
    ) -> Any:
        moved = self.to(device=device, dtype=dtype, blocking=blocking)
        return moved.clone() if copy_tensor and moved is self else moved

    def _copy_to(self: Any, place: Any, blocking: bool = True) -> Any:
        return self.detach().to(device=place).clone()

    def _is_initialized(self: Any) -> bool:
        return 0 not in self.shape

    def _numel(self: Any) -> int:
        return self.size

    def _slice(self: Any, begin_idx: int, end_idx: int) -> Any:
        return self.detach()[begin_idx:end_idx]

    def _md5sum(self: Any) -> str:
        return hashlib.md5(np.ascontiguousarray(self.numpy()).tobytes(), usedforsecurity=False).hexdigest()

    # values

    def _clear(self: Any) -> None:
        state.write(self, jnp.zeros((0,), self.dtype))

    _clear_data = _clear_dataptr = _clear_to_zero_allocation = _clear

    def _share_buffer_to(self: Any, other: Any) -> None:
        state.write(other, state.read(self))

    _unsafe_share_buffer_to = _share_buffer_to

    def _is_shared_buffer_with(self: Any, other: Any) -> bool:
        return self is other or state.read(self) is state.read(other)

    def _use_gpudnn(self: Any, use_gpudnn: bool = True) -> Any:
        return self

    # gradients

    def _grad_ivar(self: Any) -> Any:
        return self.grad

    def _set_grad_ivar(self: Any, value: Any) -> None:
        self.grad = value

    def _copy_gradient_from(self: Any, other: Any) -> None:
        self.grad = other.detach().clone()

    def _reset_grad_inplace_version(self: Any, *_: bool) -> None:
        """Nothing: what backward needs is not overwritten here."""

    def _register_grad_hook(self: Any, hook: Callable[[Any], Any]) -> HookHandle:
        return self.register_hook(hook)

    def _register_backward_hook(self: Any, hook: Callable[[], Any]) -> HookHandle:
        """Call hook() each time a gradient has come to this Tensor."""
        return self.register_hook(lambda _: hook())

    def is_selected_rows(self: Any) -> bool:
        """False: Tensors hold all rows."""
        return False
