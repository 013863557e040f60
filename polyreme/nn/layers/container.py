"""Layers and parameters held in lists and dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from polyreme.core.spelling import takes_second_names
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer


class Sequential(Layer):
    """Layers called one after another, each on the result of the one before.

    Takes layers, (name, layer) pairs, or one list of either.

    >>> from polyreme.nn.layers.linear import Linear
    >>> net = Sequential(("up", Linear(2, 4)), ("down", Linear(4, 1)))
    >>> list(net.state_dict())
    ['up.weight', 'up.bias', 'down.weight', 'down.bias']
    """

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        if len(layers) == 1 and isinstance(layers[0], (list, tuple)) and not _is_named(layers[0]):
            layers = tuple(layers[0])
        if len(layers) == 1 and isinstance(layers[0], Mapping):
            layers = tuple(layers[0].items())
        for at, layer in enumerate(layers):
            name, layer = layer if _is_named(layer) else (str(at), layer)
            if name in self._sub_layers:
                raise ConfigError(f"Sequential: two layers are named {name!r}; give each a name of its own")
            self.add_sublayer(name, layer)

    def forward(self, input: Any) -> Any:
        for layer in self._sub_layers.values():
            input = layer(input)
        return input

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return type(self)(*list(self)[key])
        return self._sub_layers[key if isinstance(key, str) else _name_at(self, self._sub_layers, key)]

    def __setitem__(self, key: int | str, layer: Layer) -> None:
        self.add_sublayer(key if isinstance(key, str) else _name_at(self, self._sub_layers, key), layer)

    def __delitem__(self, key: int | str) -> None:
        del self._sub_layers[key if isinstance(key, str) else _name_at(self, self._sub_layers, key)]

    def __len__(self) -> int:
        return len(self._sub_layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._sub_layers.values())

    def append(self, module: Layer) -> Self:
        """Add a layer at the end; returns self."""
        self.add_sublayer(_next_name(self._sub_layers), module)
        return self

    def insert(self, index: int, module: Layer) -> Self:
        """Put a layer before the one at index; all are named 0, 1, ... then. Returns self."""
        self._replace(_inserted(self, index, module))
        return self

    def _replace(self, layers: list[Layer]) -> None:
        self._sub_layers.clear()
        self.extend(layers)

    def extend(self, sequential: Iterable[Layer]) -> Self:
        """Add layers at the end; returns self."""
        for layer in sequential:
            self.append(layer)
        return self


class LayerList(Layer):
    """A list of layers, named 0, 1, ... in the state dict."""

    @takes_second_names
    def __init__(self, sublayers: Iterable[Layer] | None = None) -> None:
        super().__init__()
        self.extend(sublayers or ())

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            return type(self)(list(self)[key])
        return self._sub_layers[_name_at(self, self._sub_layers, key)]

    def __setitem__(self, key: int, layer: Layer) -> None:
        self.add_sublayer(_name_at(self, self._sub_layers, key), layer)

    def __delitem__(self, key: int | slice) -> None:
        kept = list(self)
        del kept[key]
        self._replace(kept)

    def __len__(self) -> int:
        return len(self._sub_layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._sub_layers.values())

    def append(self, sublayer: Layer) -> Self:
        """Add a layer at the end; returns self."""
        self.add_sublayer(_next_name(self._sub_layers), sublayer)
        return self

    def insert(self, index: int, sublayer: Layer) -> None:
        """Put a layer before the one at index."""
        self._replace(_inserted(self, index, sublayer))

    def pop(self, key: int | slice) -> Any:
        """Remove the layer at an index and return it, or a LayerList of those of a slice."""
        removed = self[key]
        del self[key]
        return removed

    def __add__(self, other: Iterable[Layer]) -> LayerList:
        return type(self)([*self, *other])

    def __iadd__(self, other: Iterable[Layer]) -> Self:
        return self.extend(other)

    def extend(self, sublayers: Iterable[Layer]) -> Self:
        """Add layers at the end; returns self."""
        for layer in sublayers:
            self.append(layer)
        return self

    def _replace(self, layers: list[Layer]) -> None:
        self._sub_layers.clear()
        self.extend(layers)


def _inserted(layers: Any, index: int, layer: Layer) -> list[Layer]:
    listed = list(layers)
    if not -len(listed) <= index <= len(listed):
        raise IndexError(f"{type(layers).__name__}.insert: index {index} is outside a list of {len(listed)}")
    if not isinstance(layer, Layer):
        raise TypeError(f"{type(layers).__name__}.insert needs a Layer, got {type(layer).__name__}")
    listed.insert(index, layer)
    return listed


class LayerDict(Layer):
    """Layers under names, in insertion order. Takes a mapping or (name, layer) pairs."""

    @takes_second_names
    def __init__(self, sublayers: Any = None) -> None:
        super().__init__()
        if sublayers is not None:
            self.update(sublayers)

    def __getitem__(self, key: str) -> Any:
        return self._sub_layers[key]

    def __setitem__(self, key: str, sublayer: Layer) -> None:
        self.add_sublayer(key, sublayer)

    def __delitem__(self, key: str) -> None:
        del self._sub_layers[key]

    def __len__(self) -> int:
        return len(self._sub_layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sub_layers)

    def __contains__(self, key: str) -> bool:
        return key in self._sub_layers

    def clear(self) -> None:
        """Remove all layers."""
        self._sub_layers.clear()

    def pop(self, key: str) -> Any:
        """Remove a layer and return it; raises KeyError if there is none."""
        return self._sub_layers.pop(key)

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._sub_layers.keys()

    def items(self) -> Iterable[tuple[str, Any]]:
        """(name, layer) pairs."""
        return self._sub_layers.items()

    def values(self) -> Iterable[Any]:
        """The layers."""
        return self._sub_layers.values()

    def update(self, sublayers: Any) -> None:
        """Add or replace layers of a mapping or of (name, layer) pairs."""
        for key, layer in _pairs(sublayers, "LayerDict"):
            self.add_sublayer(key, layer)


class ParameterList(Layer):
    """A list of parameters, named 0, 1, ... in the state dict."""

    def __init__(self, parameters: Iterable[Any] | None = None) -> None:
        super().__init__()
        for parameter in parameters or ():
            self.append(parameter)

    def __getitem__(self, key: int) -> Any:
        return self._parameters[_name_at(self, self._parameters, key)]

    def __setitem__(self, key: int, parameter: Any) -> None:
        self.add_parameter(_name_at(self, self._parameters, key), parameter)

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parameters.values())

    def append(self, parameter: Any) -> Self:
        """Add a parameter at the end; returns self."""
        self.add_parameter(_next_name(self._parameters), parameter)
        return self


class ParameterDict(Layer):
    """Parameters under names, in insertion order. Takes a mapping or (name, parameter) pairs."""

    def __init__(self, parameters: Any = None) -> None:
        super().__init__()
        if parameters is not None:
            self.update(parameters)

    def __getitem__(self, key: str) -> Any:
        return self._parameters[key]

    def __setitem__(self, key: str, parameter: Any) -> None:
        self.add_parameter(key, parameter)

    def __delitem__(self, key: str) -> None:
        del self._parameters[key]

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __contains__(self, key: str) -> bool:
        return key in self._parameters

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._parameters.keys()

    def items(self) -> Iterable[tuple[str, Any]]:
        """(name, parameter) pairs."""
        return self._parameters.items()

    def values(self) -> Iterable[Any]:
        """The parameters."""
        return self._parameters.values()

    def update(self, parameters: Any) -> None:
        """Add or replace parameters of a mapping or of (name, parameter) pairs."""
        for key, parameter in _pairs(parameters, "ParameterDict"):
            self.add_parameter(key, parameter)


def _is_named(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str)


def _pairs(given: Any, what: str) -> Iterable[tuple[str, Any]]:
    if isinstance(given, (LayerDict, ParameterDict, Mapping)):
        return given.items()
    pairs = list(given)
    for pair in pairs:
        if not _is_named(pair):
            raise ConfigError(f"{what} takes a mapping or (name, value) pairs, got {pair!r} among them")
    return pairs


def _next_name(table: Mapping[str, Any]) -> str:
    """A number that is no name yet: after a deletion the count would name a layer that is there."""
    return str(max([len(table), *(int(name) + 1 for name in table if name.isdecimal())]))


def _name_at(owner: Layer, table: Mapping[str, Any], index: int) -> str:
    if not isinstance(index, int):
        raise TypeError(f"{type(owner).__name__} indices are integers, got {index!r}")
    if not -len(table) <= index < len(table):
        raise IndexError(f"{type(owner).__name__}: index {index} is outside a list of {len(table)}")
    return list(table)[index]
