"""The functions that Paddle fuses by hand; XLA fuses them here.

This file only gathers the names.
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
from polyreme.incubate.nn.functional.experts import fused_ec_moe, fused_moe, moe_dispatch, moe_ffn, moe_reduce
from polyreme.incubate.nn.functional.gradients import embedding_grad_add_to_
from polyreme.incubate.nn.functional.transformer import fused_multi_head_attention, fused_multi_transformer
from polyreme.nn.functional import fused_rotary_position_embedding
from polyreme.ops.attention.gated import fused_gate_attention
from polyreme.ops.experts.routing import cal_aux_loss, int_bincount, moe_combine, moe_gate_dispatch
from polyreme.ops.float8 import (
    cross_entropy_with_softmax_bwd_w_downcast,
    fused_act_dequant,
    fused_swiglu_weighted_bwd,
    fused_weighted_swiglu_act_quant,
)

__all__ = [
    "blha_get_max_len",
    "block_multihead_attention",
    "cal_aux_loss",
    "cross_entropy_with_softmax_bwd_w_downcast",
    "embedding_grad_add_to_",
    "fast_ln",
    "fast_rms_norm",
    "fused_act_dequant",
    "fused_bias_act",
    "fused_bias_dropout_residual_layer_norm",
    "fused_dropout_add",
    "fused_ec_moe",
    "fused_feedforward",
    "fused_gate_attention",
    "fused_layer_norm",
    "fused_linear",
    "fused_linear_activation",
    "fused_matmul_bias",
    "fused_moe",
    "fused_multi_head_attention",
    "fused_multi_transformer",
    "fused_rms_norm",
    "fused_rms_norm_ext",
    "fused_rotary_position_embedding",
    "fused_swiglu_weighted_bwd",
    "fused_weighted_swiglu_act_quant",
    "int_bincount",
    "masked_multihead_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_ffn",
    "moe_gate_dispatch",
    "moe_reduce",
    "variable_length_memory_efficient_attention",
]
