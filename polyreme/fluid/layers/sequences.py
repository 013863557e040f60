"""Layer functions on sequences, which begin a Program as every other of fluid.layers does."""

from collections.abc import Callable
from typing import Any

from polyreme.fluid.layer import layer
from polyreme.sequences import labels, layers, recurrent

im2sequence: Callable[..., Any] = layer(layers.im2sequence)
lod_append: Callable[..., Any] = layer(layers.lod_append)
lod_reset: Callable[..., Any] = layer(layers.lod_reset)
row_conv: Callable[..., Any] = layer(layers.row_conv)
sequence_concat: Callable[..., Any] = layer(layers.sequence_concat)
sequence_conv: Callable[..., Any] = layer(layers.sequence_conv)
sequence_enumerate: Callable[..., Any] = layer(layers.sequence_enumerate)
sequence_expand: Callable[..., Any] = layer(layers.sequence_expand)
sequence_expand_as: Callable[..., Any] = layer(layers.sequence_expand_as)
sequence_first_step: Callable[..., Any] = layer(layers.sequence_first_step)
sequence_last_step: Callable[..., Any] = layer(layers.sequence_last_step)
sequence_mask: Callable[..., Any] = layer(layers.sequence_mask)
sequence_pad: Callable[..., Any] = layer(layers.sequence_pad)
sequence_pool: Callable[..., Any] = layer(layers.sequence_pool)
sequence_reshape: Callable[..., Any] = layer(layers.sequence_reshape)
sequence_reverse: Callable[..., Any] = layer(layers.sequence_reverse)
sequence_scatter: Callable[..., Any] = layer(layers.sequence_scatter)
sequence_slice: Callable[..., Any] = layer(layers.sequence_slice)
sequence_softmax: Callable[..., Any] = layer(layers.sequence_softmax)
sequence_unpad: Callable[..., Any] = layer(layers.sequence_unpad)
crf_decoding: Callable[..., Any] = layer(labels.crf_decoding)
ctc_greedy_decoder: Callable[..., Any] = layer(labels.ctc_greedy_decoder)
edit_distance: Callable[..., Any] = layer(labels.edit_distance)
linear_chain_crf: Callable[..., Any] = layer(labels.linear_chain_crf)
dynamic_gru: Callable[..., Any] = layer(recurrent.dynamic_gru)
dynamic_lstm: Callable[..., Any] = layer(recurrent.dynamic_lstm)
dynamic_lstmp: Callable[..., Any] = layer(recurrent.dynamic_lstmp)
gru_unit: Callable[..., Any] = layer(recurrent.gru_unit)
lstm_unit: Callable[..., Any] = layer(recurrent.lstm_unit)

__all__ = [
    "crf_decoding",
    "ctc_greedy_decoder",
    "dynamic_gru",
    "dynamic_lstm",
    "dynamic_lstmp",
    "edit_distance",
    "gru_unit",
    "im2sequence",
    "linear_chain_crf",
    "lod_append",
    "lod_reset",
    "lstm_unit",
    "row_conv",
    "sequence_concat",
    "sequence_conv",
    "sequence_enumerate",
    "sequence_expand",
    "sequence_expand_as",
    "sequence_first_step",
    "sequence_last_step",
    "sequence_mask",
    "sequence_pad",
    "sequence_pool",
    "sequence_reshape",
    "sequence_reverse",
    "sequence_scatter",
    "sequence_slice",
    "sequence_softmax",
    "sequence_unpad",
]
