"""fluid.contrib: mixed precision, weight decay apart from gradients, statistics of Programs, more layers."""

from polyreme.fluid.absent import refusing
from polyreme.fluid.contrib import (
    extend_optimizer,
    inferencer,
    layers,
    memory_usage_calc,
    mixed_precision,
    op_frequence,
    reader,
    trainer,
)
from polyreme.fluid.contrib.extend_optimizer import extend_with_decoupled_weight_decay
from polyreme.fluid.contrib.inferencer import Inferencer
from polyreme.fluid.contrib.layers import *
from polyreme.fluid.contrib.memory_usage_calc import memory_usage
from polyreme.fluid.contrib.op_frequence import op_freq_statistic
from polyreme.fluid.contrib.reader import distributed_batch_reader
from polyreme.fluid.contrib.trainer import *

__all__ = [
    "distributed_batch_reader", "extend_optimizer", "extend_with_decoupled_weight_decay", "layers", "memory_usage",
    "memory_usage_calc", "mixed_precision", "op_freq_statistic", "op_frequence", "reader",
    "Inferencer", "inferencer", "trainer", *layers.__all__, *trainer.__all__,
]  # fmt: skip

__getattr__ = refusing("fluid.contrib", __name__)
