"""Public names that Paddle keeps under incubate."""

from polyreme.geometric import segment_max, segment_mean, segment_min, segment_sum
from polyreme.incubate import asp, autograd, distributed, nn, optimizer, tensor
from polyreme.incubate.graph import graph_khop_sampler, graph_reindex, graph_sample_neighbors, graph_send_recv
from polyreme.incubate.masked_softmax import identity_loss, softmax_mask_fuse, softmax_mask_fuse_upper_triangle
from polyreme.incubate.optimizer.averages import ModelAverage
from polyreme.incubate.optimizer.look_ahead import LookAhead
from polyreme.module_names import suggest_names

__all__ = [
    "LookAhead",
    "ModelAverage",
    "asp",
    "autograd",
    "distributed",
    "graph_khop_sampler",
    "graph_reindex",
    "graph_sample_neighbors",
    "graph_send_recv",
    "identity_loss",
    "nn",
    "optimizer",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_sum",
    "softmax_mask_fuse",
    "softmax_mask_fuse_upper_triangle",
    "tensor",
]

suggest_names(__name__)
