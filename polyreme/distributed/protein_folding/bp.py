"""Branch parallelism as HelixFold's scripts say it. They choose a branch by rank; here a script has all of them, and
`distributed.branches` gives them devices of their own."""

from __future__ import annotations

from typing import Any


def get_world_size() -> int:
    """1: a script runs all branches."""
    return 1


def get_rank_in_group() -> int:
    """0: a script runs all branches."""
    return 0


def broadcast_grad_for_backward(input: Any, src: int) -> Any:
    """input: its gradient is the same on all devices."""
    return input


def sync_evoformer_results(outer: Any, msa: Any, pair: Any) -> tuple[Any, Any]:
    """(msa, pair + outer): what a block gives, from the results of its two branches."""
    return msa, pair + outer


def all_reduce(tensor: Any) -> Any:
    """tensor: it is a sum over all devices already."""
    return tensor


def grad_sync(param_groups: Any) -> None:
    """Does nothing: gradients are sums over all devices already."""
