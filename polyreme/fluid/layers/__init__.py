"""fluid.layers: what Programs are written with."""

from polyreme.fluid.absent import refusing
from polyreme.fluid.label_layers import crf_decoding, ctc_greedy_decoder, edit_distance, linear_chain_crf
from polyreme.fluid.layers.control_flow import *
from polyreme.fluid.layers.elementwise import *
from polyreme.fluid.layers.host import *
from polyreme.fluid.layers.image import *
from polyreme.fluid.layers.io import *
from polyreme.fluid.layers.learning_rate_scheduler import *
from polyreme.fluid.layers.loss import *
from polyreme.fluid.layers.metric_op import *
from polyreme.fluid.layers.nn import *
from polyreme.fluid.layers.ops import *
from polyreme.fluid.layers.reduction import *
from polyreme.fluid.layers.shape import *
from polyreme.fluid.layers.tensor import *
from polyreme.fluid.recurrent_layers import dynamic_gru, dynamic_lstm, dynamic_lstmp, gru_unit, lstm_unit
from polyreme.fluid.sequence_layers import (
    im2sequence,
    lod_append,
    lod_reset,
    row_conv,
    sequence_concat,
    sequence_conv,
    sequence_enumerate,
    sequence_expand,
    sequence_expand_as,
    sequence_first_step,
    sequence_last_step,
    sequence_mask,
    sequence_pad,
    sequence_pool,
    sequence_reshape,
    sequence_reverse,
    sequence_scatter,
    sequence_slice,
    sequence_softmax,
    sequence_unpad,
)

__getattr__ = refusing("fluid.layers", __name__)
