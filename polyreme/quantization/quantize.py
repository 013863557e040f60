"""QAT and PTQ: quanters put into a model, and at last numbers in their place."""

from __future__ import annotations

import copy

from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.quantization.config import QuantConfig, SingleLayerConfig
from polyreme.quantization.quanter import BaseQuanter
from polyreme.quantization.wrappers import (
    ConvertibleQuantedLayer,
    LinearQuanterDequanter,
    ObserveWrapper,
)


class Quantization:
    """What QAT and PTQ share: quantize puts quanters into a model, convert numbers in their place."""

    def __init__(self, config: QuantConfig) -> None:
        if not isinstance(config, QuantConfig):
            raise ConfigError(f"{type(self).__name__}: {config!r} is no QuantConfig")
        self._config = config

    def quantize(self, model: Layer, inplace: bool = False) -> Layer:
        """The model with quanters, a copy unless inplace: Linear, Conv2D and Stub become what has quanters, the input
        of other layers without parts of their own is rounded. Raises ConfigError for settings of layers that are not
        there."""
        configs = self._config.of_layers(model)
        model = model if inplace else copy.deepcopy(model)
        self._replace(model, "", configs, {})
        return model

    def convert(self, model: Layer, inplace: bool = False, remain_weight: bool = False) -> Layer:
        """The model with numbers in the place of quanters, a copy unless inplace, to be evaluated and saved. Weights
        become whole numbers, of their dtype, unless remain_weight; what they say is then computed in each call."""
        model = model if inplace else copy.deepcopy(model)
        if isinstance(model, ConvertibleQuantedLayer):
            model.convert(remain_weight)
        for layer in [model, *model.sublayers()]:
            for name, part in list(layer._sub_layers.items()):
                if isinstance(part, ConvertibleQuantedLayer) and not part.converted:
                    part.convert(remain_weight)
                elif isinstance(part, BaseQuanter):
                    layer._sub_layers[name] = LinearQuanterDequanter.from_quanter(part)
        return model

    def _replace(
        self, layer: Layer, path: str, configs: dict[str, SingleLayerConfig], seen: dict[int, tuple[Layer, Layer]]
    ) -> None:
        """seen: each part that was met, and what stands in its place, for those that stand in several."""
        mappings = self._config.qat_layer_mappings
        for name, part in list(layer._sub_layers.items()):
            if part is None:
                continue
            if id(part) in seen:
                layer._sub_layers[name] = seen[id(part)][1]
                continue
            full = f"{path}.{name}" if path else name
            config, target = configs[full], mappings.get(type(part))
            if target is not None:
                placed = part if config.is_empty else _take_place(target(part, config), part)
                layer._sub_layers[name], seen[id(part)] = placed, (part, placed)
                continue
            self._replace(part, full, configs, seen)
            is_leaf = not part._sub_layers or type(part) in self._config.customized_leaves
            if is_leaf and config.activation is not None and not isinstance(part, BaseQuanter):
                layer._sub_layers[name] = _take_place(ObserveWrapper(config.activation._instance(part), part), part)
            seen[id(part)] = (part, layer._sub_layers[name])


def _take_place(layer: Layer, old: Layer) -> Layer:
    layer.train() if old.training else layer.eval()
    return layer


class QAT(Quantization):
    """Training in which a model computes as if in few bits; afterwards convert.

    >>> from polyreme.nn.layers.linear import Linear
    >>> from polyreme.quantization.quanters import FakeQuanterWithAbsMaxObserver
    >>> quanter = FakeQuanterWithAbsMaxObserver(moving_rate=0.9)
    >>> qat = QAT(QuantConfig(activation=quanter, weight=quanter))
    """

    def quantize(self, model: Layer, inplace: bool = False) -> Layer:
        """As Quantization.quantize; raises ConfigError for a model in evaluation mode too."""
        if not model.training:
            raise ConfigError("QAT.quantize: the model is in evaluation mode; call model.train() first")
        return super().quantize(model, inplace)


class PTQ(Quantization):
    """Ranges measured on batches that a model is run on between quantize and convert.

    >>> from polyreme.quantization.observers import AbsmaxObserver
    >>> ptq = PTQ(QuantConfig(activation=AbsmaxObserver(), weight=AbsmaxObserver()))
    """

    def quantize(self, model: Layer, inplace: bool = False) -> Layer:
        """As Quantization.quantize; raises ConfigError for a model in training mode too."""
        if model.training:
            raise ConfigError("PTQ.quantize: the model is in training mode; call model.eval() first")
        return super().quantize(model, inplace)
