"""Gradients that are added up in place."""

from __future__ import annotations

from typing import Any

from polyreme.ops.float8 import rows_added
from polyreme.ops.ids import check_range


def embedding_grad_add_to_(token_indices: Any, main_grad_: Any, out_grad: Any, name: str | None = None) -> Any:
    """Adds an embedding's gradient to main_grad_ in place: out_grad [*b, width] to its rows token_indices [*b].

    Adds in main_grad_'s dtype, such as float32 for a bfloat16 out_grad. Raises IndexError for an id out of range.
    """
    check_range(token_indices, main_grad_.shape[0], "embedding_grad_add_to_: id")
    return rows_added(token_indices, main_grad_, out_grad, out=main_grad_)
