"""Layer functions on sequences, which begin a Program as every other of fluid.layers does."""

from polyreme.fluid.layer import layer
from polyreme.sequences import labels, layers, recurrent

im2sequence = layer(layers.im2sequence)
lod_append = layer(layers.lod_append)
lod_reset = layer(layers.lod_reset)
row_conv = layer(layers.row_conv)
sequence_concat = layer(layers.sequence_concat)
sequence_conv = layer(layers.sequence_conv)
sequence_enumerate = layer(layers.sequence_enumerate)
sequence_expand = layer(layers.sequence_expand)
sequence_expand_as = layer(layers.sequence_expand_as)
sequence_first_step = layer(layers.sequence_first_step)
sequence_last_step = layer(layers.sequence_last_step)
sequence_mask = layer(layers.sequence_mask)
sequence_pad = layer(layers.sequence_pad)
sequence_pool = layer(layers.sequence_pool)
sequence_reshape = layer(layers.sequence_reshape)
sequence_reverse = layer(layers.sequence_reverse)
sequence_scatter = layer(layers.sequence_scatter)
sequence_slice = layer(layers.sequence_slice)
sequence_softmax = layer(layers.sequence_softmax)
sequence_unpad = layer(layers.sequence_unpad)
crf_decoding = layer(labels.crf_decoding)
ctc_greedy_decoder = layer(labels.ctc_greedy_decoder)
edit_distance = layer(labels.edit_distance)
linear_chain_crf = layer(labels.linear_chain_crf)
dynamic_gru = layer(recurrent.dynamic_gru)
dynamic_lstm = layer(recurrent.dynamic_lstm)
dynamic_lstmp = layer(recurrent.dynamic_lstmp)
gru_unit = layer(recurrent.gru_unit)
lstm_unit = layer(recurrent.lstm_unit)

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
