"""Nodes of a sampled graph numbered from 0. On the host: how many there are is a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ShapeError
from polyreme.geometric.sampling import column


def numbered(nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(each node once, in the order they first appear; for each of the given its number in that order)."""
    unique, first, inverse = np.unique(nodes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return unique[order], number[inverse]


def _reindex(what: str, x: Any, neighbors: Sequence[Any], count: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    nodes = column(what, "x", x)
    if len(np.unique(nodes)) < len(nodes):
        raise ShapeError(f"{what}: x holds a node twice; make it unique")
    neighbor_ids, counts = (
        [column(what, name, values) for values in columns]
        for name, columns in (("neighbors", neighbors), ("count", count))
    )
    for row, number in zip(neighbor_ids, counts, strict=True):
        if len(number) % max(len(nodes), 1) or number.sum() != len(row):
            raise ShapeError(
                f"{what}: count adds up to {number.sum()} over {len(number)} entries; needs one for each of "
                f"{len(nodes)} nodes, adding up to the {len(row)} neighbors"
            )
    out, number = numbered(np.concatenate([nodes, *neighbor_ids]))
    dst = [np.repeat(np.arange(len(number)) % max(len(nodes), 1), number) for number in counts]
    dtype = nodes.dtype
    return (
        to_tensor(number[len(nodes) :].astype(dtype)),
        to_tensor(np.concatenate(dst).astype(dtype)),
        to_tensor(out.astype(dtype)),
    )


def reindex_graph(
    x: Any, neighbors: Any, count: Any, value_buffer: Any = None, index_buffer: Any = None, name: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges of the nodes x [n] and their neighbors, with nodes numbered from 0: (sources, destinations, nodes).

    neighbors lie node after node, count [n] says how many each has; a longer count starts with x again, for edges of
    another kind. nodes holds x, then what else appears, in order: its places are the new numbers. The buffers are room
    for another implementation, which this one does not need. Raises ShapeError, also for a node twice in x.

    >>> import polyreme as paddle
    >>> src, dst, nodes = reindex_graph(*(paddle.to_tensor(v) for v in ([0, 5], [8, 0, 5], [2, 1])))
    >>> src.tolist(), dst.tolist(), nodes.tolist()
    ([2, 0, 1], [0, 0, 1], [0, 5, 8])
    """
    return _reindex("reindex_graph", x, [neighbors], [count])


def reindex_heter_graph(
    x: Any,
    neighbors: Sequence[Any],
    count: Sequence[Any],
    value_buffer: Any = None,
    index_buffer: Any = None,
    name: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """reindex_graph for edges of several kinds: lists of neighbors and of counts, one of each kind, joined in order."""
    if len(neighbors) != len(count) or not len(count):
        raise ShapeError(f"reindex_heter_graph: {len(neighbors)} neighbors, {len(count)} counts; give as many of each")
    return _reindex("reindex_heter_graph", x, neighbors, count)
