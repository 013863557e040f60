"""FunctionalLayer: a layer without parameters whose forward is one function and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from polyreme.core import state
from polyreme.nn.layer import Layer


class FunctionalLayer(Layer):
    """forward(*inputs) = function(*inputs, **settings), inputs also under the function's names for them; a subclass
    names the function and writes the signature of the settings.

    A setting is an attribute, of PaddlePaddle's name: _attribute_prefix and its own, or what _attribute_names says.
    """

    _function: ClassVar[Callable[..., Any]]
    _attribute_prefix: ClassVar[str] = ""
    _attribute_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.settings: dict[str, Any] = settings
        object.__setattr__(self, self._attribute_of("name"), name)

    @property
    def function(self) -> Callable[..., Any]:
        """What forward calls."""
        return type(self)._function

    def _attribute_of(self, setting: str) -> str:
        return self._attribute_names.get(setting, self._attribute_prefix + setting)

    def _attributes(self) -> dict[str, str]:
        """Name of an attribute -> the setting it is."""
        return {self._attribute_of(setting): setting for setting in self.__dict__.get("settings", ())}

    def __getattr__(self, name: str) -> Any:
        setting = self._attributes().get(name)
        return super().__getattr__(name) if setting is None else self.settings[setting]

    def __setattr__(self, name: str, value: Any) -> None:
        setting = self._attributes().get(name)
        if setting is None:
            super().__setattr__(name, value)
        else:
            self.settings[setting] = value
            state.attributes.version += 1

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._attributes()]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._function(*inputs, **named, **self.settings)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.settings.items() if value is not None)
