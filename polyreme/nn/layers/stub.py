"""Stub: a place in a forward where quantization puts a quanter."""

from __future__ import annotations

from typing import Any

from polyreme.nn.layer import Layer


class Stub(Layer):
    """Lets pass what comes; quantization.QAT and PTQ put a quanter in its place: of the factory `observer`, of their
    configuration's if None. For functions that no layer is called for."""

    def __init__(self, observer: Any = None) -> None:
        super().__init__()
        self._observer = observer

    def forward(self, input: Any) -> Any:
        return input
