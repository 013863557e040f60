"""polyreme.geometric: messages along the edges of graphs, sums by segment, sampled neighbours."""

from polyreme.geometric.reindex import reindex_graph, reindex_heter_graph
from polyreme.geometric.sampling import sample_neighbors, weighted_sample_neighbors
from polyreme.module_names import suggest_names
from polyreme.ops.messages import (
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
    send_u_recv,
    send_ue_recv,
    send_uv,
)

__all__ = [
    "reindex_graph",
    "reindex_heter_graph",
    "sample_neighbors",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_sum",
    "send_u_recv",
    "send_ue_recv",
    "send_uv",
    "weighted_sample_neighbors",
]

suggest_names(__name__)
