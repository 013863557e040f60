"""Layers over the functions that Paddle fuses by hand."""

from polyreme.incubate.nn import functional
from polyreme.incubate.nn.layers import (
    FusedBiasDropoutResidualLayerNorm,
    FusedDropoutAdd,
    FusedEcMoe,
    FusedFeedForward,
    FusedLinear,
    FusedMultiHeadAttention,
    FusedTransformerEncoderLayer,
)
from polyreme.incubate.nn.multi_transformer import FusedMultiTransformer

__all__ = [
    "FusedBiasDropoutResidualLayerNorm",
    "FusedDropoutAdd",
    "FusedEcMoe",
    "FusedFeedForward",
    "FusedLinear",
    "FusedMultiHeadAttention",
    "FusedMultiTransformer",
    "FusedTransformerEncoderLayer",
    "functional",
]
