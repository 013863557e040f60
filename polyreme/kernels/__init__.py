"""Fused kernels on jax arrays, each with its plain twin."""

from polyreme.kernels.adamw import adamw, adamw_plain
from polyreme.kernels.attention import attention, attention_plain
from polyreme.kernels.column_attention import column_attention, column_attention_plain
from polyreme.kernels.columns import Columns
from polyreme.kernels.experts import exchanged_experts, experts, row_experts
from polyreme.kernels.grouped import (
    block_size,
    grouped_apply,
    grouped_matmul,
    grouped_matmul_plain,
    grouped_outer,
    grouped_outer_plain,
)
from polyreme.kernels.linear import linear, linear_plain, tile_product
from polyreme.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_plain
from polyreme.kernels.low_bit import low_bit_linear
from polyreme.kernels.norm import layer_norm, layer_norm_plain, rms_norm, rms_norm_plain
from polyreme.kernels.recurrent import recurrent, recurrent_plain
from polyreme.kernels.ring_attention import (
    gather_attention,
    gather_column_attention,
    ring_attention,
    ring_column_attention,
    ulysses_attention,
    ulysses_column_attention,
)
from polyreme.kernels.ring_gradient import ring_gradient_linear
from polyreme.kernels.ring_linear import gather_linears, scatter_linear
from polyreme.kernels.usp_attention import usp_attention, usp_column_attention
from polyreme.kernels.zigzag import into_zigzag, move_into_zigzag, move_out_of_zigzag, out_of_zigzag

__all__ = [
    "Columns",
    "adamw",
    "adamw_plain",
    "attention",
    "attention_plain",
    "block_size",
    "column_attention",
    "column_attention_plain",
    "exchanged_experts",
    "experts",
    "gather_attention",
    "gather_column_attention",
    "gather_linears",
    "grouped_apply",
    "grouped_matmul",
    "grouped_matmul_plain",
    "grouped_outer",
    "grouped_outer_plain",
    "into_zigzag",
    "layer_norm",
    "layer_norm_plain",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_plain",
    "linear_plain",
    "low_bit_linear",
    "move_into_zigzag",
    "move_out_of_zigzag",
    "out_of_zigzag",
    "recurrent",
    "recurrent_plain",
    "ring_attention",
    "ring_column_attention",
    "ring_gradient_linear",
    "rms_norm",
    "rms_norm_plain",
    "row_experts",
    "scatter_linear",
    "tile_product",
    "ulysses_attention",
    "ulysses_column_attention",
    "usp_attention",
    "usp_column_attention",
]
