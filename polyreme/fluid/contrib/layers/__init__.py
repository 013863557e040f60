"""fluid.contrib.layers: layers beside those of fluid.layers."""

from polyreme.fluid.absent import refusing
from polyreme.fluid.contrib.layers import metric_op, nn, rnn_impl
from polyreme.fluid.contrib.layers.metric_op import *
from polyreme.fluid.contrib.layers.nn import *
from polyreme.fluid.contrib.layers.rnn_impl import *

__all__ = [*metric_op.__all__, *nn.__all__, *rnn_impl.__all__]

__getattr__ = refusing("fluid.contrib.layers", __name__)
