"""FunctionalLayer: a layer without parameters whose forward is one function and its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from polyreme.nn.layer import Layer


class FunctionalLayer(Layer):
    """forward(*inputs) = function(*inputs, **settings), inputs also under the function's names for them; a subclass
    names the function and writes the signature of the settings.
    """

    function: ClassVar[Callable[..., Any]]

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        super().__init__(name)
        self.settings = settings

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(*inputs, **named, **self.settings)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.settings.items() if value is not None)
