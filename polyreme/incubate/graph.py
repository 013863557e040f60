"""Earlier spellings of polyreme.geometric, and neighbours sampled over several hops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.geometric import reindex_graph, sample_neighbors, send_u_recv
from polyreme.geometric.reindex import numbered
from polyreme.geometric.sampling import NeighborGraph, column, drawn


def graph_send_recv(
    x: Any, src_index: Any, dst_index: Any, pool_type: str = "sum", out_size: Any = None, name: str | None = None
) -> Tensor:
    """geometric.send_u_recv by its earlier name; pool_type is its reduce_op."""
    return send_u_recv(x, src_index, dst_index, pool_type, out_size)


def graph_reindex(
    x: Any,
    neighbors: Any,
    count: Any,
    value_buffer: Any = None,
    index_buffer: Any = None,
    flag_buffer_hashtable: bool = False,
    name: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """geometric.reindex_graph by its earlier name; the buffers and their flag are room it does not need."""
    return reindex_graph(x, neighbors, count)


def graph_sample_neighbors(
    row: Any,
    colptr: Any,
    input_nodes: Any,
    eids: Any = None,
    perm_buffer: Any = None,
    sample_size: int = -1,
    return_eids: bool = False,
    flag_perm_buffer: bool = False,
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """geometric.sample_neighbors by its earlier name; the buffer and its flag are room it does not need."""
    return sample_neighbors(row, colptr, input_nodes, sample_size, eids, return_eids)


def graph_khop_sampler(
    row: Any,
    colptr: Any,
    input_nodes: Any,
    sample_sizes: Sequence[int],
    sorted_eids: Any = None,
    return_eids: bool = False,
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """Neighbours, their neighbours and so on, with nodes numbered from 0: hop k samples sample_sizes[k] of each node.

    row [edges] and colptr [nodes + 1] are the graph in compressed columns. A node's neighbours are sampled once, in the
    hop that first meets it. Returns the edges' sources and destinations [sampled, 1] in the new numbers, the nodes that
    the numbers stand for (input_nodes first), the numbers of input_nodes, and, with return_eids, the edges' ids from
    sorted_eids. Raises ShapeError, ConfigError or IndexError.
    """
    what = "graph_khop_sampler"
    if return_eids and sorted_eids is None:
        raise ConfigError(f"{what}: return_eids=True needs sorted_eids, the ids of the edges in row")
    if not len(sample_sizes) or any(size < -1 for size in sample_sizes):
        raise ConfigError(
            f"{what}: sample_sizes={list(sample_sizes)}; give one size for each hop, -1 for all neighbours"
        )
    graph, start = NeighborGraph(what, row, colptr), column(what, "input_nodes", input_nodes)
    frontier = met = np.unique(start) if len(np.unique(start)) < len(start) else start
    edges, ends = [], []
    for size in sample_sizes:
        chosen, counts = drawn(graph, frontier, size, what)
        edges.append(chosen)
        ends.append(np.repeat(frontier, counts))
        found = graph.row[chosen]
        frontier = np.setdiff1d(found, met)
        met = np.concatenate([met, frontier])
    chosen, dst = np.concatenate(edges), np.concatenate(ends)
    nodes, number = numbered(np.concatenate([start, graph.row[chosen], dst]))
    own, src, into = np.split(number, [len(start), len(start) + len(chosen)])
    ids = graph.row.dtype
    result = [src[:, None], into[:, None], nodes, own]
    if return_eids:
        eids = column(what, "sorted_eids", sorted_eids)
        if len(eids) != len(graph.row):
            raise ShapeError(f"{what}: sorted_eids has {len(eids)} ids for {len(graph.row)} edges")
        result.append(eids[chosen][:, None])
    return tuple(to_tensor(r.astype(ids)) for r in result)
