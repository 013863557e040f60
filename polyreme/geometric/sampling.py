"""Neighbours of nodes, all or a random choice of them, read off a graph in compressed columns. On the host.

The neighbours of node i are row[colptr[i]:colptr[i + 1]]. Numbers follow from polyreme.seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core import rng, state
from polyreme.core.op import recorded
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, ShapeError


def column(what: str, name: str, value: Any) -> np.ndarray:
    """A Tensor [n] or [n, 1] on the host, as [n]. Raises ShapeError for another shape."""
    array = state.host(value, f"{what}, which chooses on the host,")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ShapeError(f"{what}: {name} {list(array.shape)} must be [n] or [n, 1]")
    return array


class NeighborGraph:
    """A graph in compressed columns on the host, checked."""

    row: np.ndarray
    colptr: np.ndarray

    def __init__(self, what: str, row: Any, colptr: Any) -> None:
        self.row, self.colptr = column(what, "row", row), column(what, "colptr", colptr)
        ends = self.colptr
        if not len(ends) or ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > len(self.row):
            raise ShapeError(f"{what}: colptr must rise from 0 to at most {len(self.row)}, the number of edges in row")

    def edges_of(self, what: str, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(edges of all these nodes, node after node; how many each has). Raises IndexError for no such node."""
        count = len(self.colptr) - 1
        if nodes.size and (nodes.min() < 0 or nodes.max() >= count):
            raise IndexError(f"{what}: input_nodes go from {nodes.min()} to {nodes.max()}; the graph has {count} nodes")
        starts = self.colptr[nodes].astype(np.int64)
        counts = self.colptr[nodes + 1].astype(np.int64) - starts
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(starts, counts) + within, counts


def choose(counts: np.ndarray, size: int, priority: np.ndarray) -> np.ndarray:
    """Of groups of elements that lie one after another, the `size` of highest priority in each, in their order."""
    group = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((-priority, group))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(order[rank < size])


def _generator() -> np.random.Generator:
    return np.random.default_rng(rng.default_generator.random())


def _check(what: str, sample_size: int, eids: Any, return_eids: bool) -> None:
    if sample_size < -1 or isinstance(sample_size, bool):
        raise ConfigError(f"{what}: sample_size={sample_size!r}; give the number of neighbours, or -1 for all")
    if return_eids and eids is None:
        raise ConfigError(f"{what}: return_eids=True needs eids, the ids of the edges in row")


def drawn(
    graph: NeighborGraph, nodes: np.ndarray, size: int, what: str, weight: np.ndarray | None = None
) -> tuple[Any, ...]:
    """(edges chosen, how many for each node); with weights, an edge is drawn in proportion to its own."""
    edges, counts = graph.edges_of(what, nodes)
    if size < 0 or not len(edges) or counts.max() <= size:
        return edges, counts
    uniform = 1.0 - _generator().random(len(edges))
    if weight is not None:
        # the largest u^(1/w) are a sample without replacement; Efraimidis and Spirakis, doi:10.1016/j.ipl.2005.11.003
        with np.errstate(divide="ignore"):
            uniform = np.log(uniform) / weight[edges]
    return edges[choose(counts, size, uniform)], np.minimum(counts, size)


@recorded
def sample_neighbors(
    row: Any,
    colptr: Any,
    input_nodes: Any,
    sample_size: int = -1,
    eids: Any = None,
    return_eids: bool = False,
    perm_buffer: Any = None,
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """Up to sample_size neighbours of each node, chosen evenly without replacement; -1 takes all.

    row [edges] and colptr [nodes + 1] are the graph in compressed columns. Returns the neighbours, node after node, how
    many each node has (int32), and, with return_eids, the ids (from eids [edges]) of the edges to them. perm_buffer is
    room for another implementation, which this one does not need.

    >>> import polyreme as paddle
    >>> row, colptr = paddle.to_tensor([3, 7, 0, 9, 1]), paddle.to_tensor([0, 2, 4, 5])
    >>> [t.tolist() for t in sample_neighbors(row, colptr, paddle.to_tensor([2, 0]))]
    [[1, 3, 7], [1, 2]]
    """
    return _sample("sample_neighbors", row, colptr, None, input_nodes, sample_size, eids, return_eids)


@recorded
def weighted_sample_neighbors(
    row: Any,
    colptr: Any,
    edge_weight: Any,
    input_nodes: Any,
    sample_size: int = -1,
    eids: Any = None,
    return_eids: bool = False,
    name: str | None = None,
) -> tuple[Tensor, ...]:
    """sample_neighbors where an edge is drawn in proportion to edge_weight [edges], not below 0."""
    return _sample("weighted_sample_neighbors", row, colptr, edge_weight, input_nodes, sample_size, eids, return_eids)


def _sample(
    what: str, row: Any, colptr: Any, edge_weight: Any, input_nodes: Any, size: int, eids: Any, return_eids: bool
) -> tuple[Tensor, ...]:
    _check(what, size, eids, return_eids)
    graph, nodes = NeighborGraph(what, row, colptr), column(what, "input_nodes", input_nodes)
    weight = None
    if edge_weight is not None:
        weight = column(what, "edge_weight", edge_weight).astype(np.float64)
        if len(weight) != len(graph.row) or (weight < 0).any():
            raise ShapeError(f"{what}: edge_weight needs one weight, not below 0, for each of {len(graph.row)} edges")
    edges, counts = drawn(graph, nodes, size, what, weight)
    results = [to_tensor(graph.row[edges]), to_tensor(counts.astype(np.int32))]
    if return_eids:
        ids = column(what, "eids", eids)
        if len(ids) != len(graph.row):
            raise ShapeError(f"{what}: eids has {len(ids)} ids for {len(graph.row)} edges")
        results.append(to_tensor(ids[edges]))
    return tuple(results)
