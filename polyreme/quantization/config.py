"""QuantConfig: which layers get which quanters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn.layer import Layer
from polyreme.nn.layers.conv import Conv2D
from polyreme.nn.layers.linear import Linear
from polyreme.nn.layers.stub import Stub
from polyreme.quantization.factory import QuanterFactory
from polyreme.quantization.wrappers import QuantedConv2D, QuantedLinear, QuanterStub

DEFAULT_MAPPINGS: dict[type, type] = {Stub: QuanterStub, Linear: QuantedLinear, Conv2D: QuantedConv2D}
"""Classes of layers, and what is put in their place."""


class SingleLayerConfig(NamedTuple):
    """The factories of a layer's quanters, of what comes in and of its weight; None for no quanter."""

    activation: QuanterFactory | None
    weight: QuanterFactory | None

    @property
    def is_empty(self) -> bool:
        """Whether there is no quanter at all."""
        return self.activation is None and self.weight is None


class QuantConfig:
    """Which quanters layers get: those of add_layer_config before add_name_config's, add_type_config's, those of the
    layer that has it, and at last activation and weight, of all.

    >>> from polyreme.nn.layers.linear import Linear
    >>> from polyreme.quantization.quanters import FakeQuanterWithAbsMaxObserver
    >>> config = QuantConfig(activation=None, weight=None)
    >>> config.add_type_config(Linear, weight=FakeQuanterWithAbsMaxObserver(bit_length=4))
    """

    def __init__(self, activation: QuanterFactory | None, weight: QuanterFactory | None) -> None:
        self._global = _config(activation, weight, "QuantConfig")
        self._by_layer: list[tuple[Layer, SingleLayerConfig]] = []
        self._by_name: dict[str, SingleLayerConfig] = {}
        self._by_type: dict[type, SingleLayerConfig] = {}
        self._mappings: dict[type, type] = {}
        self._leaves: list[type] = []

    def add_layer_config(
        self, layer: Layer | Sequence[Layer], activation: QuanterFactory | None = None, weight: Any = None
    ) -> None:
        """Of these layers, and of what they hold, where nothing else is said of it."""
        config = _config(activation, weight, "add_layer_config")
        for one in _as_list(layer):
            if not isinstance(one, Layer):
                raise ConfigError(f"add_layer_config: {one!r} is no Layer")
            self._by_layer.append((one, config))

    def add_name_config(
        self, layer_name: str | Sequence[str], activation: QuanterFactory | None = None, weight: Any = None
    ) -> None:
        """Of layers with these full_name()s, or names in the model."""
        config = _config(activation, weight, "add_name_config")
        for name in _as_list(layer_name):
            if not isinstance(name, str):
                raise ConfigError(f"add_name_config: {name!r} is no name")
            self._by_name[name] = config

    def add_type_config(
        self, layer_type: type | Sequence[type], activation: QuanterFactory | None = None, weight: Any = None
    ) -> None:
        """Of all layers of these classes."""
        config = _config(activation, weight, "add_type_config")
        for one in _as_list(layer_type):
            self._by_type[_layer_class(one, "add_type_config")] = config

    def add_qat_layer_mapping(self, source: type, target: type) -> None:
        """Put target(layer, its SingleLayerConfig) in the place of layers of a class; see ConvertibleQuantedLayer."""
        self._mappings[_layer_class(source, "add_qat_layer_mapping")] = _layer_class(target, "add_qat_layer_mapping")

    def add_customized_leaf(self, layer_type: type) -> None:
        """Round what comes into layers of this class, whatever they hold."""
        self._leaves.append(_layer_class(layer_type, "add_customized_leaf"))

    @property
    def customized_leaves(self) -> list[type]:
        """Classes of add_customized_leaf."""
        return self._leaves

    @property
    def default_qat_layer_mapping(self) -> dict[type, type]:
        """DEFAULT_MAPPINGS."""
        return dict(DEFAULT_MAPPINGS)

    @property
    def qat_layer_mappings(self) -> dict[type, type]:
        """Classes of layers, and what is put in their place: DEFAULT_MAPPINGS and those of add_qat_layer_mapping."""
        return {**DEFAULT_MAPPINGS, **self._mappings}

    @property
    def global_config(self) -> SingleLayerConfig:
        """What holds where nothing else is said."""
        return self._global

    def of_layers(self, model: Layer) -> dict[str, SingleLayerConfig]:
        """What holds for each layer of a model, by its name in it. Raises ConfigError for layers and names that are set
        and not there."""
        chosen = {"": self._config_of("", model, self._global)}
        names, full_names, layers = {""}, {model.full_name()}, {id(model)}
        for name, layer in model.named_sublayers():
            parent = chosen[name.rpartition(".")[0]]
            chosen[name] = self._config_of(name, layer, parent)
            names.add(name)
            full_names.add(layer.full_name())
            layers.add(id(layer))
        for name in self._by_name.keys() - names - full_names:
            raise ConfigError(f"add_name_config: no layer is called {name!r}{did_you_mean(name, names | full_names)}")
        for layer, _ in self._by_layer:
            if id(layer) not in layers:
                raise ConfigError(f"add_layer_config: {layer.full_name()} is not in the model that is quantized")
        return chosen

    def _config_of(self, name: str, layer: Layer, inherited: SingleLayerConfig) -> SingleLayerConfig:
        for one, config in reversed(self._by_layer):
            if one is layer:
                return config
        for key in (layer.full_name(), name):
            if key in self._by_name:
                return self._by_name[key]
        return self._by_type.get(type(layer), inherited)

    def details(self) -> str:
        """What was set, as text."""
        lines = [f"Global config:\n{self._global}"]
        groups: list[tuple[str, dict[Any, SingleLayerConfig]]] = [
            ("Layer", {layer.full_name(): config for layer, config in self._by_layer}),
            ("Name", self._by_name),
            ("Type", {kind.__name__: config for kind, config in self._by_type.items()}),
        ]
        for what, configs in groups:
            lines += [f"{what} config:\n{configs}"] if configs else []
        return "\n".join(lines)

    __str__ = details


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _layer_class(value: Any, what: str) -> type:
    if not (isinstance(value, type) and issubclass(value, Layer)):
        raise ConfigError(f"{what}: {value!r} is no class of Layers")
    return value


def _config(activation: Any, weight: Any, what: str) -> SingleLayerConfig:
    for factory in (activation, weight):
        if factory is not None and not isinstance(factory, QuanterFactory):
            raise ConfigError(
                f"{what}: {factory!r} is no factory of quanters; give one as AbsmaxObserver(), or None for no rounding"
            )
    return SingleLayerConfig(activation, weight)
