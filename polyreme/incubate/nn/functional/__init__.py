"""The functions that Paddle fuses by hand; XLA fuses them here.

Floor: 5.  This file only gathers the names.
"""

from polyreme.incubate.nn.functional.blocks import (
    fast_ln,
    fast_rms_norm,
    fused_bias_act,
    fused_bias_dropout_residual_layer_norm,
    fused_dropout_add,
    fused_feedforward,
    fused_layer_norm,
    fused_linear,
    fused_linear_activation,
    fused_matmul_bias,
    fused_rms_norm,
    fused_rms_norm_ext,
)
from polyreme.incubate.nn.functional.decoding import (
    blha_get_max_len,
    block_multihead_attention,
    masked_multihead_attention,
    variable_length_memory_efficient_attention,
)
from polyreme.incubate.nn.functional.transformer import fused_multi_head_attention, fused_multi_transformer
from polyreme.nn.functional import fused_rotary_position_embedding

__all__ = [
    "blha_get_max_len",
    "block_multihead_attention",
    "fast_ln",
    "fast_rms_norm",
    "fused_bias_act",
    "fused_bias_dropout_residual_layer_norm",
    "fused_dropout_add",
    "fused_feedforward",
    "fused_layer_norm",
    "fused_linear",
    "fused_linear_activation",
    "fused_matmul_bias",
    "fused_multi_head_attention",
    "fused_multi_transformer",
    "fused_rms_norm",
    "fused_rms_norm_ext",
    "fused_rotary_position_embedding",
    "masked_multihead_attention",
    "variable_length_memory_efficient_attention",
]
