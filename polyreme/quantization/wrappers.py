"""Layers that quantization puts in the place of others: with quanters, and, converted, with numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.stub import Stub
from polyreme.ops import creation
from polyreme.ops.quantization import dequantize_linear, quantize_linear
from polyreme.quantization.quanter import BaseQuanter


class _Scaled(Layer):
    """Scales and codes of 0, as a quanter has them."""

    def __init__(self, scales: Any, zero_point: Any = None, quant_axis: int | None = None, bit_length: int = 8) -> None:
        super().__init__()
        scales = scales.detach().clone()
        self.register_buffer("_scales", scales)
        zeros = creation.zeros_like(scales) if zero_point is None else zero_point.detach().clone()
        self.register_buffer("_zero_point", zeros.astype(scales.dtype))
        self._quant_axis, self._bit_length = -1 if quant_axis is None else quant_axis, bit_length


class LinearQuanter(_Scaled):
    """Whole numbers of what passes, of its dtype."""

    def forward(self, input: Any) -> Any:
        return quantize_linear(input, self._scales, self._zero_point, self._bit_length, self._quant_axis)


class LinearDequanter(_Scaled):
    """What whole numbers say."""

    def forward(self, input: Any) -> Any:
        return dequantize_linear(input, self._scales, self._zero_point, self._bit_length, self._quant_axis)


class LinearQuanterDequanter(Layer):
    """What passes, rounded as a quanter did; a weight that is stored as whole numbers already has no _quanter."""

    def __init__(self, quanter: LinearQuanter | None, dequanter: LinearDequanter) -> None:
        super().__init__()
        self._quanter, self._dequanter = quanter, dequanter

    @classmethod
    def from_quanter(cls, quanter: BaseQuanter) -> LinearQuanterDequanter:
        """One with a quanter's scales."""
        scaled = (quanter.scales(), quanter.zero_points(), quanter.quant_axis(), quanter.bit_length())
        return cls(LinearQuanter(*scaled), LinearDequanter(*scaled))

    def forward(self, input: Any) -> Any:
        return self._dequanter(input if self._quanter is None else self._quanter(input))


class ConvertibleQuantedLayer(Layer):
    """A layer with quanters of weights and of what comes in: a class of one's own, which QuantConfig.
    add_qat_layer_mapping names, says which."""

    converted: bool = False

    def weights_to_quanters(self) -> list[tuple[str, str]]:
        """(name of a weight, name of its quanter)."""
        raise NotImplementedError(f"{type(self).__name__} has no weights_to_quanters(); write one")

    def activation_quanters(self) -> list[str]:
        """Names of quanters of what comes in."""
        raise NotImplementedError(f"{type(self).__name__} has no activation_quanters(); write one")

    def convert(self, remain_weight: bool = False) -> None:
        """Put numbers in the place of quanters; weights become whole numbers, of their dtype, unless remain_weight."""
        for weight, name in self.weights_to_quanters():
            quanter = getattr(self, name)
            if quanter is None:
                continue
            fixed = LinearQuanterDequanter.from_quanter(quanter)
            if not remain_weight:
                tensor = getattr(self, weight)
                with no_grad():
                    state.write(tensor, state.read(fixed._quanter(tensor.detach())))
                fixed._quanter = None
            setattr(self, name, fixed)
        for name in self.activation_quanters():
            if (quanter := getattr(self, name)) is not None:
                setattr(self, name, LinearQuanterDequanter.from_quanter(quanter))
        self.converted = True


class _Quanted(ConvertibleQuantedLayer):
    """A layer of a weight and a bias, both shared with the layer that it takes the place of."""

    taken: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layer: Layer, q_config: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        for name in self.taken:
            object.__setattr__(self, name, getattr(layer, name))
        self.weight_quanter = q_config.weight._instance(layer) if q_config.weight is not None else None
        self.activation_quanter = q_config.activation._instance(layer) if q_config.activation is not None else None

    def weights_to_quanters(self) -> list[tuple[str, str]]:
        return [("weight", "weight_quanter")]

    def activation_quanters(self) -> list[str]:
        return ["activation_quanter"]

    def forward(self, input: Any) -> Any:
        x = input if self.activation_quanter is None else self.activation_quanter(input)
        weight = self.weight if self.weight_quanter is None else self.weight_quanter(self.weight)
        return self._compute(x, weight)

    def _compute(self, x: Any, weight: Any) -> Any:
        raise NotImplementedError


class QuantedLinear(_Quanted):
    """A Linear whose input and weight quanters round."""

    taken: ClassVar[tuple[str, ...]] = (
        "in_features",
        "out_features",
        "name",
    )

    def _compute(self, x: Any, weight: Any) -> Any:
        return F.linear(x, weight, self.bias)


class QuantedConv2D(_Quanted):
    """A Conv2D whose input and weight quanters round."""

    taken: ClassVar[tuple[str, ...]] = ("_stride", "_padding", "_padding_mode", "_dilation", "_groups", "_data_format")

    def __init__(self, layer: Layer, q_config: Any) -> None:
        super().__init__(layer, q_config)
        self._borders = layer._borders() if self._padding_mode != "zeros" else None

    def _compute(self, x: Any, weight: Any) -> Any:
        padding = self._padding
        if self._borders is not None:
            x, padding = F.pad(x, self._borders, mode=self._padding_mode, data_format=self._data_format), 0
        settings = (self._stride, padding, self._dilation, self._groups, self._data_format)
        return F.conv2d(x, weight, self.bias, *settings)


class QuanterStub(Layer):
    """A Stub with the quanter that it was given, or else its configuration's."""

    def __init__(self, layer: Stub, q_config: Any) -> None:
        super().__init__()
        factory = layer._observer if layer._observer is not None else q_config.activation
        self._observer = None if factory is None else factory._instance(layer)

    def forward(self, input: Any) -> Any:
        return input if self._observer is None else self._observer(input)


class ObserveWrapper(Layer):
    """A layer and the quanter of what comes into it, or of what comes out of it."""

    def __init__(self, observer: BaseQuanter, observed: Layer, observe_input: bool = True) -> None:
        super().__init__()
        self._observer, self._observed, self._observe_input = observer, observed, observe_input

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._observe_input:
            first, *others = inputs
            return self._observed(self._round(first), *others, **kwargs)
        return self._round(self._observed(*inputs, **kwargs))

    def _round(self, value: Any) -> Any:
        # what is no floating Tensor, as ids, has nothing to round
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return self._observer(value) if is_number else value
