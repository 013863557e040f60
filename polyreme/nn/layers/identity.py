"""Layers that pass on or reshape.

Floor: 4.
"""

from __future__ import annotations

from typing import Any

from polyreme.nn.layer import Layer


class Identity(Layer):
    """The input, unchanged; takes and ignores any arguments, so that it can stand in for another layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Any) -> Any:
        return input
