"""paddle.quantization.ImperativeQuantAware and the layers that it puts in: quantization-aware training by 2.x's API.

Facts: PaddlePaddle 3.3.1, quantization.imperative and nn.quant.quant_layers; names in state_dict are its names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError, did_you_mean
from polyreme.jit import save
from polyreme.nn import Conv2D, Conv2DTranspose, Linear
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.quantization import fake_quantize
from polyreme.quantization.config import SingleLayerConfig
from polyreme.quantization.quanters import FakeQuanterWithAbsMaxObserverLayer
from polyreme.quantization.wrappers import QuantedConv2D, QuantedLinear


def _statistic(layer: Layer, name: str, size: int, start: float) -> None:
    """Give the layer a number for each of size that is saved with it and not trained."""
    parameter = layer.create_parameter([size], ParamAttr(initializer=Constant(start), trainable=False))
    parameter.is_statistic = True
    layer.add_parameter(name, parameter)


class FakeQuantAbsMax(Layer):
    """What passes, rounded to quant_bits bits under its own largest number; channels along quant_axis each under
    theirs, of channel_num channels. `_scale` has the largest numbers of the last call."""

    def __init__(self, quant_bits: int = 8, channel_num: int | None = None, quant_axis: int = -1) -> None:
        super().__init__()
        self._quant_bits, self._quant_axis = quant_bits, -1 if channel_num is None else quant_axis
        _statistic(self, "_scale", channel_num or 1, 0.001 if channel_num is None else 0.0)

    def forward(self, input: Any) -> Any:
        others = [d for d in range(input.ndim) if d != self._quant_axis] if self._quant_axis >= 0 else None
        with no_grad():
            scale = input.detach().abs().max(others).reshape([-1])
            state.write(self._scale, state.read(scale.astype(self._scale.dtype)))
        return fake_quantize(input, scale, self._quant_bits, self._quant_axis)


class MovingAverageAbsMaxScale(Layer):
    """What passes, unchanged; training moves `_scale`, the mean of its largest numbers, in which each call weighs
    moving_rate times the one after it."""

    def __init__(self, moving_rate: float = 0.9) -> None:
        super().__init__()
        self._moving_rate = moving_rate
        for name in ("_scale", "_state", "_accum"):
            _statistic(self, name, 1, 0.0)

    def forward(self, input: Any) -> Any:
        if self.training and input.is_floating_point():
            with no_grad():
                count = self._state * self._moving_rate + 1
                total = self._accum * self._moving_rate + input.detach().abs().max().astype(self._accum.dtype)
                for kept, value in ((self._state, count), (self._accum, total), (self._scale, total / count)):
                    state.write(kept, state.read(value))
        return input


class MAOutputScaleLayer(Layer):
    """A layer, and the scale of the Tensor that comes out of it."""

    def __init__(self, layer: Layer, moving_rate: float = 0.9) -> None:
        super().__init__()
        self._layer, self._ma_output_scale = layer, MovingAverageAbsMaxScale(moving_rate)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        out = self._layer(*inputs, **kwargs)
        return out if isinstance(out, (list, tuple, dict)) else self._ma_output_scale(out)


class _FakeQuantized:
    """Layers of a weight whose input and weight are rounded; channels: the dim of the weight's outputs."""

    channels: ClassVar[int]

    def __init__(self: Any, layer: Layer, make: Callable[[Any, int], dict[str, Layer | None]]) -> None:
        super().__init__(layer, SingleLayerConfig(None, None))
        for name, part in make(self.weight, self.channels).items():
            setattr(self, name, part)

    def forward(self: Any, input: Any) -> Any:
        x = input if self._act_preprocess is None else self._act_preprocess(input)
        weight = self.weight if self._weight_preprocess is None else self._weight_preprocess(self.weight)
        return self._compute(self._fake_quant_input(x), self._fake_quant_weight(weight))


class FakeQuantizedConv2D(_FakeQuantized, QuantedConv2D):
    """A Conv2D whose input and weight are rounded."""

    channels = 0


class FakeQuantizedLinear(_FakeQuantized, QuantedLinear):
    """A Linear whose input and weight are rounded."""

    channels = 1


class FakeQuantizedConv2DTranspose(_FakeQuantized, QuantedLinear):
    """A Conv2DTranspose whose input and weight are rounded."""

    channels = 1
    taken = ("_stride", "_padding", "output_padding", "_groups", "_dilation", "_data_format")

    def _compute(self, x: Any, weight: Any) -> Any:
        settings = {"groups": self._groups, "dilation": self._dilation, "data_format": self._data_format}
        return F.conv2d_transpose(x, weight, self.bias, self._stride, self._padding, self.output_padding, **settings)


_LAYERS: dict[str, tuple[type[Layer], type[_FakeQuantized]]] = {
    "Conv2D": (Conv2D, FakeQuantizedConv2D),
    "Linear": (Linear, FakeQuantizedLinear),
    "Conv2DTranspose": (Conv2DTranspose, FakeQuantizedConv2DTranspose),
}
_NONE_HERE = ("ColumnParallelLinear", "RowParallelLinear")  # Linear layers with a placement are Linear here


class ImperativeQuantAware:
    """quantize(model) rounds inputs and weights of its layers to few bits while it trains, in place.

    quantizable_layer_type: Conv2D, Linear and Conv2DTranspose, by name or class. weight_quantize_type: "abs_max" or
    "channel_wise_abs_max"; activation_quantize_type: "abs_max" or "moving_average_abs_max", whose scale moves by
    moving_rate. *_preprocess_layer and *_quantize_layer: classes of Layers that come before the rounding, or in its
    place. onnx_format: scales of outputs are followed of rounded layers alone, not of all. fuse_conv_bn is refused.
    """

    def __init__(
        self,
        quantizable_layer_type: Sequence[Any] = (*_LAYERS, *_NONE_HERE),
        weight_quantize_type: str = "abs_max",
        activation_quantize_type: str = "moving_average_abs_max",
        weight_bits: int = 8,
        activation_bits: int = 8,
        moving_rate: float = 0.9,
        fuse_conv_bn: bool = False,
        weight_preprocess_layer: type[Layer] | None = None,
        act_preprocess_layer: type[Layer] | None = None,
        weight_quantize_layer: type[Layer] | None = None,
        act_quantize_layer: type[Layer] | None = None,
        onnx_format: bool = False,
    ) -> None:
        if fuse_conv_bn:
            raise ConfigError("ImperativeQuantAware: fuse_conv_bn=True; train without it, statistics are folded by XLA")
        self._types = tuple(map(_layer_type, quantizable_layer_type))
        kinds = {"weight": ("abs_max", "channel_wise_abs_max"), "activation": ("abs_max", "moving_average_abs_max")}
        for what, kind in (("weight", weight_quantize_type), ("activation", activation_quantize_type)):
            if kind not in kinds[what]:
                raise ConfigError(f"ImperativeQuantAware: {what}_quantize_type={kind!r}; give one of {kinds[what]}")
        self._moving_rate, self._outputs_of_rounded = moving_rate, onnx_format

        def parts(weight: Any, channels: int) -> dict[str, Layer | None]:
            count = weight.shape[channels] if weight_quantize_type == "channel_wise_abs_max" else None
            of_weight = weight_quantize_layer or (lambda: FakeQuantAbsMax(weight_bits, count, channels))
            of_input = act_quantize_layer or (
                lambda: _quantizer(activation_quantize_type, moving_rate, activation_bits)
            )
            return {
                "_fake_quant_weight": of_weight(),
                "_fake_quant_input": of_input(),
                "_act_preprocess": act_preprocess_layer and act_preprocess_layer(),
                "_weight_preprocess": weight_preprocess_layer and weight_preprocess_layer(),
            }

        self._parts = parts

    def quantize(self, model: Layer) -> Layer:
        """The model itself, with rounded layers in the place of those of its types, but for layers whose skip_quant is
        True. Raises ConfigError if it is no Layer."""
        if not isinstance(model, Layer):
            raise ConfigError(f"ImperativeQuantAware.quantize takes a Layer, got {type(model).__name__}")
        for owner, name, part in _parts_of(model):
            if isinstance(part, self._types) and getattr(part, "skip_quant", False) is not True:
                rounded = next(new for old, new in _LAYERS.values() if isinstance(part, old))
                setattr(owner, name, rounded(part, self._parts))
        for owner, name, part in _parts_of(model):
            if isinstance(part, _FakeQuantized) or (not self._outputs_of_rounded and _is_leaf(owner, part)):
                setattr(owner, name, MAOutputScaleLayer(part, self._moving_rate))
        return model

    def save_quantized_model(self, layer: Layer, path: str, input_spec: Any = None, **config: Any) -> None:
        """Save the model as it computes in evaluation, rounding included, for jit.load and inference."""
        layer.eval()
        save(layer, path, input_spec=input_spec, **config)


def _layer_type(given: Any) -> type:
    names = {name: old for name, (old, _) in _LAYERS.items()} | dict.fromkeys(_NONE_HERE, Linear)
    layer_type = names.get(given, given) if isinstance(given, str) else given
    if not (isinstance(layer_type, type) and issubclass(layer_type, tuple(old for old, _ in _LAYERS.values()))):
        raise ConfigError(f"ImperativeQuantAware: no layer type {given!r} is rounded{did_you_mean(str(given), names)}")
    return layer_type


def _quantizer(kind: str, moving_rate: float, bits: int) -> Layer:
    if kind == "abs_max":
        return FakeQuantAbsMax(bits)
    return FakeQuanterWithAbsMaxObserverLayer(Layer(), moving_rate, bits)


def _parts_of(model: Layer) -> list[tuple[Layer, str, Layer]]:
    """(owner, name in it, layer) of all layers below a model."""
    owners = [model, *model.sublayers()]
    return [(owner, name, part) for owner in owners for name, part in owner._sub_layers.items() if part is not None]


def _is_leaf(owner: Layer, part: Layer) -> bool:
    return not part._sub_layers and not isinstance(owner, (_FakeQuantized, MAOutputScaleLayer))


# slots of what comes in and goes out, and the operations in a Program that have them
_WEIGHTS = {
    "Input Filter -> Output": "conv2d depthwise_conv2d conv2d_transpose",
    "X Y -> Out": "mul matmul matmul_v2",
}
_ACTIVATIONS = {
    "X -> Out": """pool2d concat softmax argmax transpose gather mean reshape reshape2 transpose2 nearest_interp
    trilinear_interp squeeze relu relu6 leaky_relu tanh swish dropout sigmoid hard_swish hard_sigmoid pad2d pad3d
    flatten flatten2 unsqueeze2 flatten_contiguous_range split squeeze2 nearest_interp_v2 bilinear_interp
    bilinear_interp_v2 arg_max abs assign cast clip crop cumsum expand_v2 fill_any_like gelu p_norm pow reduce_mean
    logical_not meshgrid tile reduce_sum square softplus shuffle_channel reduce_max scale""",
    "X Y -> Out": """mul matmul matmul_v2 elementwise_add equal greater_equal greater_than less_equal less_than
    not_equal elementwise_sub elementwise_mul elementwise_pow logical_and""",
    "Input -> Out": "slice fill_constant_batch_size_like strided_slice",
    "X -> Y": "batch_norm layer_norm instance_norm stack",
    "X -> Y Mean Variance": "group_norm",
    "X -> Norm": "norm",
    "X -> Out Indices": "top_k_v2",
    "X Alpha -> Out": "prelu",
    "Input Weight -> Hidden": "gru lstm",
    "PriorBox -> OutputBox": "box_coder",
    "-> Out": "fill_constant",
    "W Ids -> Out": "lookup_table lookup_table_v2",
    "X ROIs -> Out": "roi_align",
    "Condition X Y -> Out": "where",
    "X Grid -> Output": "grid_sampler",
}


def _by_operation(table: dict[str, str]) -> dict[str, list[list[str]]]:
    return {
        name: [part.split() for part in slots.split("->")] for slots, names in table.items() for name in names.split()
    }


SUPPORT_WEIGHT_QUANTIZATION_OP_DICT = _by_operation(_WEIGHTS)
SUPPORT_ACT_QUANTIZATION_OP_DICT = _by_operation(_ACTIVATIONS)
SUPPORT_QUANTIZATION_OP_DICT = SUPPORT_WEIGHT_QUANTIZATION_OP_DICT | SUPPORT_ACT_QUANTIZATION_OP_DICT
