"""Numbers of tokens that each process sends to the experts of the others, and which tokens fit."""

from __future__ import annotations

from typing import Any

from polyreme.distributed.communication import alltoall_single
from polyreme.distributed.communication.group import Group, resolve
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError
from polyreme.ops.creation import empty_like, full
from polyreme.ops.experts.counts import assign_pos, number_count, prune_gate_by_capacity
from polyreme.ops.experts.counts import limit_by_capacity as limit_counts
from polyreme.ops.scan import cumsum


def count_by_gate(
    gate: Any, num_expert: int, world_size: int, require_pos: bool = True, group: Group | None = None
) -> tuple[Any, Any, Any]:
    """(positions, own counts, counts that come here) of choices among num_expert experts of each of world_size
    processes.

    positions: assign_pos of the choices, None without require_pos. Own counts [world_size * num_expert] say how many
    go to each expert of each process, the others how many come from each process for each expert here; they are the
    same for one process. Raises ConfigError for a group of another size.

    >>> from polyreme.eager.tensor import to_tensor
    >>> positions, counts, _ = count_by_gate(to_tensor([[0, 2], [0, 1]]), 3, 1)
    >>> positions.tolist(), counts.tolist()
    ([2, 0, 3, 1], [2, 1, 1])
    """
    members = check_processes("count_by_gate", world_size, group)
    with no_grad():
        counts = number_count(gate, num_expert * world_size)
        positions = assign_pos(gate, cumsum(counts, 0)) if require_pos else None
        return positions, counts, _exchange(counts, members)


def limit_by_capacity(
    topk_idx: Any, num_expert: int, world_size: int, capacity: int, group: Group | None = None
) -> tuple[Any, Any, Any]:
    """(own counts, counts that come here, choices) of count_by_gate, of which an expert takes at most `capacity`.

    The first in order of processes, then of tokens, are taken; a choice that is not becomes -1.

    >>> from polyreme.eager.tensor import to_tensor
    >>> limit_by_capacity(to_tensor([[0], [1], [0], [0]]), 2, 1, 2)[2].tolist()
    [[0], [1], [0], [-1]]
    """
    members = check_processes("limit_by_capacity", world_size, group)
    with no_grad():
        _, _, comes = count_by_gate(topk_idx, num_expert, world_size, False, group)
        fits = limit_counts(comes, full([num_expert], capacity, comes.dtype), world_size)
        goes = _exchange(fits, members)
        return goes, fits, prune_gate_by_capacity(topk_idx, goes, num_expert, world_size)


def check_processes(what: str, world_size: int, group: Group | None) -> Group | None:
    """The group of world_size processes, None for one. Raises ConfigError for a group of others, or of mesh axes."""
    if world_size == 1:
        return None
    members = resolve(group, what)
    if members is None or members.axes:
        raise ConfigError(
            f"{what}: world_size={world_size} over {'mesh axes' if members else 'a group without this process'}; needs "
            "a group of processes, which hold rows of their own. A Tensor over mesh axes is global: give world_size=1, "
            "and all experts"
        )
    if members.nranks != world_size:
        raise ConfigError(
            f"{what}: world_size={world_size}, but group {members.name} has {members.nranks} members; give its size"
        )
    return members


def _exchange(counts: Any, members: Group | None) -> Any:
    """The counts of the other processes for this process's experts."""
    if members is None:
        return counts
    received = empty_like(counts)
    alltoall_single(received, counts, group=members)
    return received
