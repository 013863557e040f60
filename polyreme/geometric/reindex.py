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


def _reindexed(what: str, x: Any, neighbors: Sequence[Any], count: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    nodes = column(what, "x", x)
    if len(np.unique(nodes)) < len(nodes):
        raise ShapeError(f"{what}: x holds a node twice; make it unique")
    found, counts = (
        [column(what, name, each) for each in given] for name, given in (("neighbors", neighbors), ("count", count))
    )
    for each, number in zip(found, counts, strict=True):
        if len(number) % max(len(nodes), 1) or number.sum() != len(each):
            raise ShapeError(
                f"{what}: count adds up to {number.sum()} over {len(number)} entries; needs one for each of "
                f"{len(nodes)} nodes, adding up to the {len(each)} neighbors"
            )
    out, number = numbered(np.concatenate([nodes, *found]))
    dst = [np.repeat(np.arange(len(each)) % max(len(nodes), 1), each) for each in counts]
    ids = nodes.dtype
    return (
        to_tensor(number[len(nodes) :].astype(ids)),
        to_tensor(np.concatenate(dst).astype(ids)),
        to_tensor(out.astype(ids)),
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
    return _reindexed("reindex_graph", x, [neighbors], [count])


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
    return _reindexed("reindex_heter_graph", x, neighbors, count)
