"""Factories of quanters: a class and its settings, of which every layer gets an instance of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.quantization.quanter import BaseQuanter


class QuanterFactory:
    """Settings of a quanter; _get_class says of which."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def _get_class(self) -> type[BaseQuanter]:
        raise NotImplementedError(f"{type(self).__name__} has no _get_class(); write one")

    def _instance(self, layer: Layer) -> BaseQuanter:
        """A quanter for a layer."""
        return self._get_class()(layer, *self.args, **self.kwargs)

    def __repr__(self) -> str:
        settings = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join(settings)})"


def quanter(class_name: str) -> Callable[[type[BaseQuanter]], type[BaseQuanter]]:
    """Decorates a quanter, a class whose __init__ takes a layer and settings: the factory class_name, which takes the
    settings, is put beside it into its module.

    >>> @quanter("Halves")
    ... class HalvesLayer(BaseQuanter):
    ...     def __init__(self, layer, factor=0.5):
    ...         super().__init__()
    ...         self.factor = factor
    >>> Halves = getattr(sys.modules[HalvesLayer.__module__], "Halves")
    >>> Halves(factor=0.25)
    Halves(factor=0.25)
    """

    def decorate(layer_class: type[BaseQuanter]) -> type[BaseQuanter]:
        if not issubclass(layer_class, BaseQuanter):
            raise ConfigError(f"quanter({class_name!r}): {layer_class.__name__} is no BaseQuanter; derive it from one")
        members = {"_get_class": lambda self: layer_class, "__doc__": layer_class.__doc__}
        members["__module__"] = layer_class.__module__
        setattr(sys.modules[layer_class.__module__], class_name, type(class_name, (QuanterFactory,), members))
        return layer_class

    return decorate
