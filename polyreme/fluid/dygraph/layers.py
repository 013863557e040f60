"""Layer with 1.7's methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from polyreme import nn
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, GradError

Result = TypeVar("Result")


def of_1_7(method: Callable[..., Result]) -> Callable[..., Result]:
    """Mark a method with 1.7's arguments, which stands in the place of one of nn.Layer's that takes others."""
    return method


class Layer(nn.Layer):
    """Base class of layers: parameters and sublayers as attributes, and a forward."""

    def _make_hooks(self) -> None:
        """Part of making any Layer: classes have parameters of their own in __init__."""
        super()._make_hooks()
        _alive[next(_numbers)] = self

    def backward(self, *inputs: Any) -> NoReturn:
        """Raises GradError: gradients come from backward() of a Tensor."""
        raise GradError(f"{type(self).__name__}.backward: a Layer has none; call backward() of the loss")

    def create_variable(
        self, name: str | None = None, persistable: bool | None = None, dtype: Any = None, type: str = "lod_tensor"
    ) -> Tensor:
        """An empty Tensor to be filled by the layer. Raises ConfigError for another type than "lod_tensor"."""
        if type != "lod_tensor":
            raise ConfigError(f"Layer.create_variable: type={type!r}; a Tensor is a lod_tensor, leave it out")
        return self.create_tensor(name, persistable, dtype)

    @of_1_7
    def sublayers(self, include_sublayers: bool = True, include_self: bool = False) -> list[nn.Layer]:
        """The direct sublayers, then, unless include_sublayers is False, those inside each of them."""
        direct = list(self.children())
        inner = [layer for child in direct for layer in child.sublayers()] if include_sublayers else []
        return [*([self] if include_self else []), *dict.fromkeys([*direct, *inner])]

    @of_1_7
    def named_sublayers(
        self, prefix: str = "", include_sublayers: bool = True, include_self: bool = False,
        layers_set: set[Any] | None = None, remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Layer]]:  # fmt: skip
        """(dotted name, layer) of all sublayers, depth first; of the direct ones if include_sublayers is False."""
        if include_sublayers:
            yield from super().named_sublayers(prefix, include_self, layers_set, remove_duplicate)
            return
        if include_self:
            yield prefix, self
        for name, layer in self.named_children():
            yield f"{prefix}.{name}" if prefix else name, layer

    def set_dict(
        self, stat_dict: Mapping[str, Any], include_sublayers: bool = True, use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """set_state_dict; only of the parameters that are this Layer's own if include_sublayers is False."""
        if not include_sublayers:
            own = self.state_dict(include_sublayers=False)
            names = list(own) if use_structured_name else [p.name for p in own.values()]
            stat_dict = {name: value for name, value in stat_dict.items() if name in names}
        return self.set_state_dict(stat_dict, use_structured_name)

    load_dict = set_dict


_numbers = itertools.count()
_alive: WeakValueDictionary[int, Layer] = WeakValueDictionary()
"""The Layers that there are, in the order of their making."""


def parameters_with_gradients() -> list[Any]:
    """The parameters of all Layers that backward() has left a gradient for, in the order of the Layers' making."""
    every = {id(p): p for _, layer in sorted(_alive.items()) for p in layer._parameters.values() if p is not None}
    return [p for p in every.values() if p.grad is not None and not p.stop_gradient]


class LayerList(Layer, nn.LayerList):
    """A list of Layers, whose parameters count among those of the Layer it is in."""


class ParameterList(Layer, nn.ParameterList):
    """A list of parameters, which count among those of the Layer it is in."""


class Sequential(Layer, nn.Sequential):
    """Layers one after the other."""


__all__ = ["Layer", "LayerList", "ParameterList", "Sequential"]
