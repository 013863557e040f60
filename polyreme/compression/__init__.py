"""Decoders made smaller after training: weights in few bits, weights that are zero, channels that are gone."""

from polyreme.compression.calibration import InputStatistics, nats_per_token
from polyreme.compression.prune import PRUNING_METHODS, PruningOptions, Sparsity, prune_decoder
from polyreme.compression.quantize import (
    QUANTIZATION_METHODS,
    WEIGHT_TYPES,
    LayerError,
    QuantizationOptions,
    quantize_decoder,
)
from polyreme.compression.structured import narrowed

__all__ = [
    "PRUNING_METHODS",
    "QUANTIZATION_METHODS",
    "WEIGHT_TYPES",
    "InputStatistics",
    "LayerError",
    "PruningOptions",
    "QuantizationOptions",
    "Sparsity",
    "narrowed",
    "nats_per_token",
    "prune_decoder",
    "quantize_decoder",
]
