"""Stub: a place in a forward where quantization puts a quanter."""

from __future__ import annotations

from typing import Any

from polyreme.nn.layer import Layer


class Stub(Layer):
    """Returns its input; quantization.QAT and PTQ put a quanter in its place, which the factory `observer` makes, or
    their configuration's if it is None. It marks inputs of functions, such as matmul, that are no layers."""

    def __init__(self, observer: Any = None) -> None:
        super().__init__()
        self._observer = observer

    def forward(self, input: Any) -> Any:
        return input
