"""Helpers of paddle.nn.clip that trainers of large models call themselves."""

from __future__ import annotations

from typing import Any

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.nn.clip import squared_norm


def _squared_l2_norm(x: Any) -> Tensor:
    """Sum of the squares of all elements, of shape [1], in at least float32."""
    return Tensor(squared_norm([state.read(x)]).reshape([1]))


def _clip_by_global_norm_using_mp_type(*_: Any) -> bool:
    """False: norms are summed in float32 whatever the dtype of the gradients."""
    return False


def merge_selected_rows(x: Any, name: str | None = None) -> Any:
    """x itself: gradients by rows have each row once here."""
    return x


def get_tensor_from_selected_rows(x: Any, name: str | None = None) -> Any:
    """x itself: gradients are Tensors."""
    return x
