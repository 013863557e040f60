"""Weights of few bits, products with them, and layers that quantization looks for in a model."""

from polyreme.nn.layers.quantized import QuantizedExperts, QuantizedLinear, RoundedLinear
from polyreme.nn.layers.stub import Stub
from polyreme.ops.quantization import (
    apply_per_channel_scale,
    llm_int8_linear,
    weight_dequantize,
    weight_only_linear,
    weight_quantize,
)

__all__ = [
    "QuantizedExperts",
    "QuantizedLinear",
    "RoundedLinear",
    "Stub",
    "apply_per_channel_scale",
    "llm_int8_linear",
    "weight_dequantize",
    "weight_only_linear",
    "weight_quantize",
]
